"""Stages: the consecutive blocks of a decoder that one rank of a pipeline keeps, with what is at the ends."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import attention_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROBE_TOKENS = 4
"""Tokens of the sample on which stages are compared with the whole model."""
_PROBE_TOLERANCE = 1e-4
"""Largest relative difference of logits: the same operators run in the same order, in fp32 or in 16 bits."""


class Elsewhere(nn.Module):  # type: ignore[misc]
    """Stands for a module that another rank holds, and passes its first input on."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class AddsNothing(nn.Module):  # type: ignore[misc]
    """Stands for embeddings that the first stage has added already."""

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=indices.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a decoder-only model of transformers, as a pipeline sees them."""

    base: nn.Module
    """The model without its head."""
    blocks: nn.ModuleList
    before: tuple[str, ...]
    """Children of the base that belong to the first stage alone: dropout and position embeddings."""
    after: tuple[str, ...]
    """Children of the base that belong to the last stage alone: the final norm."""


def parts_of(model: nn.Module) -> Parts:
    """Find the parts of a causal language model by their structure.

    Raises:
        UserError: the model is no stack of equal blocks between embeddings and one head.
    """
    base = getattr(model, "base_model", model)
    num_blocks = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    stacks = [
        child
        for child in base.children()
        if isinstance(child, nn.ModuleList)
        and len(child) == num_blocks
        and len({type(one) for one in child}) == 1
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
    before, after, is_behind = [], [], False
    for name, child in base.named_children():
        if child is stacks[0]:
            is_behind = True
        elif child is base.get_input_embeddings():
            continue
        elif isinstance(child, (nn.Dropout, nn.Embedding)):
            before.append(name)
        elif any(True for _ in child.parameters()):
            if not is_behind:
                raise _not_a_pipeline(model, f"{name} changes the embeddings before the first block")
            after.append(name)
    return Parts(base=base, blocks=stacks[0], before=tuple(before), after=tuple(after))


def share_blocks(model: nn.Module, num_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage, and the number of blocks behind them.

    A block costs as many operations as it has parameters, and so does the head on the last stage: the stage
    that costs most is made as cheap as it can be.

    Raises:
        UserError: there are fewer blocks than stages, or the model is no pipeline.
    """
    blocks = parts_of(model).blocks
    if len(blocks) < num_stages:
        raise UserError(
            "pipeline-too-long",
            "a pipeline has at most as many stages as the model has blocks",
            found=f"{num_stages} stages and {len(blocks)} blocks of {type(model).__name__}",
            why="a stage holds whole blocks",
            fix=f"set --pipeline-parallel-size to {len(blocks)} or less",
        )
    head = _num_parameters(model.get_output_embeddings()) / max(_num_parameters(blocks[0]), 1)

    def costliest(last: int) -> float:
        return max(last + head, math.ceil((len(blocks) - last) / (num_stages - 1)))

    last = min(range(1, len(blocks) - num_stages + 2), key=costliest)
    rest, bounds = len(blocks) - last, [0]
    for stage in range(num_stages - 1):
        bounds.append(bounds[-1] + (rest - bounds[-1]) // (num_stages - 1 - stage))
    return (*bounds, len(blocks))


def _num_parameters(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


@contextlib.contextmanager
def as_stage(model: nn.Module, stage: int, bounds: tuple[int, ...]) -> Iterator[None]:
    """Make a model one stage of a pipeline, and whole again at the end.

    Parameters keep their names, as the modules that other ranks hold are replaced by empty ones.
    """
    replaced = _replace(model, stage, bounds)
    try:
        yield
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)


def cut(model: nn.Module, stage: int, bounds: tuple[int, ...]) -> None:
    """Drop the parameters that another stage holds."""
    _replace(model, stage, bounds)


def _replace(model: nn.Module, stage: int, bounds: tuple[int, ...]) -> list[tuple[nn.Module, str, nn.Module]]:
    parts, last = parts_of(model), len(bounds) - 2
    own = range(bounds[stage], bounds[stage + 1])
    outside: list[tuple[nn.Module, str, nn.Module]] = [
        (parts.blocks, str(index), Elsewhere()) for index in range(len(parts.blocks)) if index not in own
    ]
    if stage > 0:
        for name in parts.before:
            is_embedding = isinstance(getattr(parts.base, name), nn.Embedding)
            outside.append((parts.base, name, AddsNothing() if is_embedding else Elsewhere()))
    if stage < last:
        outside += [(parts.base, name, Elsewhere()) for name in parts.after]
    outside += _outside_embeddings(model, parts.base, stage, last)
    replaced = []
    for parent, name, instead in outside:
        replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, instead)
    return replaced


