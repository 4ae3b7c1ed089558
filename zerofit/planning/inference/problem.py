"""A generation to plan: workload, problem, candidates and plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.check_run import refuse
from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES, OF_RANKS
from zerofit.checking.situation import RankCounts, Situation
from zerofit.core.errors import UserError
from zerofit.core.estimates import Estimate
from zerofit.core.facts import Workload
from zerofit.core.plan import Plan, Rejected, Topology
from zerofit.core.strategy import DTYPES, Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.core.validation import check_at_least
from zerofit.generation.generation_job import Gather
from zerofit.planning.estimate.host_memory import CHECKPOINT
from zerofit.planning.problem import DEFAULT_RESERVE
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
"""The flags of `zerofit generate` by field of Request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceWorkload:
    """Prompts and their completions."""

    num_prompts: int
    longest_prompt: int
    """Tokens of the longest prompt; of an encoder-decoder, of the encoder's input."""
    max_new_tokens: int
    """Maximum tokens of a completion."""
    num_beams: int = 1
    """Beams per prompt, each with its own KV cache."""
    num_return_sequences: int = 1
    """Completions returned per prompt."""
    gather: Gather = Gather.AUTO
    """ALWAYS needs memory for the whole model beside each rank's shard; AUTO needs no more than NEVER."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "num_prompts")
        fields = ("longest_prompt", "max_new_tokens", "num_beams", "num_return_sequences")
        check_at_least(self, 1, *fields)

    @property
    def sequences_per_prompt(self) -> int:
        """Rows of the batch per prompt: num_beams, or num_return_sequences when sampling.

        With beams, num_return_sequences is at most num_beams.
        Source: transformers 5.23, generation/utils.py, _expand_inputs_for_generation in generate().
        """
        return max(self.num_beams, self.num_return_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCandidate(Candidate):
    """One layout with one batch size, which is the strategy's micro_batch_size, and its estimates."""

    topology: Topology
    device: MemoryEstimate | None
    """Memory of the fullest GPU; None on the CPU."""
    host: MemoryEstimate
    """Memory of one node, for all its ranks."""
    nvme_buffer_elements: int
    """Elements of a buffer between NVMe and GPU: the minimum of DeepSpeed's offload_param.buffer_size."""
    seconds: float | None
    """Approximate time of all prompts (seconds_of in estimator.py); None if unknown."""

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

    @property
    def precision(self) -> Precision:
        """Format of the weights: the request's, else the checkpoint's."""
        return self.request.precision or DTYPES.get(self.model.checkpoint_dtype, Precision.FP32)

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on the CPU."""
        return self.request.on_cpu or not self.machine.gpus

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU with the least memory, which decides what fits; None on the CPU."""
        return None if self.on_cpu else min(self.machine.gpus, key=lambda gpu: gpu.usable_bytes)

    @property
    def device_bytes(self) -> int:
        """Memory of that GPU that a plan may use."""
        return int(self.gpu.usable_bytes * (1 - DEFAULT_RESERVE)) if self.gpu else 0

    @property
    def host_bytes(self) -> int:
        """Host memory of one node that a plan may use."""
        return self.machine.host_memory_available_bytes

    def is_close(self, candidate: InferenceCandidate) -> bool:
        """Return True if GPU or host memory is exceeded at the upper end of the uncertainty."""
        device, gpu = candidate.device, self.gpu
        is_beyond = device is not None and gpu is not None and device.upper_bytes > gpu.usable_bytes
        return is_beyond or upper_bytes_without_checkpoint(candidate.host) > self.host_bytes

    def topology(self, stage: ZeroStage) -> Topology:
        """Return the requested ranks, else one per GPU; of whole models, at most one per prompt."""
        num_nodes = self.request.num_nodes or 1
        per_node = 1 if self.on_cpu else len(self.machine.gpus)
        if stage is not ZeroStage.PARAMETERS:
            per_node = max(1, min(per_node, -(-self.workload.num_prompts // num_nodes)))
        world_size = self.request.num_processes or num_nodes * per_node
        return Topology(num_nodes=num_nodes, world_size=world_size, on_cpu=self.on_cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePlan:
    """The chosen layout and the reasons for it."""

    problem: InferenceProblem
    chosen: InferenceCandidate
    """The nearest if nothing fits."""
    is_close: bool
    """True if the choice exceeds memory at the upper end of its uncertainty."""
    others: tuple[tuple[InferenceCandidate, str], ...]
    """Every other layout with its best batch, and why it lost."""
    reasons: tuple[Reason, ...]
    """Why each field of the strategy and the topology has its value."""
    suggestions: tuple[str, ...] = ()
    """If nothing fits, the smallest change of each kind with which something would."""

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
        """Format of the weights by torch's name, such as "bfloat16"."""
        precision = self.strategy.precision or Precision.FP32
        return next(name for name, one in DTYPES.items() if one is precision)

    def as_plan(self) -> Plan:
        """Return the plan for the launcher: the same strategy and ranks, without training."""
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


def upper_bytes_without_checkpoint(estimate: MemoryEstimate) -> int:
    """Return the peak at the upper end of its uncertainty, without pages that the kernel may drop."""
    held = (
        sum(term.num_bytes for term in phase.terms if term.name != CHECKPOINT) for phase in estimate.phases
    )
    return int(max(held) * (1 + estimate.uncertainty))


def check_request(problem: InferenceProblem) -> None:
    """Check that the flags agree with each other and with the machine.

    Raises:
        UserError: the number of ranks is impossible, or a flag has no effect.
        ExceptionGroup: of UserErrors, if the flags break compatibility rules.
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
    if offload is not None:  # --nvme-path alone only allows NVMe offload
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
        counts = RankCounts(
            world_size=request.num_processes,
            text=f"--num-processes {request.num_processes}",
            num_nodes=request.num_nodes or 1,
            gpus_per_node=None if request.on_cpu or not machine.gpus else len(machine.gpus),
        )
        refuse(Situation(ranks=counts), rules=OF_RANKS)


_OFFLOADED = {OffloadDevice.CPU: ", weights in host memory", OffloadDevice.NVME: ", weights on NVMe"}


def layout_words(strategy: Strategy, topology: Topology) -> str:
    """Return a layout as text: "whole model on each of 8 GPUs", "ZeRO-3 over 8 GPUs"."""
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        offloaded = _OFFLOADED.get(strategy.param_offload, "")
        return f"ZeRO-3 {'over' if topology.world_size > 1 else 'on'} {ranks_words(topology)}{offloaded}"
    if topology.world_size == 1:
        return f"whole model on {ranks_words(topology)}"
    return f"whole model on each of {ranks_words(topology)}"


def ranks_words(topology: Topology) -> str:
    """Return the ranks as text: "8 GPUs", "16 GPUs of 2 nodes", "one GPU", "the CPU"."""
    if topology.on_cpu:
        words = "the CPU" if topology.world_size == 1 else f"{topology.world_size} ranks on the CPU"
    else:
        words = "one GPU" if topology.world_size == 1 else f"{topology.world_size} GPUs"
    return f"{words} of {topology.num_nodes} nodes" if topology.num_nodes > 1 else words


def duration(seconds: float) -> str:
    """Return a rounded time: "40 s", "12 min", "3.1 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
