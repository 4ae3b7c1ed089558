"""choose: the Plan of what the user asked for, with defaults for the rest, without a search."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import refuse
from zerofit.checking.rules import OF_RANKS
from zerofit.checking.situation import RankCounts, Situation
from zerofit.core.batch import split_global_batch
from zerofit.core.errors import UserError
from zerofit.core.facts import Machine, Versions, Workload
from zerofit.core.overrides import FLAGS, Overrides, overrides
from zerofit.core.plan import BY_USER, CPU_REASON, GROUP_FLAGS, Origin, Plan, Reason, Topology
from zerofit.core.presets import find_preset
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from zerofit.planning.run_spec import RunSpec


def choose(*, machine: Machine, versions: Versions, spec: RunSpec, has_these_gpus: bool = True) -> Plan:
    """Return the plan of a spec on a machine, with defaults for what is not set.

    It is not checked against zerofit.checking.rules.

    Args:
        has_these_gpus: False if the files are for another machine, whose GPUs can't be verified.

    Raises:
        UserError: the number of ranks or the global batch is not possible.
    """
    plan = spec.plan
    if plan and spec.preset:
        raise _plan_and_preset(spec.preset)
    topology = topology_of(machine, spec, has_these_gpus=has_these_gpus)
    strategy, reasons = _base(machine, topology, spec)
    said = spec.overrides.strategy
    if said.get("gradient_checkpointing") is False:
        # Nothing is recomputed now, whatever the plan file sets.
        said |= {"checkpoint_every": 1, "activation_offload": False}
    strategy = replace(strategy, **said)
    strategy = _with_both_copies(strategy, said)
    if not strategy.uses_nvme and "nvme_path" not in said:
        strategy = replace(strategy, nvme_path=None)  # a preset's, whose offload a flag turned off
    before = plan.topology if plan else topology
    regrouped = [name for name in GROUP_FLAGS if getattr(before, name) != getattr(topology, name)]
    if spec.overrides.has("dp_replicate_size"):
        regrouped.append("dp_replicate_size")
    reasons = [reason for reason in reasons if reason.field not in (*said, *regrouped)]
    reasons += reasons_by_flag(spec)
    if topology.dp_replicate_size > 1 and spec.overrides.has("dp_replicate_size"):
        reasons.append(_copies_reason(topology, spec.overrides))
    if spec.on_cpu:
        reasons = [reason for reason in reasons if reason.field != "on_cpu"] + [CPU_REASON]
    workload = _workload(spec)
    if workload.global_batch_size is not None:
        if plan and "gradient_accumulation_steps" not in said:
            # The global batch stays, so accumulation follows from the present ranks.
            strategy = replace(strategy, gradient_accumulation_steps=None)
        strategy, reason = _with_global_batch(strategy, topology, workload.global_batch_size)
        reasons = [other for other in reasons if other.field != reason.field] + [reason]
    return Plan(
        strategy=strategy,
        topology=topology,
        machine=machine,
        versions=versions,
        workload=workload,
        model=plan.model if plan else None,
        trains=_trains(spec),
        reasons=tuple(reasons),
        rejected=plan.rejected if plan else (),
        estimate=plan.estimate if plan and (plan.strategy, plan.topology) == (strategy, topology) else None,
        capture=plan.capture if plan else None,
    )


def _copies_reason(topology: Topology, said: Overrides) -> Reason:
    """Return why FSDP2 makes several copies of the weights."""
    name, value = "dp_replicate_size", str(topology.dp_replicate_size)
    return Reason(field=name, value=value, origin=origin_of(name, said), why=_why_said(name, said))


def _with_both_copies(strategy: Strategy, said: Mapping[str, Any]) -> Strategy:
    """Return a strategy in which FSDP2 offloads both copies if the user named one of them."""
    pair = ("optimizer_offload", "param_offload")
    named = [said[name] for name in pair if name in said]
    if strategy.engine is not Engine.FSDP2 or len(named) != 1:
        return strategy
    return replace(strategy, optimizer_offload=named[0], param_offload=named[0])


def _trains(spec: RunSpec) -> bool:
    if spec.preset:
        return find_preset(spec.preset).trains
    return spec.plan.trains if spec.plan else True


def _workload(spec: RunSpec) -> Workload:
    base = spec.plan.workload if spec.plan else Workload()
    size = spec.overrides.get("global_batch_size")
    return replace(base, global_batch_size=size or base.global_batch_size)


def _plan_and_preset(preset: str) -> UserError:
    return UserError(
        "plan-and-preset",
        "a plan and a preset each bring a whole strategy",
        found=f"--plan with --preset {preset}",
        why="only one of them can be followed",
        fix="leave one of the two out",
    )


def rehearsed(plan: Plan, machine: Machine) -> Plan:
    """Return a plan for GPUs with CPU ranks of this machine; its estimate remains that of the GPUs.

    accelerate refuses fp16 on a CPU (accelerate/accelerator.py, "fp16 mixed precision requires a GPU").
    """
    strategy, reasons = plan.strategy, plan.reasons
    if strategy.precision is Precision.FP16:
        strategy = replace(strategy, precision=Precision.FP32)
        why = "CPU ranks have no fp16, which the plan for the GPUs takes"
        others = tuple(reason for reason in reasons if reason.field != "precision")
        reasons = (*others, _reason(strategy, "precision", Origin.PLANNER, why))
    return replace(
        plan,
        strategy=strategy,
        topology=replace(plan.topology, on_cpu=True),
        machine=machine,
        reasons=(*reasons, CPU_REASON),
    )


def with_explicit_numbers(plan: Plan, *, but_for: Collection[str] = ()) -> Plan:
    """Return the plan with numbers for all values that its DeepSpeed file would leave to the script ("auto").

    For files that are used alone: a micro-batch and accumulation of 1, and no clipping.

    Args:
        but_for: fields that remain the script's.
    """
    if plan.strategy.engine is not Engine.DEEPSPEED:
        return plan
    numbers: dict[str, float] = {"micro_batch_size": 1}
    if plan.trains:
        numbers |= {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    missing = {
        name: number
        for name, number in numbers.items()
        if getattr(plan.strategy, name) is None and name not in but_for
    }
    reasons = [
        Reason(field=name, value=show(number), origin=Origin.DEFAULT, why="no flag says otherwise")
        for name, number in missing.items()
    ]
    strategy = replace(plan.strategy, **missing)  # type: ignore[arg-type]
    return replace(plan, strategy=strategy, reasons=(*plan.reasons, *reasons))


def topology_of(machine: Machine, spec: RunSpec, *, has_these_gpus: bool = True) -> Topology:
    """Return the ranks of a spec, by default one per GPU.

    Args:
        has_these_gpus: False for another machine, whose GPUs can't be verified.

    Raises:
        UserError: they do not divide over the nodes, or there are fewer GPUs.
    """
    base, said = spec.plan.topology if spec.plan else Topology(), spec.overrides
    num_gpus = len(machine.gpus)
    on_cpu = spec.runs_on_cpu or (num_gpus == 0 and has_these_gpus)
    num_nodes = said.get("num_nodes") or base.num_nodes
    world_size = said.get("world_size") or (
        base.world_size if spec.plan else max(1, 0 if on_cpu else num_gpus) * num_nodes
    )
    words = spec.ranks_said if said.has("world_size") else f"{world_size} rank{'s' * (world_size > 1)}"
    if spec.plan and not said.has("world_size"):
        words += " in the plan"
    sizes = {name: said.get(name) or getattr(base, name) for name in _GROUPS.values()}
    per_rank = said.get("pipeline_stages_per_rank")
    is_of_plan = sizes["pipeline_parallel_size"] == base.pipeline_parallel_size
    if per_rank is None:
        per_rank = base.pipeline_stages_per_rank if is_of_plan else 1
    copies = said.get("dp_replicate_size") or base.dp_replicate_size
    counts = RankCounts(
        world_size=world_size,
        text=words,
        num_nodes=num_nodes,
        gpus_per_node=num_gpus if not on_cpu and has_these_gpus else None,
        group_sizes={kind: sizes[name] for kind, name in _GROUPS.items()},
        stages_per_rank=per_rank,
        dp_replicate_size=copies,
    )
    refuse(Situation(ranks=counts), rules=OF_RANKS)
    return Topology(
        num_nodes=num_nodes,
        world_size=world_size,
        on_cpu=on_cpu,
        pipeline_stages_per_rank=per_rank,
        dp_replicate_size=copies,
        stage_blocks=base.stage_blocks if is_of_plan and per_rank == base.pipeline_stages_per_rank else (),
        **sizes,
    )


_GROUPS = {
    "tensor": "tensor_parallel_size",
    "sequence": "sequence_parallel_size",
    "pipeline": "pipeline_parallel_size",
}
"""The field of Topology with the size of each kind of group."""


def _base(machine: Machine, topology: Topology, spec: RunSpec) -> tuple[Strategy, list[Reason]]:
    if spec.plan:
        return _taken_up(spec.plan, machine, topology, spec.overrides)
    if spec.preset:
        preset = find_preset(spec.preset)
        strategy = preset.strategy
        field = "zero_stage" if strategy.engine is Engine.DEEPSPEED else "engine"
        stage = _reason(strategy, field, Origin.PRESET, f"preset {preset.name}: {preset.title}")
    else:
        strategy, stage = _default_engine(topology, spec.overrides)
    strategy = replace(strategy, precision=default_precision(machine, on_cpu=topology.on_cpu))
    return strategy, [stage, _precision_reason(strategy, machine)]


def _taken_up(
    plan: Plan, machine: Machine, topology: Topology, said: Overrides
) -> tuple[Strategy, list[Reason]]:
    """Return the plan's strategy and reasons, with its defaults chosen anew for this machine."""
    strategy = plan.strategy
    by_default = {reason.field for reason in plan.reasons if reason.origin is Origin.DEFAULT}
    by_flag = {reason.field for reason in plan.reasons if reason.origin in BY_USER}
    asked = {field: getattr(strategy, field) for field in by_flag & FLAGS.keys()}
    remade = {}
    if by_default & {"engine", "zero_stage"}:
        default, reason = _default_engine(topology, said.over(overrides("the plan", **asked)))
        anew: dict[str, Any] = {"engine": default.engine, "zero_stage": default.zero_stage}
        strategy = replace(strategy, **{name: anew[name] for name in anew if name not in asked})
        remade = dict.fromkeys(("engine", "zero_stage"), reason)
    if "precision" in by_default:
        strategy = replace(strategy, precision=default_precision(machine, on_cpu=topology.on_cpu))
        remade["precision"] = _precision_reason(strategy, machine)
    reasons = [
        remade.get(reason.field, reason) if reason.origin is Origin.DEFAULT else reason
        for reason in plan.reasons
    ]
    return strategy, [
        reason for reason in reasons if reason.origin is not Origin.DEFAULT or reason.field not in asked
    ]


