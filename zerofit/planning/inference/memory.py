"""Memory of generation by phase: of each GPU and of one node's host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import NVME, OffloadDevice, Precision, ZeroStage
from zerofit.core.units import MIB
from zerofit.generation.generation_job import Gather
from zerofit.planning.estimate.device_memory.memory import play_strategy, tensor_terms
from zerofit.planning.estimate.device_memory.non_torch_memory import non_torch_terms
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.engines.zero_engine import GATHER_BUFFER, GATHERED
from zerofit.planning.estimate.host_memory import (
    CAST,
    CHECKPOINT,
    ELEMENT_BYTES,
    ROUNDING,
    WEIGHT_SWAP,
    WEIGHTS,
    estimate_host_memory,
    process_term,
)
from zerofit.planning.inference.activations import cache_terms, cached_tokens, decode_terms, prefill_terms
from zerofit.planning.inference.forward_log import forward_log, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.closed_form.shape import Shape
    from zerofit.planning.inference.problem import InferenceWorkload

GATHERED_ONCE = "weights gathered once"
_GATHERING = "zerofit.generation.gathering"
_BUCKET_BYTES = 256 * MIB
"""Bytes that zerofit.generation.gathering gathers in one bucket."""
COMPARED_FAMILIES = frozenset(
    {
        "bart", "bloom", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox",
        "gpt_oss", "gptj", "llama", "mistral", "mixtral", "opt", "phi", "phi3", "qwen2", "qwen3",
        "qwen3_moe", "stablelm", "t5"
    }
)  # fmt: skip
"""Families whose tensors tests/planning/inference/test_activations.py counts on a small model."""
UNCERTAINTY, UNCERTAINTY_ELSEWHERE = 0.1, 0.25
UNCERTAINTY_SOURCE = (
    "ASSUMPTION: weights and cache equal counted tensors; activations, mask and logits are 1 to 2 times those"
    " counted on the CPU; no GPU was compared with, nor what the allocator keeps"
)
_SOURCE_ELSEWHERE = "ASSUMPTION: weights equal counted tensors; no model of this family was compared with"
REST_SHARE = 0.3
"""What the allocator reserves beyond live tensors, as a share of the temporary ones. ASSUMPTION: as in the
worst of five calls, of 12 to 32 layers and batches of 8 to 32, that were replayed with less and less memory:
they needed 8 to 28 % more than their tensors, since each token's cache is larger than the blocks freed before
it."""
_REST_SOURCE = (
    "ASSUMPTION: as in the worst of some calls replayed through "
    "zerofit.planning.estimate.device_memory.allocator"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights that each rank of a layout holds, for any batch."""

    setup: Setup
    shape: Shape
    load: tuple[Term, ...]
    """While the checkpoint is read."""
    generate: tuple[Term, ...]
    """At the peak of a forward pass."""
    gather: tuple[Term, ...] = ()
    """While all weights are gathered for a call; empty if they are not."""

    @property
    def is_gathered_once(self) -> bool:
        """True if all weights are gathered once per call, not layer by layer."""
        return bool(self.gather)

    @property
    def is_in_parts(self) -> bool:
        """True if the GPU does not hold the whole model: weights are partitioned over ranks or offloaded."""
        strategy = self.setup.strategy
        is_spread = self.setup.topology.world_size > 1 or strategy.param_offload is not OffloadDevice.NONE
        return strategy.zero_stage is ZeroStage.PARAMETERS and is_spread

    @property
    def move_each_pass(self) -> bool:
        """True if weights are moved to the GPUs for each pass."""
        return self.is_in_parts and not self.setup.topology.on_cpu and not self.is_gathered_once

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole model's weights."""
        return sum(one.num_elements * one.bytes_per_element for one in self.setup.log.parameters)


def weights_of(
    model: ModelFacts,
    strategy: Strategy,
    topology: Topology,
    *,
    versions: Versions,
    gather: Gather,
    gpu: GpuSpec | None,
) -> Weights:
    """Return the weights that each rank of a layout holds.

    They come from the simulated engine: loading under zero.Init, gathering, prefetching and releasing.

    Args:
        gather: with ALWAYS, ranks hold the whole model beside their shards.
        gpu: the node's smallest; None on the CPU, where kernels have no scratch memory.
    """
    precision = strategy.precision or Precision.FP32
    log = forward_log(model, precision)
    setup = Setup(log=log, strategy=strategy, topology=topology, versions=versions, trains=False)
    engine = play_strategy(setup)
    peaks = {peak.phase: tensor_terms(engine, peak) for peak in replay_live(engine.tape).peaks}
    load, generate = peaks[RunPhase.LOAD], peaks[RunPhase.FORWARD]
    if gpu is None:
        generate = tuple(term for term in generate if term.name != TensorKind.WORKSPACE)
    held = Weights(setup=setup, shape=shape_of(model, precision), load=load, generate=generate)
    return _gathered_once(held) if held.is_in_parts and gather is Gather.ALWAYS else held


def _gathered_once(held: Weights) -> Weights:
    """Return the weights of a layout that gathers all of them once per call, not layer by layer."""
    once = Term(
        name=GATHERED_ONCE,
        num_bytes=held.whole_bytes,
        holder=Holder.TENSORS,
        formula="b P beside each rank's shard, with --gather always",
        source=_GATHERING,
    )
    largest = max((one.num_elements * one.bytes_per_element for one in held.setup.log.parameters), default=0)
    buffer = Term(
        name=GATHER_BUFFER,
        num_bytes=max(_BUCKET_BYTES, largest),
        holder=Holder.TENSORS,
        formula="the bucket of weights in transfer: 256 MiB, or the largest parameter",
        source=_GATHERING,
    )
    stays = tuple(term for term in held.generate if term.name not in (GATHERED, GATHER_BUFFER))
    return replace(held, generate=(*stays, once), gather=(*stays, once, buffer))


