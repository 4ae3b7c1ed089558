"""A generation to plan: its workload, the layouts that were compared, and the plan made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.core.errors import UserError
from zerofit.core.estimates import Estimate
from zerofit.core.facts import Workload
from zerofit.core.plan import Plan, Rejected, Topology
from zerofit.core.strategy import DTYPES, Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.core.validation import check_at_least
from zerofit.generation.generation_job import Gather
from zerofit.planning.estimate.host_memory import CHECKPOINT
from zerofit.planning.problem import DEFAULT_RESERVE
from zerofit.planning.ranks import check_ranks
from zerofit.planning.search import Candidate

if TYPE_CHECKING:
    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions
    from zerofit.core.plan import Reason
    from zerofit.core.request import Request

FLAGS = {
    "zero_stage": "--zero-stage",
    "param_offload": "--param-offload",
    "nvme_path": "--nvme-path",
    "num_processes": "--num-processes",
    "micro_batch_size": "--batch-size",
    "precision": "--dtype",
    "on_cpu": "--cpu",
}
"""The flag of `zerofit generate` for each field of Request that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceWorkload:
    """Prompts and their completions."""

    num_prompts: int
    longest_prompt: int
    """Tokens of the longest prompt; of an encoder-decoder, those that its encoder reads."""
    max_new_tokens: int
    """Tokens that one completion may have."""
    num_beams: int = 1
    """Completions of one prompt that grow beside each other: each has a cache."""
    num_return_sequences: int = 1
    """Completions of one prompt that are returned."""
    gather: Gather = Gather.AUTO
    """ALWAYS needs the whole model beside each rank's part; the others need no more than NEVER."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "num_prompts")
        fields = ("longest_prompt", "max_new_tokens", "num_beams", "num_return_sequences")
        check_at_least(self, 1, *fields)

    @property
    def sequences_per_prompt(self) -> int:
        """Rows that one prompt takes in a batch.

        Beams are expanded to num_beams rows, samples to num_return_sequences; of beams num_return_sequences
        are returned, which are no more than there are.
        Source: transformers 5.23, generation/utils.py, _expand_inputs_for_generation in generate().
        """
        return max(self.num_beams, self.num_return_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCandidate(Candidate):
    """One layout with one batch, which is its micro_batch_size, and what it needs."""

    topology: Topology
    device: MemoryEstimate | None
    """Of the GPU that needs most; None where the ranks run on the CPU."""
    host: MemoryEstimate
    """Of one node, all its ranks together."""
    nvme_buffer_elements: int
    """Elements of a buffer between NVMe and GPU: DeepSpeed's offload_param.buffer_size must not be less."""
    seconds: float | None
    """About how long all prompts take (see seconds_of in estimator.py); None where it can't be computed."""

    @property
    def batch_size(self) -> int:
        """Prompts in one call on one rank."""
        return self.strategy.micro_batch_size or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceProblem:
    """A model, a machine and prompts."""

    model: ModelFacts
    machine: Machine
    versions: Versions
    workload: InferenceWorkload
    request: Request
    precision: Precision
    """Of the weights: the request's, or the one that was chosen."""

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on the CPU."""
        return self.request.on_cpu or not self.machine.gpus

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU that decides what fits; None where the ranks run on the CPU."""
        return None if self.on_cpu else min(self.machine.gpus, key=lambda gpu: gpu.usable_bytes)

    @property
    def device_bytes(self) -> int:
        """Memory of that GPU that may be taken."""
        return int(self.gpu.usable_bytes * (1 - DEFAULT_RESERVE)) if self.gpu else 0

    @property
    def host_bytes(self) -> int:
        """Host memory of a node that may be taken."""
        return self.machine.host_memory_available_bytes

    def is_close(self, candidate: InferenceCandidate) -> bool:
        """Return True if an estimate's uncertainty reaches beyond the GPU or the host's memory."""
        device, gpu = candidate.device, self.gpu
        if device is not None and gpu is not None:
            is_beyond = device.peak_bytes * (1 + device.uncertainty) > gpu.usable_bytes
            return is_beyond or surely_bytes(candidate.host) > self.host_bytes
        return surely_bytes(candidate.host) > self.host_bytes

    def topology(self, stage: ZeroStage) -> Topology:
        """Return the ranks: those said, else all GPUs; of whole models no more than there are prompts."""
        num_nodes = self.request.num_nodes or 1
        per_node = 1 if self.on_cpu else len(self.machine.gpus)
        if stage is not ZeroStage.PARAMETERS:
            per_node = max(1, min(per_node, -(-self.workload.num_prompts // num_nodes)))
        world_size = self.request.num_processes or num_nodes * per_node
        return Topology(num_nodes=num_nodes, world_size=world_size, on_cpu=self.on_cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePlan:
    """The layout that will generate, and why."""

    problem: InferenceProblem
    chosen: InferenceCandidate
    """The nearest one where nothing fits."""
    is_close: bool
    """True if the chosen layout fits only if its estimates are not too low."""
    others: tuple[tuple[InferenceCandidate, str], ...]
    """Every other layout with its smallest batch, and one phrase on why it lost."""
    reasons: tuple[Reason, ...]
    """Why each field of the strategy and the topology has its value."""
    suggestions: tuple[str, ...] = ()
    """The smallest changes of each sort that would make something fit, where nothing does."""

    @property
    def fits(self) -> bool:
        """True if the chosen layout fits."""
        return self.chosen.fits

    @property
    def strategy(self) -> Strategy:
        """The chosen layout."""
        return self.chosen.strategy

    @property
    def topology(self) -> Topology:
        """The ranks of the chosen layout."""
        return self.chosen.topology

    @property
    def batch_size(self) -> int:
        """Prompts in one call on one rank."""
        return self.chosen.batch_size

    @property
    def dtype(self) -> str:
        """Format of the weights, as torch names it, such as "bfloat16"."""
        precision = self.strategy.precision or Precision.FP32
        return next(name for name, one in DTYPES.items() if one is precision)

    def as_plan(self) -> Plan:
        """Return the plan that the launcher starts: the same strategy and ranks, without training."""
        chosen, problem = self.chosen, self.problem
        longest = problem.workload.longest_prompt + problem.workload.max_new_tokens
        estimate = None
        if chosen.device is not None:
            estimate = Estimate(device=chosen.device, host=chosen.host, step_time=None, tokens_per_step=0)
        return Plan(
            strategy=chosen.strategy,
            topology=chosen.topology,
            machine=problem.machine,
            versions=problem.versions,
            workload=Workload(sequence_length=longest),
            model=problem.model,
            trains=False,
            reasons=self.reasons,
            rejected=tuple(Rejected(strategy=other.strategy, why=why) for other, why in self.others),
            estimate=estimate,
        )


def surely_bytes(estimate: MemoryEstimate) -> int:
    """Return the bytes of the largest phase with its uncertainty, without pages that the kernel may drop."""
    held = (
        sum(term.num_bytes for term in phase.terms if term.name != CHECKPOINT) for phase in estimate.phases
    )
    return int(max(held) * (1 + estimate.uncertainty))


def check_request(problem: InferenceProblem) -> None:
    """Check that the flags agree with each other and with the machine.

    Raises:
        UserError: the ranks can't be made, or a flag brings nothing.
        ExceptionGroup: of UserErrors, where the flags break a compatibility rule.
    """
    request, machine = problem.request, problem.machine
    check_at_least(request, 1, "num_processes", "num_nodes", "micro_batch_size")
    stage, offload = request.zero_stage, request.param_offload
    if stage in (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS):
        raise UserError(
            "generate-stage-pointless",
            f"ZeRO stage {stage.value} partitions nothing that generation has",
            found=f"--zero-stage {stage.value}",
            why="stages 1 and 2 partition optimizer states and gradients; each rank would hold the whole"
            " model, as with stage 0",
            fix="give --zero-stage 0 for the whole model on each rank, 3 for a part of it, or leave it out",
            see="https://www.deepspeed.ai/tutorials/zero/#zero-overview",
        )
    if stage is ZeroStage.NOTHING and problem.workload.gather is Gather.ALWAYS:
        raise UserError(
            "generate-gather-needs-zero3",
            "there are no weights to gather",
            found="--gather always with --zero-stage 0",
            why="each rank holds the whole model already",
            fix="leave out --gather",
        )
    if offload is not None:  # a folder alone allows what the planner may choose
        strategy = Strategy(
            engine=Engine.DEEPSPEED,
            zero_stage=ZeroStage.PARAMETERS if stage is None else stage,
            param_offload=offload,
            nvme_path=request.nvme_path,
        )
        situation = situation_of_strategy(
            strategy,
            topology=Topology(),
            versions=problem.versions,
            typed=[name for name in FLAGS if getattr(request, name, None) is not None],
        )
        if errors := check(situation, rules=ALL_RULES).of(Severity.ERROR):
            raise ExceptionGroup("flags that contradict each other", [one.as_error() for one in errors])
    if request.num_processes is not None:
        check_ranks(
            request.num_processes,
            num_nodes=request.num_nodes or 1,
            num_gpus=None if request.on_cpu or not machine.gpus else len(machine.gpus),
            said=f"--num-processes {request.num_processes}",
        )


TIME_WORDS = "to read and move weights, at the peaks of memory and links: computed, not measured"
"""The meaning of a plan's time."""
_OFFLOADED = {OffloadDevice.CPU: ", weights in host memory", OffloadDevice.NVME: ", weights on NVMe"}


def layout_words(strategy: Strategy, topology: Topology) -> str:
    """Return where the model lies: "whole model on each of 8 GPUs", "ZeRO-3 over 8 GPUs"."""
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        offloaded = _OFFLOADED.get(strategy.param_offload, "")
        return f"ZeRO-3 {'over' if topology.world_size > 1 else 'on'} {ranks_words(topology)}{offloaded}"
    if topology.world_size == 1:
        return f"whole model on {ranks_words(topology)}"
    return f"whole model on each of {ranks_words(topology)}"


def ranks_words(topology: Topology) -> str:
    """Return the ranks: "8 GPUs", "16 GPUs of 2 nodes", "one GPU", "the CPU", "2 ranks on the CPU"."""
    if topology.on_cpu:
        words = "the CPU" if topology.world_size == 1 else f"{topology.world_size} ranks on the CPU"
    else:
        words = "one GPU" if topology.world_size == 1 else f"{topology.world_size} GPUs"
    return f"{words} of {topology.num_nodes} nodes" if topology.num_nodes > 1 else words


def duration(seconds: float) -> str:
    """Return a time as a person would say it: "40 s", "12 min", "3.1 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
