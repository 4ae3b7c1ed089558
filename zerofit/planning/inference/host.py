"""Host memory of one node that generates, and space on NVMe: beside GPUs, or with the ranks on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import NVME, OffloadDevice, ZeroStage
from zerofit.planning.estimate.host_memory.ledger import CHECKPOINT, ROUNDING
from zerofit.planning.estimate.host_memory.node import ELEMENT_BYTES, estimate_host_memory, process_term
from zerofit.planning.estimate.host_memory.rank import CAST, WEIGHT_SWAP, WEIGHTS
from zerofit.planning.inference.device import generate_phases

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerofit.core.facts import Machine, ModelFacts
    from zerofit.planning.inference.device import Weights
    from zerofit.planning.inference.request import InferenceWorkload

_CASTS = (WEIGHTS, CAST)
"""What a script's model takes on its way: a whole model goes to its GPU one tensor at a time, mapped from the
file (zerofit/generation/loading.py, device_map)."""
_SWAPPER = "deepspeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py"


def host_memory(
    weights: Weights, workload: InferenceWorkload, *, model: ModelFacts, machine: Machine, batch_size: int
) -> MemoryEstimate:
    """Return what one node's host needs, all its ranks together.

    Args:
        weights: what the layout holds of them, on GPUs or on the CPU.
        workload: what is generated.
        model: tells the type of the weights in the checkpoint.
        machine: the node.
        batch_size: prompts in one call on one rank.
    """
    if weights.setup.topology.on_cpu:
        return _on_cpu(weights, workload, model=model, machine=machine, batch_size=batch_size)
    estimate = estimate_host_memory(weights.setup, model=model, machine=machine)
    phases = tuple(
        PhaseMemory(
            phase=RunPhase.PREFILL if phase.phase is RunPhase.FORWARD else phase.phase,
            terms=tuple(_terms_of(phase, weights)),
        )
        for phase in estimate.phases
    )
    return replace(estimate, phases=phases)


def surely_bytes(estimate: MemoryEstimate) -> int:
    """Return what the largest phase needs with its uncertainty, without pages that the kernel may drop."""
    held = (
        sum(term.num_bytes for term in phase.terms if term.name != CHECKPOINT) for phase in estimate.phases
    )
    return int(max(held) * (1 + estimate.uncertainty))


def swap_buffer_elements(weights: Weights) -> int:
    """Return the elements that a buffer between NVMe and GPU must have: those of the largest part at least.

    A larger part ends the run: "More elements than buffer size".
    Source: deepspeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py:357.
    """
    setup = weights.setup
    ranks = setup.topology.data_parallel_size
    largest = max((one.num_elements for one in setup.log.parameters), default=0)
    return max(NVME.weight_buffer_size, -(-largest // ranks))


def _terms_of(phase: PhaseMemory, weights: Weights) -> Iterator[Term]:
    """Yield the terms of a phase of a script that hold here, with the swap buffers that this model takes.

    These are locked, not pinned by torch's allocator, which would round them.
    Source: deepspeed 0.19.8, partitioned_param_swapper.py:124 (new_cpu_locked_tensor).
    """
    is_partitioned = weights.setup.strategy.zero_stage is ZeroStage.PARAMETERS
    swaps = any(term.name == WEIGHT_SWAP for term in phase.terms)
    for term in phase.terms:
        if swaps and term.name == ROUNDING:
            continue
        if term.name == WEIGHT_SWAP:
            if term.holder is Holder.PINNED:  # what they are made of before is never touched
                yield _swap_term(weights, term.holder)
        elif is_partitioned or term.name not in _CASTS:
            yield term


def _swap_term(weights: Weights, holder: Holder) -> Term:
    elements, width = swap_buffer_elements(weights), weights.shape.weight_bytes
    ranks = weights.setup.topology.ranks_per_node
    return Term(
        name=WEIGHT_SWAP,
        num_bytes=ranks * NVME.weight_buffer_count * elements * width,
        holder=holder,
        formula=f"{ranks} ranks x {NVME.weight_buffer_count} buffers x {elements} elements x {width} B",
        source=f"{_SWAPPER}:124",
    )


def _on_cpu(
    weights: Weights, workload: InferenceWorkload, *, model: ModelFacts, machine: Machine, batch_size: int
) -> MemoryEstimate:
    setup = weights.setup
    num_ranks = setup.topology.ranks_per_node
    stays = [process_term(num_ranks, on_gpu=False)]
    if setup.strategy.param_offload is OffloadDevice.NVME:
        stays.append(_swap_term(weights, Holder.PAGEABLE))
    width = ELEMENT_BYTES.get(model.checkpoint_dtype, 4)
    is_mapped = setup.strategy.zero_stage is ZeroStage.NOTHING and width == weights.shape.weight_bytes
    load = [*_of_all(weights.load, num_ranks, is_mapped=is_mapped), *stays]
    if not is_mapped:
        room = machine.host_memory_available_bytes - sum(term.num_bytes for term in load)
        load.append(_checkpoint_term(model.num_parameters, width, room))
    phases = [PhaseMemory(phase=RunPhase.LOAD, terms=tuple(load))]
    for phase in generate_phases(weights, workload, batch_size=batch_size, holder=Holder.PAGEABLE):
        terms = (*_of_all(phase.terms, num_ranks, is_mapped=is_mapped), *stays)
        phases.append(PhaseMemory(phase=phase.phase, terms=terms))
    return MemoryEstimate(
        phases=tuple(phases),
        uncertainty=0.15,
        uncertainty_source="ASSUMPTION: weights and cache equal counted tensors; what the C library keeps of"
        " freed activations was not measured",
    )


def _of_all(terms: Iterable[Term], num_ranks: int, *, is_mapped: bool) -> Iterator[Term]:
    """Yield the terms of one rank as those of all ranks of a node, in its host memory.

    Args:
        terms: of one rank.
        num_ranks: of one node.
        is_mapped: whether the weights are the checkpoint's own pages, which the ranks share: so it is where
            from_pretrained keeps the type (tests/evidence/memory/test_checkpoint_load.py).
    """
    for term in terms:
        times = 1 if is_mapped and term.name == WEIGHTS else num_ranks
        yield replace(
            term,
            num_bytes=times * term.num_bytes,
            holder=Holder.PAGEABLE,
            formula=f"{times} ranks x ({term.formula})" if times > 1 else term.formula,
        )


def _checkpoint_term(num_parameters: int, width: int, room: int) -> Term:
    """Return the pages of the mapped checkpoint that is read: as many as there is room for."""
    return Term(
        name=CHECKPOINT,
        num_bytes=max(0, min(num_parameters * width, room)),
        holder=Holder.PAGEABLE,
        formula=f"{width} P once a node, or as much as there is room: mapped files, whose pages the kernel"
        " drops where it needs them",
        source="transformers 5.23, modeling_utils.py:4524: under ZeRO-3 rank 0 maps every file, the others"
        " read shapes",
    )
