"""GPU memory of one rank: an engine's tape replayed through the allocator, as terms phase by phase."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.core.supported import release_of
from zerofit.planning.estimate.device_memory.non_torch_memory import NCCL, non_torch_terms
from zerofit.planning.estimate.device_memory.replay import Tape, most_live, replay, replay_live
from zerofit.planning.estimate.engines.engine import TRACED_TERMS, played
from zerofit.planning.estimate.engines.evaluation import play_evaluation
from zerofit.planning.estimate.engines.fsdp2 import Fsdp2Engine
from zerofit.planning.estimate.engines.native import NativeEngine
from zerofit.planning.estimate.engines.pipeline import PipelineEngine
from zerofit.planning.estimate.engines.zero_stage3 import DeepSpeedStage3
from zerofit.planning.estimate.engines.zero_stages_0_to_2 import (
    DeepSpeedStage0,
    DeepSpeedStage12,
    full_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zerofit.core.facts import GpuSpec
    from zerofit.planning.estimate.device_memory.replay import Replay, TapePeak
    from zerofit.planning.estimate.engines.engine import Setup, SimulatedEngine
    from zerofit.planning.estimate.engines.evaluation import Evaluation

_ALLOCATOR = "zerofit.planning.estimate.device_memory.allocator, after c10/cuda/CUDACachingAllocator.cpp"
BY_OWN_MODEL = (
    0.08,
    "29 published runs, 16 in nf4, whose own model code was traced lay within 0.5 %, and 16 of transformers' "
    "within 3.6 %; twice that, as none is of today's versions (docs/reference/predictions.md)",
)
BY_NAME = (
    0.12,
    "of 13 published runs on one GPU that were held out, 90 % lay within 11.6 %; "
    "17 runs of another model code than transformers' lay within 6.7 % (docs/reference/predictions.md)",
)
QUANTIZED = (
    0.15,
    "ASSUMPTION: twice the 6.7 % of 8 published runs in nf4 of another model code than transformers', as "
    "releases of bitsandbytes keep other tensors (docs/reference/predictions.md)",
)
QUANTIZED_OF_OLD = (
    0.3,
    "of 13 held-out published runs in 4 bits with bitsandbytes up to 0.43, whose own model code was traced, "
    "half lay within 9.4 % and the worst was 30 % too low: these releases keep other tensors",
)
PACKED = (
    0.3,
    "ASSUMPTION: as for old releases of bitsandbytes: what products with packed weights take is known from "
    "their code alone",
)
"""Uncertainties on one GPU, and their sources: with the script's own model traced, with the class that a name
stands for, and with quantized weights, by whatever name: bitsandbytes' 4 bits, those of its releases of 2023
and 2024, and other formats."""
_OF_ONE_LENGTH = (
    "for batches of one length, packed or padded to it: where each is padded to its own longest sample, "
    "PyTorch may keep more cached"
)
_OLD_BITSANDBYTES = (0, 44)
_MANY_RANKS = (
    0.15,
    "ASSUMPTION: as for one GPU, and NCCL's buffers, whose number depends on the links that NCCL finds; "
    "DeepSpeed's own tensors equal those of the real engine on CPU ranks within 1 %",
)
_SHARDED = (
    0.15,
    "ASSUMPTION: as for one GPU, and NCCL's buffers; no run under FSDP2 was measured on a GPU; FSDP2 itself, "
    "run on fake tensors, holds what real CPU ranks hold within 1 %",
)
_IN_STAGES = (
    0.2,
    "ASSUMPTION: as for many ranks, and no run in pipeline stages was measured on a GPU; a stage's live "
    "tensors equal those of torch's schedule on CPU ranks (docs/measured-runs.md)",
)
_STAGES: dict[ZeroStage, type[SimulatedEngine]] = {
    ZeroStage.NOTHING: DeepSpeedStage0,
    ZeroStage.OPTIMIZER_STATES: DeepSpeedStage12,
    ZeroStage.GRADIENTS: DeepSpeedStage12,
    ZeroStage.PARAMETERS: DeepSpeedStage3,
}


def play_strategy(setup: Setup, *, sketch: bool = False) -> SimulatedEngine:
    """Play a run and return the engine with its tape; see `played` for a sketch."""
    engine, steps = play_steps(setup, sketch=sketch)
    for _ in steps:
        pass
    return engine


def play_steps(setup: Setup, *, sketch: bool = False) -> tuple[SimulatedEngine, Iterator[None]]:
    """Return an engine, and an iterator that plays a step on its tape each time."""
    if setup.strategy.engine is Engine.FSDP2:
        sharded = Fsdp2Engine(setup, Tape())
        return sharded, sharded.played(sketch=sketch)
    engine = _kind_of(setup)(setup, Tape())
    return engine, played(engine, sketch=sketch)


def _kind_of(setup: Setup) -> type[SimulatedEngine]:
    strategy = setup.strategy
    if strategy.engine is Engine.FSDP2:
        return Fsdp2Engine
    if setup.stage is not None:
        return PipelineEngine
    return NativeEngine if strategy.engine is Engine.NATIVE else _STAGES[strategy.zero_stage]


def fullest_ranks(setup: Setup) -> Iterator[Setup]:
    """Yield the setups of ranks that may need the most memory; the largest of their estimates is the plan's.

    Ranks differ at ZeRO stages 1 and 2. The one with the most gradients comes first, and others follow if
    more than its live tensors live there at one time. Less can live where more is reserved.
    """
    if setup.rank is not None or _kind_of(setup) is not DeepSpeedStage12:
        yield setup
        return
    first, *others = (replace(setup, rank=rank) for rank in full_ranks(setup))
    yield first
    least = most_live(play_strategy(first, sketch=True).tape) if others else 0
    yield from (other for other in others if most_live(play_strategy(other, sketch=True).tape) > least)


def estimate_memory(setup: Setup, *, gpu: GpuSpec) -> MemoryEstimate:
    """Return the memory that one GPU needs, phase by phase, if there were no limit."""
    found = _estimates(setup, gpu=gpu, limit_bytes=None)
    assert found is not None
    return found


def estimate_within(setup: Setup, *, gpu: GpuSpec, limit_bytes: int) -> MemoryEstimate | None:
    """Return the memory of one GPU under a limit; None if the run ends with CUDA out of memory.

    The allocator frees cached blocks before it fails, so that a run may need less than without a limit.
    """
    return _estimates(setup, gpu=gpu, limit_bytes=limit_bytes)


def _estimates(setup: Setup, *, gpu: GpuSpec, limit_bytes: int | None) -> MemoryEstimate | None:
    """Return the memory of the rank that needs most; None if any is out of memory."""
    here, outside = setup_on(setup, gpu)
    capacity = None if limit_bytes is None else max(0, limit_bytes - _sum(outside))
    found: list[MemoryEstimate] = []
    for rank in fullest_ranks(here):
        engine = play_strategy(rank)
        within = replay(engine.tape, capacity=capacity, expandable_segments=setup.expandable_segments)
        if not within.ends:
            return None
        found.append(_estimate(engine, within, outside))
    return max(found, key=lambda memory: memory.peak_bytes)


def estimate_evaluation(
    setup: Setup, evaluation: Evaluation, *, gpu: GpuSpec, limit_bytes: int
) -> tuple[MemoryEstimate, bool]:
    """Return the memory of one GPU in evaluations, and whether they end under a limit.

    If they don't, it is that of the live tensors, as the allocator's cache would be freed first.
    """
    here, outside = setup_on(setup, gpu)
    engine = play_strategy(here, sketch=True)
    play_evaluation(engine, evaluation)
    capacity = max(0, limit_bytes - _sum(outside))
    within = replay(engine.tape, capacity=capacity, expandable_segments=setup.expandable_segments)
    whole = _estimate(engine, within if within.ends else replay_live(engine.tape), outside)
    phases = tuple(memory for memory in whole.phases if memory.phase is RunPhase.EVALUATE)
    return replace(whole, phases=phases), within.ends


def _estimate(engine: SimulatedEngine, played: Replay, outside: tuple[Term, ...]) -> MemoryEstimate:
    before_nccl = tuple(term for term in outside if term.name != NCCL)  # starts with the first collective
    uncertainty, source = _uncertainty(engine.setup, has_nccl=before_nccl != outside)
    phases = tuple(
        PhaseMemory(
            phase=peak.phase,
            terms=(
                *tensor_terms(engine, peak),
                _cache_term(peak),
                *(before_nccl if peak.phase is RunPhase.LOAD else outside),
            ),
        )
        for peak in played.peaks
    )
    return MemoryEstimate(phases=phases, uncertainty=uncertainty, uncertainty_source=source)


def _uncertainty(setup: Setup, *, has_nccl: bool) -> tuple[float, str]:
    """Return the uncertainty and its source, by ranks, by the traced model, and by quantization.

    Not by precision, as all known runs in fp32 are of one source. A release of DeepSpeed that was not
    compared adds to it.
    """
    alone = _on_one_gpu(setup)
    uncertainty, source = _MANY_RANKS if has_nccl else alone
    if setup.stage is not None:
        uncertainty, source = _IN_STAGES
    if setup.strategy.engine is Engine.FSDP2:
        uncertainty, source = _SHARDED
    if alone[0] > uncertainty:
        uncertainty, source = alone
    if not setup.use.is_own:
        source = f"{source}; {_OF_ONE_LENGTH}"
    more, why = _added_by_release(setup.versions.deepspeed)
    if setup.strategy.engine is not Engine.DEEPSPEED or not more:
        return uncertainty, source
    return uncertainty + more, f"{source}; {more:.0%} more, as {why}"


def _on_one_gpu(setup: Setup) -> tuple[float, str]:
    form = setup.use.weight_format if setup.use.is_packed else None
    if form is not None and form.method != "bitsandbytes_4bit":
        return PACKED
    if form is None and setup.strategy.quantization is None:
        return BY_OWN_MODEL if setup.use.is_own else BY_NAME
    release = setup.versions.bitsandbytes
    is_old = release is not None and release_of(release) < _OLD_BITSANDBYTES
    return QUANTIZED_OF_OLD if is_old else QUANTIZED


def setup_on(setup: Setup, gpu: GpuSpec) -> tuple[Setup, tuple[Term, ...]]:
    """Return a setup on a GPU, and the terms outside PyTorch's allocator there."""
    terms = non_torch_terms(
        gpu, setup.topology, setup.versions, other_weight_bytes=setup.use.other_weight_bytes
    )
    here = replace(
        setup,
        compute_capability=gpu.compute_capability or setup.compute_capability,
        gpu_memory_bytes=max(0, gpu.usable_bytes - _sum(terms)),
    )
    return here, terms


