"""Recovery from out of memory: the next attempt, with a plan that needs less, from the last checkpoint."""

from __future__ import annotations

import contextlib
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.errors import UserError
from zerofit.core.estimates import Holder
from zerofit.core.observer import SILENT
from zerofit.core.overrides import FLAGS
from zerofit.core.plan import GROUP_FLAGS, RUN_SETTINGS
from zerofit.core.rank_observation import ESTIMATED_PHASES
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName
from zerofit.launching.diagnose import EndKind
from zerofit.launching.nodes import on_this_node
from zerofit.launching.output_folders import move_aside, move_back
from zerofit.launching.prepare import prepare_launch
from zerofit.launching.run_folder import RunFolder, make_folder, newest_checkpoint, write_file
from zerofit.launching.start import fields_of_end
from zerofit.machine.gpus import free_gpu_bytes
from zerofit.planning.options import MemoryLimits
from zerofit.planning.plan_labels import strategy_words
from zerofit.scripts.resume import resume_way

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.checkpoints import SavedCheckpoint, SavedLayout
    from zerofit.core.estimates import Estimate
    from zerofit.core.observer import Observer
    from zerofit.core.plan import Plan
    from zerofit.core.strategy import Strategy
    from zerofit.launching.diagnose import RunEnd
    from zerofit.launching.start import PlannedLaunch
    from zerofit.planning.run_spec import RunSpec

_OUT_OF_MEMORY = (EndKind.GPU_OUT_OF_MEMORY, EndKind.HOST_OUT_OF_MEMORY)
_CHECKPOINT_FIELDS = ("optimizer", "lora", "quantization", "freeze")
"""Fields of Strategy that must be equal for a plan to load another plan's checkpoints."""
_MAX_PHASE_SHARE = 0.95
"""Maximum share of the failed plan's memory that the next one may use. ASSUMPTION: the failed allocation need
not be the last of its phase."""
_MAX_HOST_SHARE = 0.95
"""The same for host memory, where the missing amount is unknown. ASSUMPTION."""
_FREE_LIMIT_S = 60.0
_FREE_SHARE = 0.98
"""How long to wait until the GPUs have as much free memory as before the run, and the tolerance."""


class RecoverMode(StrEnum):
    """What happens when a run is out of memory."""

    AUTO = "auto"
    """It is restarted with the next plan."""
    ASK = "ask"
    """The user is asked first."""
    OFF = "off"
    """It ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverPolicy:
    """When a run is restarted after running out of memory."""

    mode: RecoverMode = RecoverMode.AUTO
    max_recoveries: int = 3
    max_lost_steps: int = 100
    """Steps that may be repeated if the script can't resume and starts from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One restart with another plan, as in run.json."""

    cause: str
    """Why the previous attempt ended."""
    step: int | None
    """Optimizer steps it had done; None if unknown."""
    strategy_before: str
    strategy: str
    resumed_from: str | None
    """The checkpoint; None if training starts from scratch."""
    lost_steps: int | None
    """Steps that are repeated."""
    folder: str
    """The run folder of the next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run."""

    launch: PlannedLaunch
    folder: RunFolder
    spec: RunSpec
    """What it was planned for."""
    free_gpu_bytes: tuple[int, ...]
    """Free memory of each GPU before the run."""
    number: int = 0
    """Number of earlier restarts."""
    recoveries: tuple[Recovery, ...] = ()


def may_recover(spec: RunSpec, plan: Plan, policy: RecoverPolicy) -> bool:
    """Return True if a run may be restarted with another plan when memory runs out."""
    return policy.mode is not RecoverMode.OFF and _why_not(spec, plan) is None


def warn_if_not_resumable(plan: Plan, policy: RecoverPolicy, observer: Observer) -> None:
    """Warn that the script can't resume, so that a recovery would start from scratch."""
    if plan.capture is None or resume_way(plan.capture).is_known:
        return
    observer.say(
        "the script can't resume from checkpoints: if out of memory in its first "
        f"{policy.max_lost_steps} steps, it restarts from scratch with another plan; later, it ends"
    )


