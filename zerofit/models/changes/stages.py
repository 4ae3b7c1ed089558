"""Pipeline stages: consecutive blocks of a decoder, the first with the embeddings, the last with the head.

Training (training/pipeline) and the tracer (models/trace/parts.py) run stages by the same code, so that
estimates describe what runs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerofit.core.errors import UserError
from zerofit.core.stage_blocks import fill_stages, stages_of_rank, too_few_blocks
from zerofit.core.upstream.transformers import attention_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Replacement = tuple[nn.Module, str, nn.Module]
"""A module, the name of a child, and the child's replacement."""
_PROBE_TOKENS = 4
"""Tokens of the sample on which stages are compared with the whole model."""
_PROBE_TOLERANCE = 1e-4
"""Maximum relative difference of logits: the same operators run in the same order, in fp32 or 16 bits."""


class PassThrough(nn.Module):  # type: ignore[misc]
    """Replaces a module that another rank holds, and returns its first input unchanged.

    Args:
        module: the module, whose plain attributes are copied: models read some, such as `attention_type`.
        returns_tuple: True if the module returns a tuple, as blocks of transformers 5.0 do.
    """

    def __init__(self, module: nn.Module, *, returns_tuple: bool = False) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if isinstance(value, (str, int)) and not name.startswith("_"):
                setattr(self, name, value)
        self._returns_tuple = returns_tuple

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self._returns_tuple else hidden_states


class ZeroEmbedding(nn.Module):  # type: ignore[misc]
    """Replaces position embeddings on later stages, since the first one adds them."""

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=indices.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a decoder-only transformers model that are assigned to stages."""

    base: nn.Module
    """The model without its head."""
    blocks: nn.ModuleList
    before: tuple[str, ...]
    """Children of the base that only the first stage runs: dropout and position embeddings."""
    after: tuple[str, ...]
    """Children of the base that only the last stage runs: the final norm."""


def parts_of(model: nn.Module) -> Parts:
    """Return the parts of a causal language model, found by their structure.

    Raises:
        UserError: the model is not a stack of equal blocks between embeddings and a head.
    """
    base = getattr(model, "base_model", model)
    num_blocks = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    stacks = [
        child
        for child in base.children()
        if isinstance(child, nn.ModuleList)
        and len(child) == num_blocks
        and len({type(block) for block in child}) == 1
    ]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if base is model or len(stacks) != 1 or head is None:
        raise _not_a_pipeline(model, "it is not a stack of equal blocks between embeddings and a head")
    others = [
        name
        for name, child in model.named_children()
        if child not in (base, head) and any(True for _ in child.parameters())
    ]
    if others:
        raise _not_a_pipeline(model, f"it has parts beside the blocks and the head: {', '.join(others)}")
    before, after, is_after = [], [], False
    for name, child in base.named_children():
        if child is stacks[0]:
            is_after = True
        elif child is base.get_input_embeddings():
            continue
        elif isinstance(child, (nn.Dropout, nn.Embedding)):
            before.append(name)
        elif any(True for _ in child.parameters()):
            if not is_after:
                raise _not_a_pipeline(model, f"{name} changes the embeddings before the first block")
            after.append(name)
    return Parts(base=base, blocks=stacks[0], before=tuple(before), after=tuple(after))


def share_blocks(model: nn.Module, num_stages: int, planned: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Assign blocks to stages; return the bounds: the first block of each stage, and the number of blocks.

    The time of blocks and head is assumed to be proportional to their parameters. Minimizes the time of the
    slowest stage.

    Args:
        model: a causal language model.
        num_stages: of the pipeline.
        planned: blocks of each stage, if the plan has them.

    Raises:
        UserError: there are fewer blocks than stages, or the model can't be split, or is not the plan's.
    """
    blocks = parts_of(model).blocks
    if len(blocks) < num_stages:
        raise too_few_blocks(num_stages, len(blocks), model=type(model).__name__)
    if planned and sum(planned) != len(blocks):
        raise UserError(
            "pipeline-of-another-model",
            "the plan's stages are for another model",
            found=f"stages of {planned} blocks, and {type(model).__name__} of {len(blocks)}",
            why="each block must belong to one stage",
            fix="plan again for this script",
        )
    head = _num_parameters(model.get_output_embeddings()) / max(_num_parameters(blocks[0]), 1)
    shared = planned or fill_stages(len(blocks), num_stages, head=head)
    return tuple(accumulate(shared, initial=0))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextlib.contextmanager
