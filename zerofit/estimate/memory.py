"""Device memory of one rank: an engine's tape replayed through the allocator, as terms phase by phase."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import TYPE_CHECKING

from zerofit.estimate.engine import TRACED_TERMS, play
from zerofit.estimate.engines import make_engine
from zerofit.estimate.outside import context_term, least_context_bytes, nccl_term
from zerofit.estimate.replay import live_peak, replay
from zerofit.estimate.tape import Tape
from zerofit.estimate.zero_versions import doubt_about
from zerofit.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.strategy import Engine as EngineName

if TYPE_CHECKING:
    from zerofit.estimate.engine import Engine, Setup
    from zerofit.estimate.replay import PhasePeak, Replay, Shortage
    from zerofit.facts import GpuSpec

_ALLOCATOR = "zerofit.estimate.allocator, after c10/cuda/CUDACachingAllocator.cpp"

_UNEXPLAINED = ("live tensors of this name", "the engine's tape")
_ONE_RANK = (
    0.05,
    "ASSUMPTION until the benchmark of published cases has been run: a forerunner of this estimate was at "
    "most 3.3 % off on nine published BERT-large runs whose CUDA context was known",
)
_MANY_RANKS = (
    0.08,
    "ASSUMPTION until the benchmark of published cases has been run: as for one rank, and NCCL's buffers, "
    "whose number depends on the links that NCCL finds",
)


def estimate_memory(
    setup: Setup, *, gpu: GpuSpec, expandable_segments: bool = False, context_bytes: int | None = None
) -> MemoryEstimate:
    """Return what one GPU needs, phase by phase, if its memory had no end.

    Args:
        expandable_segments: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        context_bytes: the CUDA context's measured size, where there is one.
    """
    outside = _outside(setup, gpu, context_bytes)
    engine = _played(setup, gpu, outside)
    return _estimate(engine, replay(engine.tape, expandable_segments=expandable_segments), outside)


def estimate_within(setup: Setup, *, gpu: GpuSpec, limit_bytes: int) -> MemoryEstimate | None:
    """Return what one GPU needs where a run may take only so much of it; None where the run ends there.

    The allocator gives cached blocks back before it gives up, so that a run may get through that would take
    more if there were more.
    """
    outside = _outside(setup, gpu, None)
    engine = _played(setup, gpu, outside)
    within = replay(engine.tape, capacity=max(0, limit_bytes - _sum(outside)))
    return _estimate(engine, within, outside) if within.shortage is None else None


def _estimate(engine: Engine, played: Replay, outside: tuple[Term, ...]) -> MemoryEstimate:
    uncertainty, source = _uncertainty(engine.setup, has_nccl=len(outside) > 1)
    phases = tuple(
        PhaseMemory(
            phase=peak.phase,
            terms=(
                *_tensor_terms(engine, peak),
                _cache_term(peak),
                *(
                    outside[:1] if peak.phase is RunPhase.LOAD else outside
                ),  # NCCL starts with the first collective
            ),
        )
        for peak in played.peaks
    )
    return MemoryEstimate(phases=phases, uncertainty=uncertainty, uncertainty_source=source)


def _uncertainty(setup: Setup, *, has_nccl: bool) -> tuple[float, str]:
    """Return it and its source; a DeepSpeed that was not compared adds to it."""
    uncertainty, source = _MANY_RANKS if has_nccl else _ONE_RANK
    doubt = doubt_about(setup.versions.deepspeed) if setup.strategy.engine is EngineName.DEEPSPEED else None
    if doubt is None:
        return uncertainty, source
    return uncertainty + doubt.uncertainty, f"{source}; {doubt.uncertainty:.0%} more, as {doubt.reason}"


def least_memory(setup: Setup, *, gpu: GpuSpec | None = None) -> int:
    """Return a lower bound of the estimate's peak, found faster: live tensors and what is outside.

    Args:
        gpu: without it the smallest CUDA context of any GPU is taken, and no NCCL.
    """
    if gpu is None:
        return live_peak(_played(setup, None, (), sketch=True).tape) + least_context_bytes()
    outside = _outside(setup, gpu, None)
    return live_peak(_played(setup, gpu, outside, sketch=True).tape) + _sum(outside)


def out_of_memory(
    setup: Setup,
    *,
    gpu: GpuSpec,
    reserve: float = 0.0,
    expandable_segments: bool = False,
    context_bytes: int | None = None,
) -> Shortage | None:
    """Return where a run ends with CUDA out of memory on this GPU; None where it fits.

    The allocator gives its cache back before it gives up, so that a run may fit whose estimate is larger than
    the GPU.

    Args:
        reserve: share of the GPU's memory that has to stay free.
    """
    outside = _outside(setup, gpu, context_bytes)
    capacity = max(0, int(gpu.usable_bytes * (1 - reserve)) - _sum(outside))
    tape = _played(setup, gpu, outside).tape
    return replay(tape, capacity=capacity, expandable_segments=expandable_segments).shortage


def fits(setup: Setup, *, gpu: GpuSpec, reserve: float = 0.0, expandable_segments: bool = False) -> bool:
    """Return whether a run gets through on this GPU, as ``out_of_memory`` says."""
    shortage = out_of_memory(setup, gpu=gpu, reserve=reserve, expandable_segments=expandable_segments)
    return shortage is None


def _played(setup: Setup, gpu: GpuSpec | None, outside: tuple[Term, ...], *, sketch: bool = False) -> Engine:
    """Return the engine of a setup with the whole run on its tape."""
    if gpu is not None:
        setup = replaced(
            setup,
            compute_capability=gpu.compute_capability or setup.compute_capability,
            gpu_memory_bytes=max(0, gpu.usable_bytes - _sum(outside)),
        )
    engine = make_engine(setup, Tape())
    play(engine, sketch=sketch)
    return engine


def _sum(terms: tuple[Term, ...]) -> int:
    return sum(term.num_bytes for term in terms)


def _outside(setup: Setup, gpu: GpuSpec, context_bytes: int | None) -> tuple[Term, ...]:
    nccl = nccl_term(gpu, setup.topology)
    context = context_term(gpu, context_bytes=context_bytes)
    return (context, nccl) if nccl else (context,)


def _tensor_terms(engine: Engine, peak: PhasePeak) -> tuple[Term, ...]:
    terms = []
    for name, num_bytes in peak.live:
        formula, source = engine.explain(name) or TRACED_TERMS.get(name, _UNEXPLAINED)
        terms.append(
            Term(name=name, num_bytes=num_bytes, holder=Holder.TENSORS, formula=formula, source=source)
        )
    return tuple(terms)


def _cache_term(peak: PhasePeak) -> Term:
    return Term(
        name="allocator cache",
        num_bytes=peak.reserved_bytes - peak.live_bytes,
        holder=Holder.CACHE,
        formula="reserved - live tensors: rounding, holes and cached blocks",
        source=_ALLOCATOR,
    )