def next_attempt(
    attempt: Attempt,
    end: RunEnd,
    policy: RecoverPolicy,
    check: Callable[[PlannedLaunch, Observer], None],
    observer: Observer,
) -> Attempt | None:
    """Return the next attempt after running out of memory; None if there is none, with the reason reported.

    The folder of the next attempt is created.

    Args:
        attempt: the start that has ended.
        end: how it ended.
        policy: when to restart.
        check: raises UserErrors if rules forbid the next launch.
        observer: receives the new plan, or why there is none.
    """
    if end.kind not in _OUT_OF_MEMORY or policy.mode is RecoverMode.OFF:
        return None
    why_not = _why_not(attempt.spec, attempt.launch.plan)
    if attempt.number >= policy.max_recoveries:
        why_not = f"--max-recoveries {policy.max_recoveries} is reached"
    if why_not is None:
        wait_for_free_gpus(attempt.free_gpu_bytes, observer)
        try:
            with ExitStack() as undo:
                moved: dict[Path, Path] = {}
                undo.callback(move_back, moved)
                following = _next_plan(attempt, end, policy, observer, moved)
                if following is not None:
                    check(following.launch, observer)
                    make_folder(following.folder.path)
                    undo.pop_all()
                return following
        except UserError as error:
            why_not = f"{error.summary}: {error.found}"
        except ExceptionGroup as errors:
            why_not = "; ".join(str(exception).partition("\n")[0] for exception in errors.exceptions)
    observer.say(f"the run is not restarted after running out of memory: {why_not}")
    return None


def wait_for_free_gpus(free_before: tuple[int, ...], observer: Observer) -> None:
    """Wait until the GPUs have as much free memory as before the run that has ended."""
    until = time.monotonic() + _FREE_LIMIT_S
    while any(now < _FREE_SHARE * before for now, before in zip(free_gpu_bytes(), free_before, strict=False)):
        if time.monotonic() > until:
            observer.say(f"some GPU memory is still in use {_FREE_LIMIT_S:.0f} s after the run's end")
            return
        time.sleep(1)


def _why_not(spec: RunSpec, plan: Plan) -> str | None:
    """Return why no other plan can be made; None if it can be tried."""
    if plan.topology.num_nodes > 1:
        return "several nodes would have to switch to one plan together"
    if not spec.captures and spec.options.model is None:
        return "with --no-capture there is nothing to plan for"
    if spec.runs_on_cpu and spec.gpus is None:
        return "plans are for GPUs, but its ranks run on the CPU"
    return None


def _next_plan(
    attempt: Attempt, end: RunEnd, policy: RecoverPolicy, observer: Observer, moved: dict[Path, Path]
) -> Attempt | None:
    """Return the next attempt; None if the user declines.

    Args:
        moved: receives the output folders that had to be moved, and their new places.

    Raises:
        UserError, ExceptionGroup: nothing fits in the available memory, or too many steps would be lost.
    """
    failed, number = attempt.launch, attempt.number + 1
    spec = with_groups_of(with_training_of(attempt.spec, failed.plan), failed.plan)
    if not spec.runs_on_cpu:
        spec = on_this_node(spec)
    estimate = failed.plan.estimate or _estimate_of(failed.plan.strategy, spec)
    spec = replace(spec, limits=limits_after(spec.limits, estimate, end, on_cpu=spec.runs_on_cpu))
    first = attempt.folder.path if attempt.number == 0 else attempt.folder.path.parent
    newest = newest_checkpoint(first) if resume_way(failed.plan.capture).is_known else None
    if newest is None:  # planning may run the script again, which may refuse its own outputs
        moved.update(move_aside(spec.own_folders, number=number))
    launch, checkpoint = _replanned(spec, failed.plan, newest, observer)
    way = resume_way(launch.plan.capture)
    if not way.is_known:
        checkpoint = None
    lost = lost_steps(end, checkpoint)
    if checkpoint is None and (lost is None or lost > policy.max_lost_steps):
        done = f"{lost} steps are done" if lost is not None else "the number of completed steps is unknown"
        raise UserError(
            "too-many-steps-lost",
            "it would start from scratch, without a checkpoint to resume from",
            found=f"{done}, and --max-lost-steps is {policy.max_lost_steps}",
            why="its output would be written again",
            fix="save checkpoints more often, or allow more steps: --max-lost-steps",
        )
    if checkpoint is None:
        moved.update(move_aside(spec.own_folders, number=number))
    resumed = None if checkpoint is None else checkpoint.path
    recovery = Recovery(
        cause=end.cause or "",
        step=None if end.observed is None else end.observed.step,
        strategy_before=strategy_words(failed.plan),
        strategy=strategy_words(launch.plan),
        resumed_from=None if resumed is None else str(resumed),
        lost_steps=lost,
        folder=str(first / f"recovery-{number}"),
    )
    sentence = f"{_sentence(recovery)} (recovery {number} of {policy.max_recoveries})"
    if policy.mode is RecoverMode.ASK and not observer.ask(f"{sentence}?"):
        return None
    observer.say(sentence)
    for folder, place in moved.items():
        observer.say(f"{folder}, made by the attempt before, is now {place}")
    plan = replace(
        launch.plan,
        **{name: getattr(failed.plan, name) for name in RUN_SETTINGS},
        recovers=True,
        resume_from=str(resumed) if resumed is not None and way.is_by_trainer else None,
    )
    target = launch.target if resumed is None else way.with_checkpoint(launch.target, resumed)
    return Attempt(
        launch=replace(launch, plan=plan, target=target),
        folder=RunFolder(path=Path(recovery.folder)),
        spec=spec,
        free_gpu_bytes=attempt.free_gpu_bytes,
        number=number,
        recoveries=(*attempt.recoveries, recovery),
    )