def _default_engine(topology: Topology, said: Overrides) -> tuple[Strategy, Reason]:
    engine, stage = said.get("engine"), said.get("zero_stage")
    offloads = {said.get("optimizer_offload"), said.get("param_offload")} - {None, OffloadDevice.NONE}
    if engine is Engine.FSDP2:
        strategy = Strategy(engine=Engine.FSDP2)
        return strategy, _reason(strategy, "engine", Origin.DEFAULT, f"{said.where('engine')} says so")
    needs_deepspeed = engine is Engine.DEEPSPEED or stage or offloads
    if engine is Engine.NATIVE or (topology.world_size == 1 and not needs_deepspeed):
        strategy = Strategy()
        why = "DeepSpeed shards over ranks or offloads; with neither, plain PyTorch is as small and faster"
        return strategy, _reason(strategy, "engine", Origin.DEFAULT, why)
    if topology.pipeline_parallel_size > 1 and not needs_deepspeed:
        strategy, why = Strategy(), "PyTorch runs the stages of a pipeline"
        return strategy, _reason(strategy, "engine", Origin.DEFAULT, why)
    if OffloadDevice.NVME in offloads or said.get("param_offload") in offloads:
        stage, why = ZeroStage.PARAMETERS, "this offload needs the parameters sharded"
    else:
        stage = ZeroStage.GRADIENTS
        why = "shards gradients and optimizer states and sends no more than data parallelism does"
    strategy = Strategy(engine=Engine.DEEPSPEED, zero_stage=stage)
    return strategy, _reason(strategy, "zero_stage", Origin.DEFAULT, why)


