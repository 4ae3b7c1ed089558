"""Number formats that train: those of the weights, gradients and optimizer states under each engine.

Read at deepspeed 0.19.8, accelerate 1.15.0 and torch 2.13.0:

- PyTorch alone keeps weights, gradients and states in the format in which the script made its weights;
  autocast casts the inputs of matrix products alone.
- DeepSpeed in 16 bits casts the whole model and makes fp32 masters of what trains
  (runtime/zero/stage_1_and_2.py:563, stage3.py:1172). It sums gradients in 16 bits, as zerofit's file names
  no grad_accum_dtype (runtime/engine.py:1806).
- FSDP2 with mixed precision keeps fp32 shards of what trains (accelerate/utils/fsdp_utils.py,
  fsdp2_prepare_model), casts whole units, and sums and reduces gradients in 16 bits
  (accelerate/utils/dataclasses.py, set_mixed_precision; torch's _fsdp_param.py:813).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.optimizers.lookup import REPLACEMENTS, memory_of
from zerofit.core.strategy import DTYPES, Engine, Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture, CapturedModel
    from zerofit.core.strategy import Strategy

_NAMES = {Engine.NATIVE: "PyTorch alone", Engine.DEEPSPEED: "DeepSpeed", Engine.FSDP2: "FSDP2"}
_16_BITS = (Precision.FP16, Precision.BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormats:
    """The formats of what trains, in words: "bf16, with fp32 masters"."""

    weights: str
    gradients: str
    """Also of their sum over the micro-batches of a step."""
    states: str
    """Of an optimizer whose states have the format of the weights that it steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChange:
    """A format that differs."""

    what: str
    """Whose: "weights"."""
    before: str
    after: str
    why: str


def format_changes(
    capture: Capture, strategy: Strategy, *, beside: Engine | None = None
) -> tuple[FormatChange, ...]:
    """Return what a strategy trains in other formats than the script alone.

    Empty if the format of what trains is unknown, or if adapters of the plan train in its place.

    Args:
        beside: the engine to compare with in the run's precision, in place of the script alone.
    """
    weights = _format_of_trained(capture.model)
    if weights is None or strategy.lora is not None:
        return ()
    runs, own = strategy.precision or capture.precision, _own_engine(capture)
    is_of_script = beside is None and own is not strategy.engine  # autocast alone is a row of its own
    before = _formats(beside or own, weights, capture.precision if is_of_script else runs)
    return tuple(_changes(capture, strategy, before, _formats(strategy.engine, weights, runs)))


def _changes(
    capture: Capture, strategy: Strategy, before: NumberFormats, after: NumberFormats
) -> Iterator[FormatChange]:
    name = _NAMES[strategy.engine]
    if before.weights != after.weights:
        yield FormatChange(
            what="weights", before=before.weights, after=after.weights, why=_why_weights(before, after, name)
        )
    own_steps, steps = capture.passes_per_step, strategy.gradient_accumulation_steps or 1
    sums_more = after.gradients in _16_BITS and steps > own_steps
    if before.gradients != after.gradients or sums_more:
        rounds = f"{name} sums them in this format, which rounds more than fp32"
        yield FormatChange(
            what="gradients",
            before=_summed(before.gradients, own_steps),
            after=_summed(after.gradients, steps),
            why=rounds if after.gradients in _16_BITS else "they have the format of the weights",
        )
    if before.states != after.states and _follow_weights(capture, strategy):
        why = f"{name}'s optimizer steps weights of this format"
        yield FormatChange(what="optimizer states", before=before.states, after=after.states, why=why)


def _formats(engine: Engine, weights: Precision, precision: Precision | None) -> NumberFormats:
    """Return the formats of a run whose script makes weights in this format."""
    without_masters = weights if weights is Precision.FP32 else f"{weights} alone"
    if precision not in _16_BITS:
        return NumberFormats(weights=without_masters, gradients=weights, states=weights)
    if engine is Engine.NATIVE:
        words = f"{weights} under autocast" if weights is Precision.FP32 else without_masters
        return NumberFormats(weights=words, gradients=weights, states=weights)
    words = f"{precision}, with fp32 masters"
    return NumberFormats(weights=words, gradients=precision, states=Precision.FP32)


def _summed(gradients: str, num_micro_batches: int) -> str:
    """Return the format of gradients, and over how many micro-batches 16 bits sum them."""
    if gradients not in _16_BITS or num_micro_batches == 1:
        return gradients
    return f"{gradients}, summed over {num_micro_batches} micro-batches"


def _format_of_trained(model: CapturedModel) -> Precision | None:
    """Return the format of most of what trains; None if it is none of fp32, fp16 and bf16."""
    sizes: Counter[str] = Counter()
    for module in model.modules:
        sizes[module.dtype] += module.num_trainable_parameters
    names = [name for name, size in sizes.most_common(1) if size]
    return DTYPES.get(names[0] if names else model.weight_dtype)


def _own_engine(capture: Capture) -> Engine:
    """Return the engine that the script itself configures."""
    if capture.engine.startswith("DeepSpeed"):
        return Engine.DEEPSPEED
    return Engine.FSDP2 if capture.engine.startswith("FSDP") else Engine.NATIVE


def _follow_weights(capture: Capture, strategy: Strategy) -> bool:
    """Return True if the states of the optimizer that runs have the format of the weights that it steps."""
    if strategy.optimizer is not None:
        return REPLACEMENTS[strategy.optimizer].memory.like_parameter > 0
    made = capture.optimizer
    if made is None:
        return False
    memory, _ = memory_of(made.class_path, made.groups[0].settings if made.groups else {})
    return memory is not None and memory.like_parameter > 0


def _why_weights(before: NumberFormats, after: NumberFormats, name: str) -> str:
    if after.weights in DTYPES.values():
        return f"{name} trains them as the script makes them"
    if before.weights in _16_BITS:
        return f"{name} steps fp32 masters, which keep updates that 16 bits round away"
    return f"{name} computes in 16 bits throughout, norms too: rounds more than autocast"
