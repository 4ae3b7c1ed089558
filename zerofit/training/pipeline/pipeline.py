"""Pipeline: the ranks that each hold one stage of a model, and the forward passes that they run together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from zerofit.core.errors import UserError
from zerofit.training.pipeline.stages import run_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_NOT_PASSED_ON = (
    "use_cache",
    "past_key_values",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
)
"""Arguments of a forward pass that stages do without: nothing is kept from one pass to the next."""
_IGNORED = -100
"""Labels that transformers' losses leave out."""
_PASSES_PER_STAGE = 4
"""ASSUMPTION: forward passes per stage in a step, where no micro-batch size is given. The share of time in
which a stage waits is (stages - 1) / (passes + stages - 1), 20 % for 4 per stage; more make smaller products
of matrices."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a rank. Ranks of one pipeline are consecutive."""

    pipeline: Any
    """The stages of one copy of the model."""
    replicas: Any
    """The same stage of every copy."""
    ends: Any
    """The first and the last stage of one copy, which share tied embeddings."""
    stage: int
    num_stages: int

    @property
    def first_rank(self) -> int:
        """The rank of the first stage of this copy of the model."""
        return int(dist.get_global_rank(self.pipeline, 0))

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return int(dist.get_global_rank(self.pipeline, self.num_stages - 1))

    @property
    def is_last(self) -> bool:
        """True if this rank holds the head."""
        return self.stage == self.num_stages - 1


def make_groups(num_stages: int) -> Groups:
    """Make the process groups; all ranks call it."""
    pipeline, _ = dist.new_subgroups(group_size=num_stages)
    ranks = range(dist.get_world_size())
    replicas, _ = dist.new_subgroups_by_enumeration(
        [list(ranks[stage::num_stages]) for stage in range(num_stages)]
    )
    firsts = ranks[::num_stages]
    ends, _ = dist.new_subgroups_by_enumeration([[first, first + num_stages - 1] for first in firsts])
    return Groups(pipeline, replicas, ends, dist.get_rank() % num_stages, num_stages)


