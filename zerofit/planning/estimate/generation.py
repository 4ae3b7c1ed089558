"""Memory of generation, phase by phase, from a model's traced passes: of each GPU, and of one node's host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import ZeroStage
from zerofit.planning.estimate.device_memory.memory import play_strategy, tensor_terms
from zerofit.planning.estimate.device_memory.non_torch_memory import non_torch_terms
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.engines.engine import WEIGHTS
from zerofit.planning.estimate.host_memory import CAST, estimate_host_memory, process_term

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions
    from zerofit.core.plan import Topology
    from zerofit.planning.estimate.engines.engine import Setup

REST_SHARE = 0.3
"""What the allocator reserves beyond live tensors, as a share of the temporary ones. ASSUMPTION: as in the
worst of five calls, of 12 to 32 layers and batches of 8 to 32, that were replayed with less and less memory:
they needed 8 to 28 % more than their tensors, since each token's cache is larger than the blocks freed before
it."""
UNCERTAINTY = 0.1
_UNCERTAINTY_SOURCE = (
    "ASSUMPTION: tensors equal those of real calls on the CPU within 2 %; no GPU was compared with, nor what"
    " the allocator keeps"
)
GATHERED_ONCE = "weights gathered once"


def generation_phases(prefill: Setup, decode: Setup, *, gathers_once: bool) -> tuple[PhaseMemory, ...]:
    """Return the live tensors of a rank while it loads, in the prompts' pass and in the last token's.

    Args:
        gathers_once: whether all weights are gathered for the whole call, if ZeRO-3 partitions them.
    """
    found: list[PhaseMemory] = []
    for phase, setup in ((RunPhase.PREFILL, prefill), (RunPhase.DECODE, decode)):
        engine = play_strategy(setup, sketch=True)
        peaks = {peak.phase: tensor_terms(engine, peak) for peak in replay_live(engine.tape).peaks}
        if not found:
            found.append(PhaseMemory(phase=RunPhase.LOAD, terms=peaks[RunPhase.LOAD]))
        found.append(PhaseMemory(phase=phase, terms=peaks[RunPhase.FORWARD]))
    if not gathers_once or prefill.strategy.zero_stage is not ZeroStage.PARAMETERS:
        return tuple(found)
    whole = Term(
        name=GATHERED_ONCE,
        num_bytes=prefill.total_weight_bytes,
        holder=Holder.TENSORS,
        formula="b P beside each rank's shard, with --gather always",
        source="zerofit.generation.gathering",
    )
    return (found[0], *(replace(phase, terms=(*phase.terms, whole)) for phase in found[1:]))


def device_memory(
    phases: tuple[PhaseMemory, ...], *, gpu: GpuSpec, topology: Topology, versions: Versions
) -> MemoryEstimate:
    """Return the memory of each GPU: the tensors, what the allocator adds, and what is outside it."""
    outside = non_torch_terms(gpu, topology, versions)
    return MemoryEstimate(
        phases=tuple(replace(phase, terms=(*phase.terms, *_rest(phase), *outside)) for phase in phases),
        uncertainty=UNCERTAINTY,
        uncertainty_source=_UNCERTAINTY_SOURCE,
    )


def _rest(phase: PhaseMemory) -> Iterator[Term]:
    """Yield what the allocator reserves beyond live tensors: a share of the temporary ones."""
    if phase.phase is RunPhase.LOAD:
        return
    stays = sum(term.num_bytes for term in phase.terms if term.name in (WEIGHTS, GATHERED_ONCE))
    yield Term(
        name="allocator cache",
        num_bytes=int(REST_SHARE * (phase.total_bytes - stays)),
        holder=Holder.CACHE,
        formula=f"{REST_SHARE:.0%} of all tensors except resident weights",
        source="ASSUMPTION: as in the worst of some calls replayed through "
        "zerofit.planning.estimate.device_memory.allocator",
    )


def host_of_gpu_ranks(prefill: Setup, *, model: ModelFacts, machine: Machine) -> MemoryEstimate:
    """Return the host memory of a node whose ranks have GPUs.

    A whole model moves to its GPU tensor by tensor, mapped from the file (zerofit/generation/loading.py).
    """
    found = estimate_host_memory(prefill, model=model, machine=machine)
    left_out = () if prefill.strategy.zero_stage is ZeroStage.PARAMETERS else (WEIGHTS, CAST)
    phases = tuple(
        PhaseMemory(
            phase=RunPhase.PREFILL if phase.phase is RunPhase.FORWARD else phase.phase,
            terms=tuple(term for term in phase.terms if term.name not in left_out),
        )
        for phase in found.phases
    )
    return replace(found, phases=phases)


def host_of_cpu_ranks(phases: tuple[PhaseMemory, ...], topology: Topology) -> MemoryEstimate:
    """Return the host memory of a node whose ranks compute on the CPU."""
    num_ranks = topology.ranks_per_node
    process = process_term(num_ranks, on_gpu=False)
    return MemoryEstimate(
        phases=tuple(replace(phase, terms=(*_of_all(phase.terms, num_ranks), process)) for phase in phases),
        uncertainty=0.15,
        uncertainty_source="ASSUMPTION: tensors equal those of real calls within 2 %; what the C library"
        " keeps of freed activations was not measured",
    )


def _of_all(terms: tuple[Term, ...], num_ranks: int) -> Iterator[Term]:
    """Yield the terms of one CPU rank for all ranks of a node; kernels have no workspaces there."""
    for term in terms:
        if term.name != TensorKind.WORKSPACE:
            formula = f"{num_ranks} ranks x ({term.formula})" if num_ranks > 1 else term.formula
            num_bytes = num_ranks * term.num_bytes
            yield replace(term, num_bytes=num_bytes, holder=Holder.PAGEABLE, formula=formula)