def why_precision(precision: Precision, machine: Machine) -> str:
    """Return why this is the default precision of a machine."""
    if precision is Precision.FP32:
        return "the ranks run on the CPU"
    if precision is Precision.BF16:
        return "every GPU from Ampere on has bf16"
    if any(gpu.compute_capability is None for gpu in machine.gpus):
        return "no bf16 rate of these GPUs is known"
    return "these GPUs are older than Ampere (compute capability 8.0) and have no bf16"


def default_precision(machine: Machine, *, on_cpu: bool = False) -> Precision:
    """Return the 16-bit format that every GPU of the machine has; fp32 on the CPU."""
    if on_cpu:
        return Precision.FP32
    return Precision.BF16 if all(gpu.has_bf16 for gpu in machine.gpus) else Precision.FP16


def _precision_reason(strategy: Strategy, machine: Machine) -> Reason:
    why = why_precision(strategy.precision or Precision.FP32, machine)
    return _reason(strategy, "precision", Origin.DEFAULT, why)


def reasons_by_flag(spec: RunSpec) -> list[Reason]:
    """Return a reason for each field of Strategy that the user set, with the place of its value."""
    said = spec.overrides
    return [
        Reason(field=name, value=show(value), origin=origin_of(name, said), why=_why_said(name, said))
        for name, value in said.strategy.items()
    ]


def origin_of(name: str, said: Overrides) -> Origin:
    """Return who set a field: a file, or a flag."""
    return Origin.FILE if said.is_in_file(name) else Origin.FLAG


def _why_said(name: str, said: Overrides) -> str:
    """Return where a value comes from, and which other setting it overrides."""
    other = said.beaten.get(name)
    against = f", against {other.where} ({show(other.value)})" if other else ""
    return f"{said.where(name)} says so{against}"


def _with_global_batch(
    strategy: Strategy, topology: Topology, global_batch_size: int
) -> tuple[Strategy, Reason]:
    micro_batch_size, steps = split_global_batch(
        global_batch_size=global_batch_size,
        micro_batch_size=strategy.micro_batch_size,
        gradient_accumulation_steps=strategy.gradient_accumulation_steps,
        data_parallel_size=topology.data_parallel_size,
    )
    strategy = replace(strategy, micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)
    ranks = topology.data_parallel_size
    why = f"global batch {global_batch_size} = {micro_batch_size} x {steps} x {ranks} ranks"
    return strategy, _reason(strategy, "gradient_accumulation_steps", Origin.FLAG, why)


def _reason(strategy: Strategy, field: str, origin: Origin, why: str) -> Reason:
    return Reason(field=field, value=show(getattr(strategy, field)), origin=origin, why=why)
