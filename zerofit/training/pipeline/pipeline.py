"""Pipeline: a rank's stages of a model, and the forward and backward passes over all stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from zerofit.core.errors import UserError
from zerofit.data.labels import IGNORED
from zerofit.models.changes.stages import modules_replaced, refuse_router_loss, run_stage
from zerofit.training.pipeline.batches import check_same_batch, micro_batches_of, pad_batch
from zerofit.training.pipeline.outputs import LossOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.models.changes.stages import Replacement
    from zerofit.training.changes import Changes
    from zerofit.training.pipeline.groups import Groups

_DROPPED_ARGUMENTS = ("use_cache", "past_key_values", "return_dict")
"""Arguments of a forward pass that stages don't get: there is no KV cache."""
_PER_LAYER_OUTPUTS = ("output_attentions", "output_hidden_states")
"""Arguments that request outputs of all blocks, of which each stage only has its own."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of hidden states and logits; ranks send the index."""


@dataclass
class Pipeline:
    """One rank's stages of a model, and the passes over all stages."""

    model: Any
    """The model, reduced to this rank's stages."""
    num_stages: int
    """Of the whole pipeline."""
    stages: dict[int, list[Replacement]]
    """This rank's stages by number, each with the replacements of its other stages' modules."""
    forward: Callable[..., Any]
    """The model's own forward()."""
    groups: Groups
    changes: Changes
    most_rows: int | None
    """Maximum rows per micro-batch; None chooses the number of micro-batches by the ranks."""
    tied: torch.nn.Parameter | None
    """The embedding that the first and the last stage both hold; None on other ranks."""
    accelerator: Any = None
    """The Accelerator, which knows when gradients are synchronized; None does it in each backward pass."""
    gives_logits: bool = True
    """False while a Trainer evaluates only the loss: logits then stay on the last stage."""
    _unreduced: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Accumulated gradients that are not all-reduced yet."""
    _num_items: float = 0.0
    """Labels that the current pass's loss is averaged over."""
    _schedule_key: Any = None
    _schedule: Any = None
    _hidden_dtypes: dict[Any, torch.dtype] = field(default_factory=dict)

    def __call__(self, input_ids: torch.Tensor | None = None, labels: Any = None, **inputs: Any) -> Any:
        """Run a forward pass of all stages, and in training also their backward pass.

        Args:
            input_ids: shape (rows, tokens); the same on all ranks of the pipeline.
            labels: shape (rows, tokens).
            inputs: other arguments of the model's forward pass.

        Returns:
            The model's output; in training only the loss, whose backward() accumulates the gradients.
        """
        inputs = {name: value for name, value in inputs.items() if value is not None}
        self._check(input_ids, inputs)
        for name in (*_DROPPED_ARGUMENTS, *_PER_LAYER_OUTPUTS):
            inputs.pop(name, None)
        assert input_ids is not None
        compared = {**inputs, "input_ids": input_ids} | ({} if labels is None else {"labels": labels})
        check_same_batch(compared, self.groups)
        if torch.is_grad_enabled() and labels is not None:
            return self._train(input_ids, labels, inputs)
        if torch.is_grad_enabled() and self.model.training:
            raise _needs_labels(self.model)
        return self._evaluate(input_ids, labels, inputs)

    def _check(self, input_ids: torch.Tensor | None, inputs: dict[str, Any]) -> None:
        if input_ids is None:
            raise UserError(
                "pipeline-needs-input-ids",
                "a pipeline needs input_ids",
                found=f"{type(self.model).__name__} called without input_ids",
                why="only the first stage has embeddings",
                fix="pass input_ids instead of inputs_embeds, or train without --pipeline-parallel-size",
            )
        if requested := [name for name in _PER_LAYER_OUTPUTS if inputs.get(name)]:
            raise UserError(
                "pipeline-inner-values",
                "a pipeline returns no hidden states or attentions",
                found=f"{requested[0]}=True",
                why="each stage only has those of its own blocks",
                fix=f"leave {requested[0]} out, or train without --pipeline-parallel-size",
            )
        refuse_router_loss(self.model, inputs)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return the trainable parameters of this rank's stages."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def _train(self, input_ids: torch.Tensor, labels: torch.Tensor, inputs: dict[str, Any]) -> Any:
        device = input_ids.device
        if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16:
            raise fp16_refusal("autocast to float16")
        if not self.model.training:
            self.changes.add(
                "forward passes of the model in eval(), with labels and outside torch.no_grad(), ran the "
                "backward pass too, and returned the loss without logits",
                once="pipeline in eval()",
            )
        num_items = inputs.pop("num_items_in_batch", None)
        self._num_items = float((labels[..., 1:] != IGNORED).sum() if num_items is None else num_items)
        rows, tokens = input_ids.shape
        num_micro_batches, size = micro_batches_of(
            rows,
            most_rows=self.most_rows,
            num_ranks=self.groups.num_ranks,
            is_interleaved=len(self.stages) > 1,
        )
        missing = num_micro_batches * size - rows
        padding = f", padded by {missing} ignored rows" if missing else ""
        self.changes.add(
            f"a batch of {rows} rows runs in {num_micro_batches} micro-batches of {size}{padding}",
            once="pipeline micro-batches",
        )
        padded = pad_batch({**inputs, "input_ids": input_ids, "labels": labels}, rows, missing=missing)
        input_ids, labels = padded.pop("input_ids"), padded.pop("labels")
        schedule = self._schedule_for(num_micro_batches, size, tokens, device)
        before = [(parameter, parameter.grad) for parameter in self.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        losses: list[torch.Tensor] = []
        first = (input_ids,) if 0 in self.stages else ()
        schedule.step(*first, target=labels, losses=losses, labels=labels, **padded)
        loss = torch.zeros((), device=device)
        if self.groups.is_last:
            loss = torch.stack([part.detach() for part in losses]).sum()
        dist.broadcast(loss, self.groups.last_rank, group=self.groups.pipeline)
        gradients = [(parameter, parameter.grad) for parameter, _ in before if parameter.grad is not None]
        for parameter, earlier in before:
            parameter.grad = earlier
        anchor = torch.zeros((), device=device, requires_grad=True)
        return LossOutput(loss=_ComputedLoss.apply(loss, anchor, gradients, self.accumulate_gradients))

    def accumulate_gradients(self, gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """All-reduce a pass's gradients and add them to the parameters'.

        They are averaged over the replicas, then those of tied embeddings are summed over the first and the
        last stage: in this order all copies are bitwise equal. While the Accelerator accumulates, gradients
        are only summed locally.
        """
        for parameter, gradient in gradients:
            earlier = self._unreduced.pop(parameter, None)
            self._unreduced[parameter] = gradient if earlier is None else earlier.add_(gradient)
        if self.accelerator is not None and not self.accelerator.sync_gradients:
            return
        reduced, self._unreduced = self._unreduced, {}
        num_replicas = dist.get_world_size(self.groups.replicas)
        if num_replicas > 1:
            reduced = self._with_zeros_for_missing(reduced)
            works = [
                dist.all_reduce(gradient, group=self.groups.replicas, async_op=True)
                for gradient in reduced.values()
            ]
            for work in works:
                work.wait()
        if self.tied is not None and self.tied.requires_grad:
            dist.all_reduce(reduced[self.tied], group=self.groups.ends)
        for parameter, gradient in reduced.items():
            gradient.div_(num_replicas)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _with_zeros_for_missing(self, gradients: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return gradients of all parameters that have one on any replica, zeros if this one has none.

        An expert that receives no token on one replica may have a gradient on the others.
        """
        own = list(self.parameters())
        has = torch.tensor(
            [parameter in gradients for parameter in own], dtype=torch.uint8, device=self._device
        )
        if own:
            dist.all_reduce(has, dist.ReduceOp.MAX, group=self.groups.replicas)
        somewhere = [parameter for parameter, is_there in zip(own, has.tolist(), strict=True) if is_there]
        return {
            parameter: gradients[parameter] if parameter in gradients else torch.zeros_like(parameter)
            for parameter in somewhere
        }

    def norm(
        self, parameters: Iterable[torch.nn.Parameter], norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Return the gradient norm over all stages, with tied embeddings counted once; all ranks call it.

        Args:
            parameters: this rank's; empty if all are frozen.
            norm_type: the exponent; inf for the maximum.
            error_if_nonfinite: whether to raise an error if it is inf or NaN.
        """
        skipped = self.tied if self.groups.is_last else None
        own = [
            parameter.grad
            for parameter in parameters
            if parameter is not skipped and parameter.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(own, norm_type).float().reshape(()).to(self._device)
        if norm_type == math.inf:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.groups.pipeline)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self.groups.pipeline)
            norm = norm ** (1 / norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"The total norm of order {norm_type} of the gradients is {norm.item()}")
        return norm

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _schedule_for(self, num_micro_batches: int, size: int, tokens: int, device: torch.device) -> Any:
        """Return the schedule for batches of this shape, since stages need the shapes of their inputs."""
        dtype = self._hidden_dtype(device)
        key = (num_micro_batches, size, tokens, dtype)
        if self._schedule_key != key:
            shape = (size, tokens, self.model.config.hidden_size)
            hidden = torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)
            ids = torch.empty(size, tokens, dtype=torch.int64, device="meta")
            loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
            stages = [
                PipelineStage(
                    _StageModule(self, number),
                    number,
                    self.num_stages,
                    device,
                    input_args=ids if number == 0 else hidden,
                    output_args=loss if number == self.num_stages - 1 else hidden,
                    group=self.groups.pipeline,
                )
                for number in self.stages
            ]
            options: Any = {"loss_fn": lambda loss, _: loss.sum(), "scale_grads": False}
            self._schedule = (
                Schedule1F1B(stages[0], num_micro_batches, **options)
                if len(stages) == 1
                else ScheduleInterleaved1F1B(stages, num_micro_batches, **options)
            )
            self._schedule_key = key
        return self._schedule

    def _hidden_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of the hidden states, which depends on autocast."""
        key = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        if key not in self._hidden_dtypes:
            number = torch.zeros(1, dtype=torch.int64, device=device)
            if 0 in self.stages:
                with torch.no_grad():
                    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
                    number += _DTYPES.index(self._run(0, tokens).dtype)
                torch.clear_autocast_cache()  # as in check_stages()
            dist.broadcast(number, self.groups.first_rank, group=self.groups.pipeline)
            self._hidden_dtypes[key] = _DTYPES[int(number)]
        return self._hidden_dtypes[key]

    def _run(self, stage: int, received: torch.Tensor, **inputs: Any) -> Any:
        with modules_replaced(self.stages[stage]):
            return run_stage(self.model, self.forward, stage, self.num_stages, received, **inputs)

    def _evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor | None, inputs: dict[str, Any]) -> Any:
        """Run the stages in turn, and return the logits and the loss on all ranks."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        groups, device = self.groups, input_ids.device
        dtype = self._hidden_dtype(device)
        output: Any = None
        with torch.no_grad():
            for stage in self.stages:
                received = input_ids
                if stage > 0:
                    shape = (*input_ids.shape, self.model.config.hidden_size)
                    received = torch.empty(*shape, dtype=dtype, device=device)
                    source = (stage - 1) % groups.num_ranks
                    dist.recv(received, group=groups.pipeline, group_src=source)
                output = self._run(stage, received, labels=labels, **inputs)
                if stage < self.num_stages - 1:
                    to = (stage + 1) % groups.num_ranks
                    dist.send(output.contiguous(), group=groups.pipeline, group_dst=to)
        logits = loss = None
        if self.gives_logits or labels is None:
            logits = self._broadcast_logits(output.logits if groups.is_last else None, device)
        if labels is not None:
            loss = output.loss.detach().float() if groups.is_last else torch.zeros((), device=device)
            dist.broadcast(loss, groups.last_rank, group=groups.pipeline)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _broadcast_logits(self, logits: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Return the last stage's logits on all ranks, of shape (rows, tokens, vocabulary)."""
        header = torch.zeros(4, dtype=torch.int64, device=device)
        if logits is not None:
            header.copy_(torch.tensor([*logits.shape, _DTYPES.index(logits.dtype)]))
        dist.broadcast(header, self.groups.last_rank, group=self.groups.pipeline)
        *shape, number = header.tolist()
        found = torch.empty(shape, dtype=_DTYPES[number], device=device) if logits is None else logits
        found = found.contiguous()
        dist.broadcast(found, self.groups.last_rank, group=self.groups.pipeline)
        return found


def fp16_refusal(found: str) -> UserError:
    """Return the error for a script that trains in fp16, which only shows inside the run."""
    return UserError(
        "pipeline-trains-in-fp16",
        "a pipeline can't train in fp16",
        found=found,
        why="its backward pass runs before the loss is scaled, so small gradients underflow",
        fix="train in bf16 or in fp32, or without --pipeline-parallel-size",
    )


def _needs_labels(model: Any) -> UserError:
    return UserError(
        "pipeline-needs-labels",
        "a training pass of a pipeline needs labels",
        found=f"{type(model).__name__} called in training without labels",
        why="the last stage computes the loss, and the backward pass follows immediately",
        fix="pass labels to the model and use its loss; the script can't compute its own, nor use label "
        "smoothing",
    )


class _StageModule(torch.nn.Module):  # type: ignore[misc]
    """A stage for torch's schedules: maps hidden states to hidden states, on the last stage to the loss."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self.model = pipeline.model
        self._pipeline = [pipeline]
        self._stage = stage

    def forward(self, received: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return the hidden states, or the loss of shape (1,), since torch concatenates the last outputs."""
        pipeline = self._pipeline[0]
        output = pipeline._run(self._stage, received, num_items_in_batch=pipeline._num_items, **inputs)
        return output.loss.float().reshape(1) if self._stage == pipeline.num_stages - 1 else output


class _ComputedLoss(torch.autograd.Function):  # type: ignore[misc]
    """The loss of a pass whose gradients are already computed: backward() scales them and passes them on."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, anchor: torch.Tensor, gradients: Any, accumulate: Callable[[Any], None]
    ) -> torch.Tensor:
        ctx.gradients, ctx.accumulate = gradients, accumulate
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        ctx.accumulate(
            [(parameter, gradient.mul_(scale.to(gradient.dtype))) for parameter, gradient in gradients]
        )
        return None, None, None, None