def with_groups_of(spec: RunSpec, failed: Plan) -> RunSpec:
    """Return a spec with the failed plan's parallel groups, which its checkpoints are sharded for."""
    said = spec.overrides
    sizes = {name: getattr(failed.topology, name) for name in GROUP_FLAGS}
    new = {name: size for name, size in sizes.items() if said.get(name) != size}
    chosen = {name: size for name, size in new.items() if size > 1 and not said.has(name)}
    others = {name: size for name, size in new.items() if name not in chosen}
    return spec.setting("the plan before", **chosen).setting(**others)


def with_training_of(spec: RunSpec, failed: Plan) -> RunSpec:
    """Return a spec that leaves the strategy open, but keeps the training settings of a plan or preset."""
    if spec.plan is None and spec.preset is None:
        return spec
    own = {
        "global_batch_size": failed.workload.global_batch_size,
        "world_size": failed.topology.world_size,
        **{name: getattr(failed.strategy, name) for name in ("precision", *_CHECKPOINT_FIELDS)},
    }
    nothing = (None, (), OptimizerName.ADAMW)  # which may run on the host, with the same result
    said = spec.overrides
    kept = {name: value for name, value in own.items() if not said.get(name) and value not in nothing}
    source = "the plan file" if spec.plan is not None else f"--preset {spec.preset}"
    return replace(spec, preset=None, plan=None).setting(source, **kept)


def _estimate_of(strategy: Strategy, spec: RunSpec) -> Estimate | None:
    """Estimate a strategy whose plan has no estimate, such as a preset's; None if it does not fit."""
    fields = {name: value for name in FLAGS if (value := getattr(strategy, name)) is not None}
    with contextlib.suppress(UserError, ExceptionGroup):
        return prepare_launch(spec.setting(**fields), SILENT).plan.estimate
    return None


def _replanned(
    spec: RunSpec, failed: Plan, checkpoint: SavedCheckpoint | None, observer: Observer
) -> tuple[PlannedLaunch, SavedCheckpoint | None]:
    """Return a launch within the limits, and the checkpoint if it can be loaded under its plan.

    The run keeps its precision if a plan with it fits, so that its losses don't change.
    """
    launch = None if checkpoint is None else _resumed(spec, failed, checkpoint, observer)
    if launch is not None:
        return launch, checkpoint
    kept = _with_fields_of(spec, failed, ["precision"], "the run before")
    if kept.overrides.get("precision") is not spec.overrides.get("precision"):
        with contextlib.suppress(UserError, ExceptionGroup):
            return prepare_launch(kept, observer), None
    return prepare_launch(spec, observer), None


def _resumed(
    spec: RunSpec, failed: Plan, checkpoint: SavedCheckpoint, observer: Observer
) -> PlannedLaunch | None:
    """Return a launch that can load the checkpoint; None if no such plan fits."""
    layout = None if checkpoint.manifest is None else checkpoint.manifest.layout
    names = fields_of_checkpoint(failed.strategy, layout)
    kept = _with_fields_of(spec, failed, names, f"the checkpoint {checkpoint.path.name}")
    with contextlib.suppress(UserError, ExceptionGroup):
        launch = prepare_launch(kept, observer)
        is_readable = launch.plan.strategy.optimizer_offload is not OffloadDevice.NVME
        if is_readable and _checkpoint_settings(launch.plan) == _checkpoint_settings(failed):
            return launch
    return None