def _outside_embeddings(
    model: nn.Module, base: nn.Module, stage: int, last: int
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return which of embeddings and head another stage holds; tied ones are on the first and the last."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embeddings.weight
    return [
        (parent, name, Elsewhere())
        for parent in (base, model)
        for name, child in parent.named_children()
        if (child is embeddings and stage > 0 and not (is_tied and stage == last))
        or (child is head and stage < last and not (is_tied and stage == 0))
    ]


def run_stage(
    model: nn.Module, forward: Any, stage: int, num_stages: int, received: torch.Tensor, **inputs: Any
) -> Any:
    """Run a stage's part of the forward pass.

    Args:
        model: a model that is one stage.
        forward: the model's own forward().
        stage: which.
        num_stages: of the pipeline.
        received: token ids, shape (rows, tokens), for the first stage; else the hidden states of the stage
            before, shape (rows, tokens, hidden size).
        inputs: the other arguments of the forward pass; the labels count on the last stage alone.

    Returns:
        The hidden states for the next stage, or on the last one what the model's forward() returns.
    """
    first = {"input_ids": received} if stage == 0 else {"inputs_embeds": received}
    if stage == num_stages - 1:
        return forward(**first, **inputs, use_cache=False)
    for name in ("labels", "num_items_in_batch"):
        inputs.pop(name, None)
    return model.base_model(**first, **inputs, use_cache=False).last_hidden_state


def check_stages(model: Any, bounds: tuple[int, ...]) -> None:
    """Check on a sample of some tokens that the stages compute what the whole model does.

    Raises:
        UserError: they don't.
    """
    num_stages = len(bounds) - 1
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(1, 1 + _PROBE_TOKENS, device=device)[None] % model.config.vocab_size
    implementation, was_training = attention_of(model.config), model.training
    if implementation not in ("eager", "sdpa") and device.type == "cpu":
        model.set_attn_implementation("sdpa")  # the others' kernels need a GPU
    model.eval()
    try:
        with torch.no_grad():
            whole = model(input_ids=tokens, use_cache=False).logits
            passed: Any = tokens
            for stage in range(num_stages):
                with as_stage(model, stage, bounds):
                    passed = run_stage(model, model.forward, stage, num_stages, passed)
    except UserError:
        raise
    except Exception as error:
        raise _not_a_pipeline(model, f"its stages don't run: {type(error).__name__}: {error}") from error
    finally:
        model.train(was_training)
        if attention_of(model.config) != implementation:
            model.set_attn_implementation(implementation)
    scale = whole.abs().max().clamp(min=1e-12)
    if not (passed.logits - whole).abs().max() <= _PROBE_TOLERANCE * scale:
        raise _not_a_pipeline(model, "its stages give other logits than the whole model")


def blocks_by_stage(bounds: tuple[int, ...]) -> str:
    """Return which blocks each stage holds: "0-3, 4-6"."""
    pairs = ((first, end - 1) for first, end in pairwise(bounds))
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in pairs)


def _not_a_pipeline(model: Any, why: str) -> UserError:
    return UserError(
        "pipeline-model",
        "this model can't be cut into the stages of a pipeline",
        found=type(model).__name__,
        why=why,
        fix="train without --pipeline-parallel-size; ZeRO-3 shards every model",
    )