def as_stage(
    model: nn.Module, stage: int, bounds: tuple[int, ...], *, returns_tuples: bool = False
) -> Iterator[None]:
    """Reduce a model to one stage inside, without changing the names of parameters.

    Args:
        model: a whole model.
        stage: its number.
        bounds: from share_blocks().
        returns_tuples: True if the blocks return tuples.
    """
    with modules_replaced(_outside(model, (stage,), bounds, returns_tuples=returns_tuples)):
        yield


@contextlib.contextmanager
def modules_replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Replace modules inside."""
    before = [(parent, name, getattr(parent, name)) for parent, name, _ in replacements]
    for parent, name, replacement in replacements:
        setattr(parent, name, replacement)
    try:
        yield
    finally:
        for parent, name, module in before:
            setattr(parent, name, module)


def cut(
    model: nn.Module, stages: Sequence[int], bounds: tuple[int, ...], *, returns_tuples: bool = False
) -> dict[int, list[Replacement]]:
    """Drop the parameters of other ranks' stages.

    Args:
        model: a whole model.
        stages: this rank's.
        bounds: from share_blocks().
        returns_tuples: True if the blocks return tuples.

    Returns:
        For each stage the replacements of the other stages' modules, for modules_replaced() while it runs.
    """
    dropped = _outside(model, stages, bounds, returns_tuples=returns_tuples)
    places = {(id(parent), name) for parent, name, _ in dropped}
    others = {
        stage: [
            module
            for module in _outside(model, (stage,), bounds, returns_tuples=returns_tuples)
            if (id(module[0]), module[1]) not in places
        ]
        for stage in stages
    }
    for parent, name, replacement in dropped:
        setattr(parent, name, replacement)
    return others


def keep_stages(model: nn.Module, place: int, num_ranks: int, planned: tuple[int, ...] = ()) -> None:
    """Reduce a model to one rank's stages for the tracer, which repeats blocks: others' are deleted.

    Args:
        model: a whole model.
        place: the rank's index in its pipeline.
        num_ranks: of the pipeline.
        planned: blocks of each stage; empty for one stage per rank.

    Raises:
        UserError: there are fewer blocks than stages, or the model can't be split.
    """
    num_stages = len(planned) or num_ranks
    bounds, parts = share_blocks(model, num_stages, planned), parts_of(model)
    name = next(name for name, child in parts.base.named_children() if child is parts.blocks)
    stages = stages_of_rank(place, num_stages=num_stages, num_ranks=num_ranks)
    blocks = list(parts.blocks)
    own = [blocks[index] for stage in stages for index in range(bounds[stage], bounds[stage + 1])]
    cut(model, stages, bounds)
    setattr(parts.base, name, nn.ModuleList(own))
    trains = place > 0 or any(
        parameter.requires_grad for parameter in model.get_input_embeddings().parameters()
    )
    firsts = [blocks[bounds[stage]] for stage in stages[1:]]
    for block in own:
        if block in firsts and not trains:
            block.receives = True  # distinguishes it from other blocks for the tracer
            block.register_forward_pre_hook(_receive)
        trains = trains or block in firsts or any(parameter.requires_grad for parameter in block.parameters())


def _receive(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Make hidden states require gradients, as those that a stage receives do."""
    if torch.is_grad_enabled():
        inputs[0].requires_grad_()


def _outside(
    model: nn.Module, stages: Sequence[int], bounds: tuple[int, ...], *, returns_tuples: bool
) -> list[Replacement]:
    """Return the replacements of all modules that some stages don't run."""
    parts, last = parts_of(model), len(bounds) - 2
    own = {index for stage in stages for index in range(bounds[stage], bounds[stage + 1])}
    outside: list[Replacement] = [
        (parts.blocks, str(index), PassThrough(block, returns_tuple=returns_tuples))
        for index, block in enumerate(parts.blocks)
        if index not in own
    ]
    if 0 not in stages:
        for name in parts.before:
            child = getattr(parts.base, name)
            is_embedding = isinstance(child, nn.Embedding)
            outside.append((parts.base, name, ZeroEmbedding() if is_embedding else PassThrough(child)))
    if last not in stages:
        outside += [(parts.base, name, PassThrough(getattr(parts.base, name))) for name in parts.after]
    return outside + _outside_embeddings(model, parts.base, has_first=0 in stages, has_last=last in stages)