def generate_phases(
    weights: Weights, workload: InferenceWorkload, *, batch_size: int
) -> tuple[PhaseMemory, ...]:
    """Return the tensors at the two peaks of a call, prefill and decode."""
    shape = weights.shape
    first = 1 if shape.facts.num_decoder_layers else workload.longest_prompt
    last = cached_tokens(shape, workload)
    prefill = (
        *cache_terms(shape, workload, batch_size=batch_size, tokens=first),
        *prefill_terms(shape, workload, batch_size=batch_size),
    )
    decode = (
        *cache_terms(shape, workload, batch_size=batch_size, tokens=last),
        *decode_terms(shape, workload, batch_size=batch_size, tokens=last),
    )
    return (
        PhaseMemory(phase=RunPhase.PREFILL, terms=(*weights.generate, *prefill)),
        PhaseMemory(phase=RunPhase.DECODE, terms=(*weights.generate, *decode)),
    )


def device_memory(
    weights: Weights, workload: InferenceWorkload, *, batch_size: int, gpu: GpuSpec
) -> MemoryEstimate:
    """Return the memory of each GPU for a batch of this many prompts."""
    outside = non_torch_terms(gpu, weights.setup.topology, weights.setup.versions)
    before = [PhaseMemory(phase=RunPhase.LOAD, terms=(*weights.load, *outside))]
    if weights.is_gathered_once:
        before.append(PhaseMemory(phase=RunPhase.INITIALISE, terms=(*weights.gather, *outside)))
    phases = tuple(
        PhaseMemory(phase=phase.phase, terms=(*phase.terms, _rest(phase, weights), *outside))
        for phase in generate_phases(weights, workload, batch_size=batch_size)
    )
    is_compared = weights.shape.facts.model_type in COMPARED_FAMILIES
    return MemoryEstimate(
        phases=(*before, *phases),
        uncertainty=UNCERTAINTY if is_compared else UNCERTAINTY_ELSEWHERE,
        uncertainty_source=UNCERTAINTY_SOURCE if is_compared else _SOURCE_ELSEWHERE,
    )


def _rest(phase: PhaseMemory, weights: Weights) -> Term:
    """Return the memory that the allocator reserves beyond live tensors: a share of the temporary ones."""
    stays = sum(term.num_bytes for term in weights.generate if term.name in (WEIGHTS, GATHERED_ONCE))
    return Term(
        name="allocator cache",
        num_bytes=int(REST_SHARE * (phase.total_bytes - stays)),
        holder=Holder.CACHE,
        formula=f"{REST_SHARE:.0%} of all tensors except resident weights",
        source=_REST_SOURCE,
    )


_CASTS = (WEIGHTS, CAST)
"""Host memory that only a partitioned model has: a whole one is moved to its GPU tensor by tensor, mapped
from the file (zerofit/generation/loading.py, device_map)."""
_SWAPPER = "deepspeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py"


def host_memory(
    weights: Weights, workload: InferenceWorkload, *, model: ModelFacts, machine: Machine, batch_size: int
) -> MemoryEstimate:
    """Return the host memory of one node, for all its ranks."""
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


def swap_buffer_elements(weights: Weights) -> int:
    """Return the elements of a buffer between NVMe and GPU: at least those of the largest shard.

    A larger shard ends the run: "More elements than buffer size".
    Source: deepspeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py:357.
    """
    setup = weights.setup
    ranks = setup.topology.data_parallel_size
    largest = max((one.num_elements for one in setup.log.parameters), default=0)
    return max(NVME.weight_buffer_size, -(-largest // ranks))


def _terms_of(phase: PhaseMemory, weights: Weights) -> Iterator[Term]:
    """Yield the terms of a training phase that apply to generation, with this model's swap buffers.

    These are locked memory, not pinned by torch's allocator, which would round their size.
    Source: deepspeed 0.19.8, partitioned_param_swapper.py:124 (new_cpu_locked_tensor).
    """
    is_partitioned = weights.setup.strategy.zero_stage is ZeroStage.PARAMETERS
    swaps = any(term.name == WEIGHT_SWAP for term in phase.terms)
    for term in phase.terms:
        if swaps and term.name == ROUNDING:
            continue
        if term.name == WEIGHT_SWAP:
            if term.holder is Holder.PINNED:  # the pageable memory that they replace is never touched
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
    for phase in generate_phases(weights, workload, batch_size=batch_size):
        terms = (*_of_all(phase.terms, num_ranks, is_mapped=is_mapped), *stays)
        phases.append(PhaseMemory(phase=phase.phase, terms=terms))
    return MemoryEstimate(
        phases=tuple(phases),
        uncertainty=0.15,
        uncertainty_source="ASSUMPTION: weights and cache equal counted tensors; what the C library keeps of"
        " freed activations was not measured",
    )


def _of_all(terms: Iterable[Term], num_ranks: int, *, is_mapped: bool) -> Iterator[Term]:
    """Yield the terms of one rank, multiplied by the ranks of a node, as host memory.

    Args:
        is_mapped: True if the weights are the checkpoint's own pages, which ranks share: from_pretrained does
            so if it keeps the type (tests/evidence/memory/test_checkpoint_load.py).
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
    """Return the pages of the mapped checkpoint: as many as fit in memory."""
    return Term(
        name=CHECKPOINT,
        num_bytes=max(0, min(num_parameters * width, room)),
        holder=Holder.PAGEABLE,
        formula=f"{width} P per node, or as much as fits: mapped files, whose pages the kernel may drop",
        source="transformers 5.23, modeling_utils.py:4524: under ZeRO-3 rank 0 maps every file, the others"
        " read shapes",
    )