def fields_of_checkpoint(failed: Strategy, layout: SavedLayout | None) -> list[str]:
    """Return the fields of a failed strategy that the next one needs, to load a checkpoint of it.

    Args:
        failed: the strategy.
        layout: the checkpoint's; None if unknown.
    """
    names = ["engine", "precision"]
    if failed.engine is Engine.FSDP2:  # accelerate looks for files of one type alone
        names.append("state_dict_type")
    elif layout is not None and not layout.is_of_adam:  # only Adam's states are converted to another stage
        names.append("zero_stage")
    return names


def _with_fields_of(spec: RunSpec, failed: Plan, names: list[str], source: str) -> RunSpec:
    """Return a spec completed by fields of the failed plan."""
    kept = {name: getattr(failed.strategy, name) for name in names if not spec.overrides.has(name)}
    return spec.setting(source, **kept)


def _checkpoint_settings(plan: Plan) -> tuple[object, ...]:
    """Return the settings that must be equal for a checkpoint to load; fused AdamW has AdamW's states."""
    settings = (getattr(plan.strategy, name) for name in _CHECKPOINT_FIELDS)
    return tuple(None if setting is OptimizerName.ADAMW else setting for setting in settings)


def limits_after(
    limits: MemoryLimits, estimate: Estimate | None, end: RunEnd, *, on_cpu: bool = False
) -> MemoryLimits:
    """Return the limits for the next plan's estimate: below the plan that was out of memory.

    The ratio of available to requested memory, applied to the failed phase's estimate, gives the available
    memory in terms of estimates. The failed phase must stay below it, and no phase may exceed it or the
    phases of completed steps, for which memory sufficed. The failed allocation need not be the last of its
    phase, so none may exceed what torch's tensors could take either. Only live tensors count: the allocator's
    cache is released before it is out of memory.

    Args:
        limits: those of the attempts before.
        estimate: of the failed plan.
        end: the phase and the missing memory.
        on_cpu: True if the ranks ran on the CPU: host memory then counts as the GPU's, without the
            workspaces of CUDA kernels, which are not scaled.
    """
    if estimate is None:
        return limits
    if end.kind is EndKind.HOST_OUT_OF_MEMORY and not on_cpu:
        return replace(limits, host_bytes=int(_MAX_HOST_SHARE * estimate.host.peak_bytes))
    phase = None if end.phase is None else ESTIMATED_PHASES.get(end.phase)
    found = None if phase is None else estimate.device.of(phase)
    fullest = found or max(estimate.device.phases, key=lambda memory: memory.held_by(Holder.TENSORS))
    tensors, workspaces = fullest.held_by(Holder.TENSORS), 0
    if on_cpu:
        workspaces = sum(term.num_bytes for term in fullest.terms if term.name == TensorKind.WORKSPACE.value)
    share = 1.0
    if end.peak_bytes and end.missing_bytes is not None:
        share = 1 - end.missing_bytes / end.peak_bytes
    has_passed_all = end.observed is not None and end.observed.step > 0
    room = workspaces + int(share * (tensors - workspaces))
    if end.available_bytes is not None and not on_cpu:
        room = min(room, end.available_bytes)
    most = estimate.device.most_tensors if has_passed_all else room
    least = None if found is None else phase, workspaces + int(_MAX_PHASE_SHARE * (room - workspaces))
    return replace(limits, phases=(*limits.phases, least, (None, most)))


def lost_steps(end: RunEnd, checkpoint: SavedCheckpoint | None) -> int | None:
    """Return the number of repeated steps; None if unknown."""
    if end.observed is None:
        return None
    done, saved = end.observed.step, end.observed.checkpoint_step
    if checkpoint is None:
        return done
    if checkpoint.manifest is not None and checkpoint.manifest.step is not None:
        saved = checkpoint.manifest.step
    return done - saved


def _sentence(recovery: Recovery) -> str:
    steps = recovery.lost_steps
    lost = "some steps again" if steps is None else f"{steps} step{'s' * (steps != 1)} again"
    how = f"resumes from {recovery.resumed_from}" if recovery.resumed_from else "starts over"
    return f"out of memory with {recovery.strategy_before}: {how} with {recovery.strategy}, {lost}"


def record_recoveries(folder: RunFolder, recoveries: tuple[Recovery, ...], end: RunEnd | None = None) -> None:
    """Write a run's recoveries into its run.json, and its final end; None while it runs."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, UserError):
        # the run has ended, whether or not this can be written
        document = json.loads(folder.run.read_text(encoding="utf-8"))
        document["recoveries"] = [asdict(recovery) for recovery in recoveries]
        if end is not None:
            document |= fields_of_end(end, datetime.fromisoformat(document["started_at"]))
        write_file(folder.run, json.dumps(document, indent=2) + "\n")
