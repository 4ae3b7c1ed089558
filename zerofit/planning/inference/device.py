"""Memory of one GPU that generates: weights, what ZeRO-3 gathers, cache and activations, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, Term
from zerofit.core.strategy import OffloadDevice, Precision, ZeroStage
from zerofit.core.units import MIB
from zerofit.generation.generation_job import Gather
from zerofit.planning.estimate.device_memory.memory import tensor_terms
from zerofit.planning.estimate.device_memory.outside import outside_terms
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.device_memory.tape import Tape
from zerofit.planning.estimate.engines.choose_engine import make_engine
from zerofit.planning.estimate.engines.engine import Setup, play
from zerofit.planning.estimate.engines.zero_engine import GATHER_BUFFER, GATHERED, WEIGHTS
from zerofit.planning.inference.activations import decode_terms, prefill_terms
from zerofit.planning.inference.cache import cache_terms, cached_tokens
from zerofit.planning.inference.passes import pass_log, shape_of

if TYPE_CHECKING:
    from zerofit.core.facts import GpuSpec, ModelFacts, Versions
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.closed_form.shape import Shape
    from zerofit.planning.inference.request import InferenceWorkload

GATHERED_ONCE = "weights gathered once"
_GATHERING = "zerofit.generation.gathering"
_BUCKET_BYTES = 256 * MIB
"""What zerofit.generation.gathering gathers at a time."""
COMPARED_FAMILIES = frozenset(
    {
        "bart", "bloom", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox",
        "gpt_oss", "gptj", "llama", "mistral", "mixtral", "opt", "phi", "phi3", "qwen2", "qwen3",
        "qwen3_moe", "stablelm", "t5"
    }
)  # fmt: skip
"""Families of which tests/planning/inference/test_activations.py counts the tensors of a small model."""
UNCERTAINTY, UNCERTAINTY_ELSEWHERE = 0.1, 0.25
UNCERTAINTY_SOURCE = (
    "ASSUMPTION: weights and cache equal counted tensors; activations, mask and logits are 1 to 2 times those"
    " counted on the CPU; no GPU was compared with, nor what the allocator keeps"
)
_SOURCE_ELSEWHERE = "ASSUMPTION: weights equal counted tensors; no model of this family was compared with"
REST_SHARE = 0.3
"""Of all that comes and goes. ASSUMPTION: every call is like the worst of five, of 12 to 32 layers and
batches of 8 to 32, that were played through the allocator with less and less memory: they came to their end
with 8 to 28 % more than their tensors, as each token's cache is larger than the blocks freed before it."""
_REST_SOURCE = (
    "ASSUMPTION: as the worst of some calls played through zerofit.planning.estimate.device_memory.allocator"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a layout holds of the weights, whatever the batch: the same for each of its batches."""

    setup: Setup
    shape: Shape
    load: tuple[Term, ...]
    """While the checkpoint is read."""
    generate: tuple[Term, ...]
    """At the largest moment of a forward pass."""
    gather: tuple[Term, ...] = ()
    """While all weights are gathered for a call; empty where that is not asked for, or they are all there."""

    @property
    def is_gathered_once(self) -> bool:
        """Whether all weights are gathered for a call, not layer by layer."""
        return bool(self.gather)

    @property
    def is_in_parts(self) -> bool:
        """Whether a pass finds no whole model on the GPU, so that weights must come from elsewhere."""
        strategy = self.setup.strategy
        is_spread = self.setup.topology.world_size > 1 or strategy.param_offload is not OffloadDevice.NONE
        return strategy.zero_stage is ZeroStage.PARAMETERS and is_spread

    @property
    def whole_bytes(self) -> int:
        """The whole model's weights."""
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
    """Return what a layout holds of the weights on each rank.

    The engine's own rules say it: loading under zero.Init, gathering, prefetching and releasing.

    Args:
        model: the dimensions.
        strategy: the layout.
        topology: its ranks.
        versions: of what runs.
        gather: ALWAYS holds the whole model beside the parts, where a rank's part is not the whole model.
        gpu: the smallest of a node; None for ranks on the CPU, which have no scratch memory of kernels.
    """
    precision = strategy.precision or Precision.FP32
    log = pass_log(model, precision)
    setup = Setup(log=log, strategy=strategy, topology=topology, versions=versions, trains=False)
    engine = make_engine(setup, Tape())
    play(engine)
    peaks = {peak.phase: tensor_terms(engine, peak) for peak in replay_live(engine.tape).peaks}
    load, generate = peaks[RunPhase.LOAD], peaks[RunPhase.FORWARD]
    if gpu is None:
        generate = tuple(term for term in generate if term.name != TensorKind.WORKSPACE)
    held = Weights(setup=setup, shape=shape_of(model, precision), load=load, generate=generate)
    return _gathered_once(held) if held.is_in_parts and gather is Gather.ALWAYS else held


def _gathered_once(held: Weights) -> Weights:
    """Return what is held where all weights are gathered for a call, so that no layer is gathered in it."""
    once = Term(
        name=GATHERED_ONCE,
        num_bytes=held.whole_bytes,
        holder=Holder.TENSORS,
        formula="b P beside each rank's part, as --gather always says",
        source=_GATHERING,
    )
    largest = max((one.num_elements * one.bytes_per_element for one in held.setup.log.parameters), default=0)
    buffer = Term(
        name=GATHER_BUFFER,
        num_bytes=max(_BUCKET_BYTES, largest),
        holder=Holder.TENSORS,
        formula="the bucket of weights that is on its way: 256 MiB, or the largest parameter",
        source=_GATHERING,
    )
    stays = tuple(term for term in held.generate if term.name not in (GATHERED, GATHER_BUFFER))
    return replace(held, generate=(*stays, once), gather=(*stays, once, buffer))


def generate_phases(
    weights: Weights, workload: InferenceWorkload, *, batch_size: int, holder: Holder
) -> tuple[PhaseMemory, ...]:
    """Return the two moments of a call that need most, without anything but tensors.

    Args:
        weights: what the layout holds of them.
        workload: what is generated.
        batch_size: prompts in one call.
        holder: who holds cache and activations.
    """
    shape = weights.shape
    first = 1 if shape.facts.num_decoder_layers else workload.longest_prompt
    last = cached_tokens(shape, workload)
    prefill = (
        *cache_terms(shape, workload, batch_size=batch_size, tokens=first, holder=holder),
        *prefill_terms(shape, workload, batch_size=batch_size, holder=holder),
    )
    decode = (
        *cache_terms(shape, workload, batch_size=batch_size, tokens=last, holder=holder),
        *decode_terms(shape, workload, batch_size=batch_size, tokens=last, holder=holder),
    )
    return (
        PhaseMemory(phase=RunPhase.PREFILL, terms=(*weights.generate, *prefill)),
        PhaseMemory(phase=RunPhase.DECODE, terms=(*weights.generate, *decode)),
    )


def device_memory(
    weights: Weights, workload: InferenceWorkload, *, batch_size: int, gpu: GpuSpec
) -> MemoryEstimate:
    """Return what each GPU needs for batches of so many prompts.

    Args:
        weights: what the layout holds of them.
        workload: what is generated.
        batch_size: prompts in one call.
        gpu: the smallest of a node.
    """
    outside = outside_terms(gpu, weights.setup.topology, weights.setup.versions)
    before = [PhaseMemory(phase=RunPhase.LOAD, terms=(*weights.load, *outside))]
    if weights.is_gathered_once:
        before.append(PhaseMemory(phase=RunPhase.INITIALISE, terms=(*weights.gather, *outside)))
    phases = tuple(
        PhaseMemory(phase=phase.phase, terms=(*phase.terms, _rest(phase, weights), *outside))
        for phase in generate_phases(weights, workload, batch_size=batch_size, holder=Holder.TENSORS)
    )
    is_compared = weights.shape.facts.model_type in COMPARED_FAMILIES
    return MemoryEstimate(
        phases=(*before, *phases),
        uncertainty=UNCERTAINTY if is_compared else UNCERTAINTY_ELSEWHERE,
        uncertainty_source=UNCERTAINTY_SOURCE if is_compared else _SOURCE_ELSEWHERE,
    )


def _rest(phase: PhaseMemory, weights: Weights) -> Term:
    """Return what the allocator keeps beyond live tensors: a share of all that comes and goes."""
    stays = sum(term.num_bytes for term in weights.generate if term.name in (WEIGHTS, GATHERED_ONCE))
    return Term(
        name="allocator cache",
        num_bytes=int(REST_SHARE * (phase.total_bytes - stays)),
        holder=Holder.CACHE,
        formula=f"{REST_SHARE:.0%} of all tensors but the weights that stay",
        source=_REST_SOURCE,
    )