@dataclass
class Pipeline:
    """One rank's stage of a model, and what runs it beside the other stages."""

    model: Any
    """The model, cut down to this stage."""
    forward: Callable[..., Any]
    """The model's own forward()."""
    groups: Groups
    rows_per_pass: int | None
    """Rows of one forward pass; None to take a number of passes by the stages."""
    tied: torch.nn.Parameter | None
    """The embedding that the first and the last stage both hold; None on other stages."""
    accelerator: Any = None
    """The Accelerator that says when gradients are exchanged; None exchanges them in each backward pass."""
    _waiting: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Gradients of passes that are accumulated and not exchanged yet."""
    _num_items: float = 0.0
    """Labels that the loss of the pass under way is a mean over."""
    _key: Any = None
    _schedule: Any = None
    _hidden_dtype: dict[Any, torch.dtype] = field(default_factory=dict)

    def __call__(self, input_ids: torch.Tensor | None = None, labels: Any = None, **inputs: Any) -> Any:
        """Run a forward pass of all stages, and in training their backward pass too.

        Args:
            input_ids: shape (rows, tokens); the same on all ranks of the pipeline.
            labels: shape (rows, tokens).
            inputs: other arguments of the model's forward pass.

        Returns:
            The model's output. In training it has the loss alone, whose backward() adds the gradients.
        """
        if input_ids is None:
            raise TypeError("a pipeline takes input_ids: the embeddings are on its first stage")
        inputs = {name: value for name, value in inputs.items() if value is not None}
        for name in _NOT_PASSED_ON:
            inputs.pop(name, None)
        self._check_same(input_ids)
        if torch.is_grad_enabled() and labels is not None:
            return self._train(input_ids, labels, inputs)
        if torch.is_grad_enabled() and self.model.training:
            raise _needs_labels(self.model)
        return self._evaluate(input_ids, labels, inputs)

    def _check_same(self, input_ids: torch.Tensor) -> None:
        """Check that all stages have the same batch: each shuffles by itself, by its own random state.

        Raises:
            UserError: they have different ones.
        """
        total = input_ids.sum()
        ends = torch.stack((total, -total))
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.groups.pipeline)
        if ends[0] != -ends[1]:
            raise UserError(
                "pipeline-batches-differ",
                "the stages of a pipeline have different batches",
                found=f"token ids that sum to {int(-ends[1])} on one rank and to {int(ends[0])} on another",
                why="tokens of one batch would be trained against the labels of another",
                fix="shuffle alike on all ranks: set_seed() before the DataLoader is made, and "
                "DataLoaderConfiguration(use_seedable_sampler=True)",
            )

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return the parameters of this stage that train."""
        return (one for one in self.model.parameters() if one.requires_grad)

    def _train(self, input_ids: torch.Tensor, labels: torch.Tensor, inputs: dict[str, Any]) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        num_items = inputs.pop("num_items_in_batch", None)
        if num_items is None:
            num_items = (labels[..., 1:] != _IGNORED).sum()
        schedule = self._schedule_for(input_ids)
        before = [(one, one.grad) for one in self.parameters()]
        for one, _ in before:
            one.grad = None
        losses: list[torch.Tensor] = []
        first = (input_ids,) if self.groups.stage == 0 else ()
        self._num_items = float(num_items)
        schedule.step(*first, target=labels, losses=losses, return_outputs=False, labels=labels, **inputs)
        loss = torch.zeros((), device=input_ids.device)
        if self.groups.is_last:
            loss = torch.stack([one.detach().float() for one in losses]).sum()
        dist.broadcast(loss, self.groups.last_rank, group=self.groups.pipeline)
        gradients = [(one, one.grad) for one, _ in before if one.grad is not None]
        for one, earlier in before:
            one.grad = earlier
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return CausalLMOutputWithPast(loss=_Loss.apply(loss, anchor, gradients, self.take_gradients))

    def take_gradients(self, gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Add a pass's gradients to the parameters', once they are exchanged.

        Those of tied embeddings are summed over their stages, and all are averaged over the model's copies.
        While the Accelerator accumulates they wait: an exchange for each pass would be for nothing.
        """
        for one, gradient in gradients:
            waiting = self._waiting.pop(one, None)
            self._waiting[one] = gradient if waiting is None else waiting.add_(gradient)
        if self.accelerator is not None and not self.accelerator.sync_gradients:
            return
        gradients, self._waiting = list(self._waiting.items()), {}
        if self.tied is not None:
            for one, gradient in gradients:
                if one is self.tied:
                    dist.all_reduce(gradient, group=self.groups.ends)
        copies = dist.get_world_size(self.groups.replicas)
        if copies > 1:
            works = [
                dist.all_reduce(gradient, group=self.groups.replicas, async_op=True)
                for _, gradient in gradients
            ]
            for work in works:
                work.wait()
        for one, gradient in gradients:
            gradient.div_(copies)
            one.grad = gradient if one.grad is None else one.grad.add_(gradient)

    def norm(
        self, parameters: Iterable[torch.nn.Parameter], norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Return the norm of the gradients of all stages, tied embeddings once; all ranks call it.

        Args:
            parameters: of this stage.
            norm_type: its exponent; inf for the largest.
            error_if_nonfinite: True to raise where it is inf or NaN.
        """
        skipped = self.tied if self.groups.is_last else None
        own = [one.grad for one in parameters if one is not skipped and one.grad is not None]
        norm = torch.nn.utils.get_total_norm(own, norm_type).float().reshape(())
        if norm_type == math.inf:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.groups.pipeline)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self.groups.pipeline)
            norm = norm ** (1 / norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"The total norm of order {norm_type} of the gradients is {norm.item()}")
        return norm

    def _schedule_for(self, input_ids: torch.Tensor) -> Any:
        """Return the schedule for batches of this shape: stages must know the shapes of what they receive."""
        rows, tokens = input_ids.shape
        passes = self._num_passes(rows)
        dtype = self._dtype(input_ids.device)
        key = (rows, tokens, passes, dtype)
        if self._key != key:
            hidden = torch.empty(
                rows // passes,
                tokens,
                self.model.config.hidden_size,
                dtype=dtype,
                device="meta",
                requires_grad=True,
            )
            received = input_ids[: rows // passes].to("meta") if self.groups.stage == 0 else hidden
            loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
            stage = PipelineStage(
                _StageModule(self),
                self.groups.stage,
                self.groups.num_stages,
                input_ids.device,
                input_args=received,
                output_args=loss if self.groups.is_last else hidden,
                group=self.groups.pipeline,
            )
            schedule = Schedule1F1B if passes >= self.groups.num_stages else ScheduleGPipe
            self._schedule = schedule(stage, passes, loss_fn=lambda loss, labels: loss, scale_grads=False)
            self._key = key
        return self._schedule

    def _num_passes(self, rows: int) -> int:
        """Return into how many equal micro-batches a batch is cut."""
        most = (
            rows // self.rows_per_pass if self.rows_per_pass else _PASSES_PER_STAGE * self.groups.num_stages
        )
        if self.rows_per_pass:
            return next(passes for passes in range(max(most, 1), rows + 1) if rows % passes == 0)
        return next(passes for passes in range(min(most, rows), 0, -1) if rows % passes == 0)

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Return the format of the hidden states, which autocast may change."""
        key = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        if key not in self._hidden_dtype:
            formats = [torch.float32, torch.bfloat16, torch.float16]
            number = torch.zeros(1, dtype=torch.int64, device=device)
            if self.groups.stage == 0:
                with torch.no_grad():
                    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
                    number += formats.index(self._run(tokens).dtype)
            dist.broadcast(number, self.groups.first_rank, group=self.groups.pipeline)
            self._hidden_dtype[key] = formats[int(number)]
        return self._hidden_dtype[key]

    def _run(self, received: torch.Tensor, **inputs: Any) -> Any:
        return run_stage(
            self.model, self.forward, self.groups.stage, self.groups.num_stages, received, **inputs
        )

    def _evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor | None, inputs: dict[str, Any]) -> Any:
        """Run the stages one after another, and give all ranks the logits and the loss."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        groups, device = self.groups, input_ids.device
        rows, tokens = input_ids.shape
        received = input_ids
        with torch.no_grad():
            if groups.stage > 0:
                received = torch.empty(
                    rows, tokens, self.model.config.hidden_size, dtype=self._dtype(device), device=device
                )
                dist.recv(received, group=groups.pipeline, group_src=groups.stage - 1)
            else:
                self._dtype(device)
            output = self._run(received, labels=labels, **inputs)
            if not groups.is_last:
                dist.send(output.contiguous(), group=groups.pipeline, group_dst=groups.stage + 1)
        header: list[Any] = [(tuple(output.logits.shape), output.logits.dtype)] if groups.is_last else [None]
        dist.broadcast_object_list(header, groups.last_rank, group=groups.pipeline)
        shape, dtype = header[0]
        logits = (
            output.logits.contiguous() if groups.is_last else torch.empty(shape, dtype=dtype, device=device)
        )
        dist.broadcast(logits, groups.last_rank, group=groups.pipeline)
        loss = None
        if labels is not None:
            loss = output.loss.detach().float() if groups.is_last else torch.zeros((), device=device)
            dist.broadcast(loss, groups.last_rank, group=groups.pipeline)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def _needs_labels(model: Any) -> UserError:
    return UserError(
        "pipeline-needs-labels",
        "a training pass of a pipeline needs labels",
        found=f"{type(model).__name__} called in training without labels",
        why="the last stage computes the loss, and the backward pass follows at once",
        fix="pass labels to the model and use its loss; label smoothing and other losses of the script's own "
        "can't be used",
    )


class _StageModule(torch.nn.Module):  # type: ignore[misc]
    """A stage as torch's schedules call it: hidden states in and out, on the last stage the loss out."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.model = pipeline.model
        self._pipeline = [pipeline]

    def forward(self, received: torch.Tensor, **inputs: Any) -> torch.Tensor:
        pipeline = self._pipeline[0]
        output = pipeline._run(received, num_items_in_batch=pipeline._num_items, **inputs)
        return output.loss.float() if pipeline.groups.is_last else output


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    """The loss of a pass whose gradients are there already: backward() scales them and hands them on."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, anchor: torch.Tensor, gradients: Any, take: Callable[[Any], None]
    ) -> torch.Tensor:
        ctx.gradients, ctx.take = gradients, take
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        ctx.take([(one, gradient.mul_(scale.to(gradient.dtype))) for one, gradient in gradients])
        return None, None, None, None
