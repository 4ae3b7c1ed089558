"""Makes the report of a run from its folder: `zerofit runs report`, and what `zerofit runs show` compares.

The records in a run's folder contain names, paths, arguments and the script's own words. Each field of a
report is taken on purpose: a number in its range, or a word that zerofit itself knows.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.errors import UserError
from zerofit.core.estimates import Holder
from zerofit.core.optimizers.lookup import entry_of, optimizer_of_class
from zerofit.core.plan import LARGEST_PLAN, PLAN_VERSION, Plan
from zerofit.core.rank_observation import Phase, RankObservation, read_observation
from zerofit.core.rank_record import RankRecord, read_record
from zerofit.core.run_report import (
    Attention,
    Measured,
    MeasuredPhase,
    Predicted,
    PredictedPhase,
    ReportedEnd,
    ReportedGpu,
    ReportedModel,
    ReportedRecovery,
    ReportedStrategy,
    ReportedWorkload,
    RunReport,
    plain_count,
    plain_number,
    plain_version,
)
from zerofit.core.strategy import DTYPES, Buckets
from zerofit.core.validation import parse_known, short_reason
from zerofit.launching.diagnose import EndKind
from zerofit.launching.explain_run import explain_run
from zerofit.machine.gpu_catalog import catalog_gpu

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import Machine, Versions
    from zerofit.launching.clusters.follow import FollowedRun

_MOST_BYTES = 16 * 1024 * 1024
"""Of a run.json. ASSUMPTION."""
_RANK = re.compile(r"rank(\d{1,6})\.(live|json)")
_MODELS = "transformers.models."
_MOST_RECOVERIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRecovery:
    """A recovery in run.json."""

    step: int | None = None
    lost_steps: int | None = None
    resumed_from: str | None = None
    cause: str = ""
    strategy_before: str = ""
    strategy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEnd:
    """The part of a run.json that a report and a page are made of; a report has no text of it."""

    exit_code: int
    cause: str | None = None
    kind: EndKind | None = None
    phase: Phase | None = None
    step_time_s: float | None = None
    recoveries: tuple[RecordedRecovery, ...] = ()


def plan_of_run(run: FollowedRun) -> Plan:
    """Return the plan of a run's last start, also if a later zerofit wrote it.

    Raises:
        UserError: it can't be read.
    """
    path = run.attempt / "plan.json"
    try:
        plan = parse_known(Plan, read_bounded_text(path, most_bytes=LARGEST_PLAN))
        if plan.version != PLAN_VERSION:
            raise ValueError(f"version {plan.version}, not {PLAN_VERSION}")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return plan


def end_of_run(run: FollowedRun) -> RecordedEnd | None:
    """Return how a run's last start ended, with the recoveries of all; None if it left no record.

    Raises:
        UserError: a record can't be read.
    """
    found = [_recorded(folder / "run.json") for folder in dict.fromkeys((run.folder, run.attempt))]
    first, last = found[0], found[-1]
    if last is None:
        return None
    return RecordedEnd(
        exit_code=last.exit_code,
        cause=last.cause,
        kind=last.kind,
        phase=last.phase,
        step_time_s=last.step_time_s,
        recoveries=() if first is None else first.recoveries,
    )


def _recorded(path: Path) -> RecordedEnd | None:
    try:
        return parse_known(RecordedEnd, read_bounded_text(path, most_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError | ValueError) -> UserError:
    return UserError(
        "run-record-broken",
        "a record of the run can't be read",
        found=f"{short_reason(error)}   ({path})",
        why="the file is damaged, or another release of zerofit wrote it",
        fix="use the zerofit that ran it, or run it again",
    )


def run_report(run: FollowedRun) -> RunReport:
    """Return the report of a run's last start.

    Raises:
        UserError: its records can't be read.
    """
    plan, end = plan_of_run(run), end_of_run(run)
    step_time_s = None if end is None else end.step_time_s
    return RunReport(
        model=_model(plan),
        workload=_workload(plan),
        strategy=_strategy(plan),
        versions=_versions(plan.versions),
        gpus=() if plan.topology.on_cpu else _gpus(plan.machine),
        predicted=_predicted(plan),
        measured=measured_in(run.attempt / "ranks", step_time_s=step_time_s),
        recoveries=() if end is None else tuple(map(_recovery, end.recoveries[:_MOST_RECOVERIES])),
        end=None if end is None else _end(run, end),
    )


def _count(number: int | None) -> int:
    return plain_count(number) or 0


def transformers_class(path: str) -> str | None:
    """Return the name of a class of transformers; None for another, whatever it calls itself.

    Args:
        path: module and class, as in a capture.
    """
    name = path.rpartition(".")[2]
    if not path.startswith(_MODELS):
        return None
    try:
        import transformers
    except ImportError:
        return None
    return name if name in dir(transformers) else None


def _model(plan: Plan) -> ReportedModel | None:
    captured = plan.capture and plan.capture.model
    facts = plan.model or (captured.facts if captured else None)
    if facts is None:
        return None
    trained = (plan.estimate and plan.estimate.num_trained) or facts.num_trainable_parameters
    frozen = facts.num_parameters - (0 if plan.strategy.lora is not None else trained)
    return ReportedModel(
        class_name=transformers_class(captured.class_path) if captured else None,
        num_layers=_count(facts.num_layers),
        hidden_size=_count(facts.hidden_size),
        intermediate_size=_count(facts.intermediate_size),
        vocab_size=_count(facts.vocab_size),
        num_attention_heads=_count(facts.num_attention_heads),
        num_key_value_heads=_count(facts.num_key_value_heads),
        head_dim=_count(facts.head_dim),
        num_experts=_count(facts.num_experts),
        num_experts_per_token=_count(facts.num_experts_per_token),
        num_trained=_count(trained),
        num_frozen=_count(frozen),
        weight_dtype=DTYPES.get(captured.weight_dtype) if captured else None,
    )


def _workload(plan: Plan) -> ReportedWorkload:
    workload = plan.workload
    return ReportedWorkload(
        global_batch_size=plain_count(workload.global_batch_size),
        sequence_length=plain_count(workload.sequence_length),
        target_length=plain_count(workload.target_length),
        is_padded=workload.is_padded,
        keeps_outputs=workload.keeps_outputs,
    )


def _strategy(plan: Plan) -> ReportedStrategy:
    strategy, topology, capture = plan.strategy, plan.topology, plan.capture
    optimizer = capture.optimizer if capture else None
    own = optimizer_of_class(optimizer.class_path) if optimizer else ""
    attention = strategy.attention or (capture.model.attention if capture else "")
    return ReportedStrategy(
        engine=strategy.engine,
        zero_stage=strategy.zero_stage,
        optimizer_offload=strategy.optimizer_offload,
        param_offload=strategy.param_offload,
        pin_memory=strategy.pin_memory,
        precision=strategy.precision or (capture.precision if capture else None),
        micro_batch_size=plain_count(strategy.micro_batch_size),
        gradient_accumulation_steps=plain_count(strategy.gradient_accumulation_steps),
        clips_gradients=strategy.clips_gradients,
        gradient_checkpointing=strategy.gradient_checkpointing,
        checkpoint_every=_count(strategy.checkpoint_every),
        activation_offload=strategy.activation_offload,
        optimizer=strategy.optimizer,
        script_optimizer=own if entry_of(own) is not None else None,
        attention=_attention(attention),
        compile=strategy.compile,
        freezes=bool(strategy.freeze),
        lora_rank=None if strategy.lora is None else plain_count(strategy.lora.rank),
        quantization=strategy.quantization,
        quant_storage=strategy.quant_storage,
        tf32=strategy.tf32,
        liger=strategy.liger,
        group_by_length=strategy.group_by_length,
        buckets=Buckets(
            **{field.name: _count(getattr(strategy.buckets, field.name)) for field in fields(Buckets)}
        ),
        reshard_after_forward=strategy.reshard_after_forward,
        state_dict_type=strategy.state_dict_type,
        num_nodes=_count(topology.num_nodes),
        world_size=_count(topology.world_size),
        on_cpu=topology.on_cpu,
        tensor_parallel_size=_count(topology.tensor_parallel_size),
        sequence_parallel_size=_count(topology.sequence_parallel_size),
        pipeline_parallel_size=_count(topology.pipeline_parallel_size),
        pipeline_stages_per_rank=_count(topology.pipeline_stages_per_rank),
        dp_replicate_size=_count(topology.dp_replicate_size),
    )


def _attention(name: str) -> Attention | None:
    if not name:
        return None
    return Attention(name) if name in list(Attention) else Attention.OTHER


def _versions(versions: Versions) -> dict[str, str]:
    found = {field.name: getattr(versions, field.name) for field in fields(versions)}
    return {name: plain_version(version) for name, version in found.items() if version is not None}


def _gpus(machine: Machine) -> tuple[ReportedGpu, ...]:
    kinds = Counter((gpu.name, gpu.memory_bytes) for gpu in machine.gpus)
    found = []
    for (driver_name, memory_bytes), count in kinds.items():
        known = catalog_gpu(driver_name, memory_bytes)
        name = None if known is None else known.name
        found.append(ReportedGpu(name=name, count=count, memory_bytes=_count(memory_bytes)))
    return tuple(found)


def _predicted(plan: Plan) -> Predicted | None:
    if plan.estimate is None or plan.topology.on_cpu:  # a rehearsal's plan is for other devices
        return None
    device, step_time = plan.estimate.device, plan.estimate.step_time
    return Predicted(
        phases=_phases(device),
        uncertainty=plain_number(device.uncertainty) or 0.0,
        host_bytes=_count(plan.estimate.host.peak_bytes if plan.estimate.host.phases else 0),
        step_time_s=plain_number(step_time.seconds) if step_time else None,
        step_time_uncertainty=plain_number(step_time.uncertainty) if step_time else None,
    )


def _phases(device: MemoryEstimate) -> tuple[PredictedPhase, ...]:
    return tuple(
        PredictedPhase(
            phase=phase.phase,
            tensors_bytes=_count(phase.held_by(Holder.TENSORS)),
            reserved_bytes=_count(phase.held_by(Holder.TENSORS, Holder.CACHE)),
            total_bytes=_count(phase.total_bytes),
        )
        for phase in device.phases
    )


def measured_in(ranks: Path, *, step_time_s: float | None = None) -> Measured:
    """Return what the ranks of a start recorded.

    Args:
        ranks: the folder of their records.
        step_time_s: the launcher's median; without one, the slowest rank's mean since its first step.
    """
    names = (_RANK.fullmatch(path.name) for path in ranks.glob("rank*"))
    numbers = sorted({int(name[1]) for name in names if name})
    live = [seen for rank in numbers if (seen := read_observation(ranks, rank)) is not None]
    records = [record for rank in numbers if (record := read_record(ranks, rank)) is not None]
    times = [seen.s_per_step for seen in live if seen.s_per_step is not None]
    phases = _measured_phases(live)
    allocated = [record.peak_gpu_allocated_bytes for record in records] + [
        phase.allocated_bytes for phase in phases
    ]
    reserved = [record.peak_gpu_reserved_bytes for record in records] + [
        phase.reserved_bytes for phase in phases
    ]
    return Measured(
        num_ranks=len(numbers),
        num_steps=_count(min((seen.step for seen in live), default=0)),
        phases=phases,
        allocated_bytes=_largest(allocated),
        reserved_bytes=_largest(reserved),
        host_bytes=_largest(_host_bytes(live, records)) or 0,
        step_time_s=plain_number(step_time_s if step_time_s is not None else max(times, default=None)),
    )


def _host_bytes(live: list[RankObservation], records: list[RankRecord]) -> list[int | None]:
    return [*(seen.host_bytes for seen in live), *(record.peak_host_bytes for record in records)]


def _largest(numbers: list[int | None]) -> int | None:
    return max((number for number in map(plain_count, numbers) if number is not None), default=None)


def _measured_phases(live: list[RankObservation]) -> tuple[MeasuredPhase, ...]:
    found = []
    for phase in Phase:
        peaks = [seen.peaks[phase] for seen in live if phase in seen.peaks]
        if peaks:
            found.append(
                MeasuredPhase(
                    phase=phase,
                    allocated_bytes=_largest([peak.allocated_bytes for peak in peaks]) or 0,
                    reserved_bytes=_largest([peak.reserved_bytes for peak in peaks]) or 0,
                )
            )
    return tuple(found)


def _recovery(recovery: RecordedRecovery) -> ReportedRecovery:
    return ReportedRecovery(
        step=plain_count(recovery.step),
        lost_steps=plain_count(recovery.lost_steps),
        resumed=recovery.resumed_from is not None,
    )


def _end(run: FollowedRun, end: RecordedEnd) -> ReportedEnd:
    cause = None
    if end.exit_code:
        logged = explain_run(run.folder).explanation.cause
        cause = None if logged is None else logged.failure.id
    return ReportedEnd(
        exit_code=end.exit_code if -255 <= end.exit_code <= 255 else 255,
        kind=end.kind and end.kind.value,
        phase=end.phase,
        cause=cause,
    )
