"""plan_generation: the whole model on each rank, or ZeRO-3, by the memory of the model's traced passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.checking.engine import check, refuse
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES, OF_RANKS
from zerofit.checking.situation import RankCounts, Situation
from zerofit.core.errors import UserError
from zerofit.core.estimates import Estimate
from zerofit.core.facts import Workload
from zerofit.core.plan import Origin, Plan, Reason, Rejected, Topology
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes
from zerofit.generation.generation_job import Gather
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.generation import (
    device_memory,
    generation_phases,
    host_of_cpu_ranks,
    host_of_gpu_ranks,
)
from zerofit.planning.estimate.nvme_space import nvme_bytes_needed
from zerofit.planning.options import DEFAULT_RESERVE
from zerofit.planning.plan_labels import gpus_words, memory_label, terms_words
from zerofit.planning.search import shortage_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.allocation_log import Trace
    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions
    from zerofit.models.trace.generation import GenerateCall, GenerationTrace
    from zerofit.planning.run_spec import RunSpec

FLAGS = {
    "zero_stage": "--zero-stage",
    "param_offload": "--param-offload",
    "nvme_path": "--nvme-path",
    "world_size": "--num-processes",
    "micro_batch_size": "--batch-size",
    "precision": "--dtype",
    "on_cpu": "--cpu",
}
"""The flags of `zerofit generate` by field of Strategy and Topology."""
BATCH_SIZES = (32, 16, 8, 4, 2, 1)
"""Prompts in one call. ASSUMPTION: at 32 rows the time to compute is no longer small beside that to read the
weights, and a killed run loses its current call."""
_LAYOUTS = (
    (ZeroStage.NOTHING, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.NONE),
    (ZeroStage.PARAMETERS, OffloadDevice.CPU),
    (ZeroStage.PARAMETERS, OffloadDevice.NVME),
)
"""In order of the time per token: weights stay, or come from other ranks, from the host, from a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationProblem:
    """A model, its traced passes, a machine and what the user set."""

    model: ModelFacts
    call: GenerateCall
    trace: GenerationTrace | None
    """None if the model can't be traced: the flags then give stage and batch size."""
    precision: Precision
    """Format of the weights."""
    machine: Machine
    versions: Versions
    spec: RunSpec
    """What the user asked for."""
    num_prompts: int
    gather: Gather = Gather.AUTO
    """ALWAYS needs memory for the whole model beside each rank's shard."""

    @property
    def on_cpu(self) -> bool:
        """True if the ranks run on the CPU."""
        return self.spec.on_cpu or not self.machine.gpus

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU with the least memory; None on the CPU."""
        return None if self.on_cpu else min(self.machine.gpus, key=lambda gpu: gpu.usable_bytes)

    def topology(self, stage: ZeroStage) -> Topology:
        """Return the requested ranks, else one per GPU; of whole models, at most one per prompt."""
        num_nodes = self.spec.overrides.get("num_nodes") or 1
        per_node = 1 if self.on_cpu else len(self.machine.gpus)
        if stage is not ZeroStage.PARAMETERS:
            per_node = max(1, min(per_node, -(-self.num_prompts // num_nodes)))
        world_size = self.spec.overrides.get("world_size") or num_nodes * per_node
        return Topology(num_nodes=num_nodes, world_size=world_size, on_cpu=self.on_cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLayout:
    """A placement of the weights with a batch size, which is the strategy's micro_batch_size."""

    strategy: Strategy
    topology: Topology
    device: MemoryEstimate | None
    """Memory of the fullest GPU; None on the CPU."""
    host: MemoryEstimate | None
    """Memory of one node, for all its ranks; None if unknown."""
    shortage: str = ""
    """Why it does not fit; empty if it fits."""
    is_close: bool = False
    """True if it does not fit at the upper end of its uncertainty."""

    @property
    def batch_size(self) -> int:
        """Prompts in one call on one rank."""
        return self.strategy.micro_batch_size or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The chosen layout, and those that were tried before it."""

    problem: GenerationProblem
    chosen: GenerationLayout
    """The last one tried if none fits."""
    others: tuple[GenerationLayout, ...]

    @property
    def fits(self) -> bool:
        """True if the chosen layout fits."""
        return not self.chosen.shortage

    def as_plan(self) -> Plan:
        """Return the plan for the launcher."""
        chosen, problem = self.chosen, self.problem
        estimate = None
        if chosen.device is not None and chosen.host is not None:
            estimate = Estimate(device=chosen.device, host=chosen.host, step_time=None, tokens_per_step=0)
        call = problem.call
        return Plan(
            strategy=chosen.strategy,
            topology=chosen.topology,
            machine=problem.machine,
            versions=problem.versions,
            workload=Workload(sequence_length=call.prompt_length + call.max_new_tokens),
            model=problem.model,
            trains=False,
            reasons=tuple(_reasons(self)),
            rejected=tuple(Rejected(strategy=other.strategy, why=other.shortage) for other in self.others),
            estimate=estimate,
        )


def plan_generation(problem: GenerationProblem) -> GenerationPlan:
    """Return the first layout that fits, with the largest batch that surely does.

    The order is: the whole model on each rank, ZeRO-3 over all ranks, its weights on the host, or on NVMe. If
    none fits, the plan is that of the last one (`fits` is False).
    """
    tried: list[GenerationLayout] = []
    for strategy in _strategies(problem):
        for size in _batch_sizes(problem, strategy):
            layout = _layout(problem, replace(strategy, micro_batch_size=size))
            is_least = size == 1 or problem.spec.overrides.has("micro_batch_size")
            if not layout.shortage and (is_least or not layout.is_close):
                return GenerationPlan(problem=problem, chosen=layout, others=tuple(tried))
        tried.append(layout)
    *others, last = tried
    return GenerationPlan(problem=problem, chosen=last, others=tuple(others))


def check_spec(spec: RunSpec, *, machine: Machine, versions: Versions, gather: Gather) -> None:
    """Check that the flags agree with each other and with the machine.

    Raises:
        UserError: the number of ranks is impossible, or a flag has no effect.
        ExceptionGroup: of UserErrors, if the flags break compatibility rules.
    """
    stage, offload = spec.overrides.get("zero_stage"), spec.overrides.get("param_offload")
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
    if stage is ZeroStage.NOTHING and gather is Gather.ALWAYS:
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
            nvme_path=spec.overrides.get("nvme_path"),
        )
        typed = [name for name in FLAGS if spec.overrides.has(name)]
        situation = situation_of_strategy(strategy, topology=Topology(), versions=versions, typed=typed)
        if errors := check(situation, rules=ALL_RULES).of(Severity.ERROR):
            raise ExceptionGroup("flags that contradict each other", [each.as_error() for each in errors])
    if spec.overrides.has("world_size"):
        counts = RankCounts(
            world_size=spec.overrides.get("world_size"),
            text=spec.ranks_said,
            num_nodes=spec.overrides.get("num_nodes") or 1,
            gpus_per_node=None if spec.on_cpu or not machine.gpus else len(machine.gpus),
        )
        refuse(Situation(ranks=counts), rules=OF_RANKS)


def _strategies(problem: GenerationProblem) -> Iterator[Strategy]:
    """Yield the placements that the flags and the machine allow; at least one."""
    spec = problem.spec
    for stage, offload in _LAYOUTS:
        if spec.overrides.get("zero_stage") not in (None, stage) or spec.overrides.get(
            "param_offload"
        ) not in (None, offload):
            continue
        is_said = spec.overrides.get("param_offload") is offload or (
            spec.overrides.get("zero_stage") is stage and offload is OffloadDevice.NONE
        )
        needs_others = stage is ZeroStage.PARAMETERS and offload is OffloadDevice.NONE
        if needs_others and problem.topology(stage).world_size == 1 and not is_said:
            continue  # a single rank's part is the whole model
        if offload is not OffloadDevice.NONE and problem.on_cpu and not is_said:
            continue  # the weights are in host memory anyway
        if offload is OffloadDevice.NVME and spec.overrides.get("nvme_path") is None:
            continue
        yield Strategy(
            engine=Engine.DEEPSPEED if stage is ZeroStage.PARAMETERS else Engine.NATIVE,
            zero_stage=stage,
            param_offload=offload,
            nvme_path=spec.overrides.get("nvme_path") if offload is OffloadDevice.NVME else None,
            precision=problem.precision,
        )


def _batch_sizes(problem: GenerationProblem, strategy: Strategy) -> list[int]:
    """Return the batch sizes to try, the largest first: at most all prompts of a rank."""
    if problem.spec.overrides.has("micro_batch_size"):
        return [problem.spec.overrides.get("micro_batch_size")]
    each = max(1, -(-problem.num_prompts // problem.topology(strategy.zero_stage).world_size))
    return sorted({min(size, each) for size in BATCH_SIZES}, reverse=True)


def _layout(problem: GenerationProblem, strategy: Strategy) -> GenerationLayout:
    topology, gpu = problem.topology(strategy.zero_stage), problem.gpu
    if problem.trace is None:
        return GenerationLayout(strategy=strategy, topology=topology, device=None, host=None)
    prefill = _setup(problem, strategy, topology, problem.trace.prefill)
    decode = _setup(problem, strategy, topology, problem.trace.decode)
    phases = generation_phases(prefill, decode, gathers_once=problem.gather is Gather.ALWAYS)
    shortages, is_close = [], False
    if gpu is None:
        host, device = host_of_cpu_ranks(phases, topology), None
    else:
        host = host_of_gpu_ranks(prefill, model=problem.model, machine=problem.machine)
        device = device_memory(phases, gpu=gpu, topology=topology, versions=problem.versions)
        limit = int(gpu.usable_bytes * (1 - DEFAULT_RESERVE))
        is_close = device.upper_bytes > gpu.usable_bytes
        if device.peak_bytes > limit:
            shortages.append(shortage_text(device, limit, "on each GPU"))
    host_limit = problem.machine.host_memory_available_bytes
    if host.peak_bytes > host_limit:
        shortages.append(shortage_text(host, host_limit, "of host memory"))
    if strategy.uses_nvme and 0 < problem.machine.nvme_bytes < (needed := nvme_bytes_needed(prefill)):
        available = format_bytes(problem.machine.nvme_bytes)
        shortages.append(f"needs {format_bytes(needed)} of {available} on the NVMe disk")
    return GenerationLayout(
        strategy=strategy,
        topology=topology,
        device=device,
        host=host,
        shortage="; ".join(shortages),
        is_close=is_close or host.upper_bytes > host_limit,
    )


def _setup(problem: GenerationProblem, strategy: Strategy, topology: Topology, trace: Trace) -> Setup:
    capability = problem.gpu.compute_capability if problem.gpu else None
    return Setup(
        log=trace.log_for(strategy.micro_batch_size or 1),
        strategy=strategy,
        topology=topology,
        versions=problem.versions,
        trains=False,
        compute_capability=capability or trace.request.compute_capability,
    )


_OFFLOADED = {OffloadDevice.CPU: ", weights in host memory", OffloadDevice.NVME: ", weights on NVMe"}


def layout_words(strategy: Strategy, topology: Topology) -> str:
    """Return a layout as text: "whole model on each of 8 GPUs", "ZeRO-3 over 8 GPUs"."""
    ranks = _ranks_words(topology)
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        where = "over" if topology.world_size > 1 else "on"
        return f"ZeRO-3 {where} {ranks}{_OFFLOADED.get(strategy.param_offload, '')}"
    return f"whole model on {'each of ' if topology.world_size > 1 else ''}{ranks}"


def _ranks_words(topology: Topology) -> str:
    if topology.on_cpu:
        words = "the CPU" if topology.world_size == 1 else f"{topology.world_size} ranks on the CPU"
    else:
        words = "one GPU" if topology.world_size == 1 else f"{topology.world_size} GPUs"
    return f"{words} of {topology.num_nodes} nodes" if topology.num_nodes > 1 else words


def generation_table(plan: GenerationPlan) -> str:
    """Return a plan as text: the model, the machine, the layouts that were tried, and the largest terms."""
    problem, call, chosen = plan.problem, plan.problem.call, plan.chosen
    model, where = problem.model, "the CPU" if problem.on_cpu else gpus_words(problem.machine)
    rows = [["", "layout", "batch", *(() if problem.on_cpu else ("GPU GiB",)), "host GiB", "verdict"]]
    for layout in (*plan.others, chosen):
        mark = ">" if layout is chosen and plan.fits else ""
        words = layout_words(layout.strategy, layout.topology)
        sizes = [layout.host] if problem.on_cpu else [layout.device, layout.host]
        verdict = layout.shortage or ("fits, closely" if layout.is_close else "fits")
        rows.append(
            [
                *(mark, words, str(layout.batch_size)),
                *("?" if size is None else memory_label(size) for size in sizes),
                verdict if layout.host is not None else "not estimated",
            ]
        )
    peaks = {"GPU": chosen.device, "host": chosen.host}
    return "\n".join(
        (
            f"{model.name}: {model.architecture}, {model.num_parameters / 1e9:.2f} B parameters, "
            f"{problem.precision}, on {where}",
            f"{problem.num_prompts} prompts of at most {call.prompt_length} tokens, "
            f"at most {call.max_new_tokens} new ones",
            "",
            *table_lines(rows),
            "",
            *(
                f"{name}, most in {size.peak.phase.value}: {terms_words(size.peak)}"
                for name, size in peaks.items()
                if size is not None
            ),
        )
    )


def _reasons(plan: GenerationPlan) -> Iterator[Reason]:
    """Yield why each field of the strategy and the topology has its value."""
    problem, chosen = plan.problem, plan.chosen
    before = f"{layout_words(plan.others[-1].strategy, plan.others[-1].topology)} " if plan.others else ""
    whys = {
        "zero_stage": before + plan.others[-1].shortage if plan.others else "the first layout that fits",
        "param_offload": "the first layout that fits",
        "precision": "the checkpoint's",
        "micro_batch_size": "the largest that fits, of at most a rank's prompts",
    }
    for name, why in whys.items():
        is_said = problem.spec.overrides.has(name)
        yield Reason(
            field=name,
            value=str(getattr(chosen.strategy, name)),
            origin=Origin.FLAG if is_said else Origin.PLANNER,
            why=f"{FLAGS[name]} says so" if is_said else why,
        )
    is_said = problem.spec.overrides.has("world_size")
    yield Reason(
        field="world_size",
        value=str(chosen.topology.world_size),
        origin=Origin.FLAG if is_said else Origin.PLANNER,
        why=f"{FLAGS['world_size']} says so" if is_said else "one for each GPU, or for each prompt",
    )