def _sum(terms: tuple[Term, ...]) -> int:
    return sum(term.num_bytes for term in terms)


def tensor_terms(
    engine: SimulatedEngine, peak: TapePeak, *, traced: Mapping[str, tuple[str, str]] = TRACED_TERMS
) -> tuple[Term, ...]:
    """Return the live tensors of a phase's largest moment as terms.

    Args:
        traced: (formula, source) of the terms that come from the log.
    """
    terms, rows = [], engine.setup.use.rows_per_sample
    of_rows = f"bytes per sample ({rows} rows at the model)" if rows > 1 else "bytes per sample"
    for name, num_bytes in peak.live:
        formula, source = engine.explain(name) or traced[name]
        formula = formula.replace("bytes per sample", of_rows)
        terms.append(
            Term(name=name, num_bytes=num_bytes, holder=Holder.TENSORS, formula=formula, source=source)
        )
    return tuple(terms)


def _cache_term(peak: TapePeak) -> Term:
    return Term(
        name="allocator cache",
        num_bytes=peak.reserved_bytes - peak.live_bytes,
        holder=Holder.CACHE,
        formula="reserved - live tensors: rounding, holes and cached blocks",
        source=_ALLOCATOR,
    )


_COMPARED_RELEASE = "0.19.8"
"""The release of DeepSpeed whose files and lines the engines name, and that ran on the measured CPU ranks."""
_NEAR, _FAR = 0.02, 0.05
"""ASSUMPTION, not measured: what releases near the compared one, and all others, add to the uncertainty.
Weights, masters and states follow from ZeRO itself; a release can change copies and buckets."""


def _added_by_release(deepspeed: str | None) -> tuple[float, str]:
    """Return what a release of DeepSpeed adds to the uncertainty, and why; 0 for the compared one."""
    if deepspeed is None:
        return _FAR, "the release of DeepSpeed is not known"
    release = deepspeed.split("+")[0]
    if release == _COMPARED_RELEASE:
        return 0.0, ""
    if tuple(int(part) for part in release.split(".")[:2] if part.isdigit()) < (0, 19):
        return (
            _FAR,
            "how it flattens weights, keeps gradients and releases gathered parameters was not compared",
        )
    return _NEAR, "only 0.19.8 was compared; other releases of 0.19 and later may allocate otherwise"