def _outside_embeddings(
    model: nn.Module, base: nn.Module, *, has_first: bool, has_last: bool
) -> list[Replacement]:
    """Return replacements of embeddings and head; if tied, both the first and the last stage hold them."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embeddings.weight
    return [
        (parent, name, PassThrough(child))
        for parent in (base, model)
        for name, child in parent.named_children()
        if (child is embeddings and not has_first and not (is_tied and has_last))
        or (child is head and not has_last and not (is_tied and has_first))
    ]


def run_stage(
    model: nn.Module, forward: Any, stage: int, num_stages: int, received: torch.Tensor, **inputs: Any
) -> Any:
    """Run a stage's part of the forward pass.

    Args:
        model: reduced to the stage.
        forward: the model's own forward().
        stage: its number.
        num_stages: of the pipeline.
        received: for the first stage token ids of shape (rows, tokens); else the previous stage's hidden
            states, of shape (rows, tokens, hidden size).
        inputs: the other arguments of the forward pass; only the last stage uses labels.

    Returns:
        The hidden states, or on the last stage the output of the model's forward().
    """
    first = {"input_ids": received} if stage == 0 else {"inputs_embeds": received}
    if stage == num_stages - 1:
        return forward(**first, **inputs, use_cache=False)
    for name in ("labels", "num_items_in_batch"):
        inputs.pop(name, None)
    return model.base_model(**first, **inputs, use_cache=False).last_hidden_state


def check_stages(model: Any, bounds: tuple[int, ...]) -> bool:
    """Check on a few tokens that the stages compute the logits and the loss of the whole model.

    Returns:
        True if the model's blocks return tuples.

    Raises:
        UserError: results differ.
    """
    implementation, was_training = attention_of(model.config), model.training
    is_on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
    if implementation not in ("eager", "sdpa") and is_on_cpu:
        model.set_attn_implementation("sdpa")  # other kernels need a GPU
    model.eval()
    try:
        with torch.no_grad():
            whole, by_stages, returns_tuples = _probe(model, bounds)
    except UserError:
        raise
    except Exception as error:
        raise _not_a_pipeline(model, f"its stages don't run: {type(error).__name__}: {error}") from error
    finally:
        torch.clear_autocast_cache()  # torch 2.8 keeps copies of weights without gradients
        model.train(was_training)
        if attention_of(model.config) != implementation:
            model.set_attn_implementation(implementation)
    for name, expected in whole.items():
        scale = expected.abs().max().clamp(min=1e-12)
        if not (by_stages[name] - expected).abs().max() <= _PROBE_TOLERANCE * scale:
            raise _not_a_pipeline(model, f"the {name} of its stages differ from the whole model's")
    return returns_tuples


def _probe(
    model: Any, bounds: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Run a sample through the whole model and through its stages.

    Returns:
        Logits and loss of the whole model, those of the stages, and whether blocks return tuples.
    """
    num_stages = len(bounds) - 1
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(1, 1 + _PROBE_TOKENS, device=device)[None] % model.config.vocab_size
    returned: list[Any] = []
    watch = parts_of(model).blocks[0].register_forward_hook(lambda _, __, output: returned.append(output))
    try:
        whole = model(input_ids=tokens, labels=tokens, use_cache=False)
    finally:
        watch.remove()
    returns_tuples = isinstance(returned[0], tuple)
    passed: Any = tokens
    for stage in range(num_stages):
        with as_stage(model, stage, bounds, returns_tuples=returns_tuples):
            # A pipeline divides the sum of losses by the number of labels in the whole batch.
            inputs = {"labels": tokens, "num_items_in_batch": 2 * (_PROBE_TOKENS - 1)}
            passed = run_stage(model, model.forward, stage, num_stages, passed, **inputs)
    expected = {"logits": whole.logits, "losses": whole.loss / 2}
    return expected, {"logits": passed.logits, "losses": passed.loss}, returns_tuples


def refuse_router_loss(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse the load-balancing loss of a mixture of experts.

    Args:
        model: a causal language model.
        inputs: arguments of its forward pass, which take precedence over its configuration.

    Raises:
        UserError: the loss is requested.
    """
    if inputs.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
        raise UserError(
            "pipeline-router-loss",
            "a pipeline can't compute the load-balancing loss of a mixture of experts",
            found=f"output_router_logits=True with {type(model).__name__}",
            why="it needs the routers of all blocks, and the last stage only has its own",
            fix="leave output_router_logits out, or train without --pipeline-parallel-size",
        )


def blocks_by_stage(bounds: tuple[int, ...]) -> str:
    """Return the blocks of each stage: "0-3, 4-6"."""
    pairs = ((first, end - 1) for first, end in pairwise(bounds))
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in pairs)


def _not_a_pipeline(model: Any, why: str) -> UserError:
    return UserError(
        "pipeline-model",
        "this model can't be split into pipeline stages",
        found=type(model).__name__,
        why=why,
        fix="train without --pipeline-parallel-size; ZeRO-3 shards every model",
    )
