"""launch: trains a script under the fastest memory strategy that fits, through `accelerate launch`."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.checking.check_plan import check_plan
from zerofit.configs.write.command import is_on_one_of_many_gpus
from zerofit.core.observer import SILENT, Observer
from zerofit.core.overrides import NOTHING_SAID, Overrides
from zerofit.core.plan import GENERATE_LIMIT_S, Plan, head_lines
from zerofit.core.rank_observation import read_observation
from zerofit.core.strategy import Engine, OffloadDevice
from zerofit.launching.checks import check_num_ranks, check_resumed_checkpoint
from zerofit.launching.hang import closing_line
from zerofit.launching.nodes import on_this_node
from zerofit.launching.output_folders import own_folders_of
from zerofit.launching.prepare import prepare_launch
from zerofit.launching.recover import (
    Attempt,
    RecoverMode,
    RecoverPolicy,
    Recovery,
    may_recover,
    next_attempt,
    record_recoveries,
    warn_if_not_resumable,
)
from zerofit.launching.run_folder import (
    RUNS,
    RunFolder,
    check_run_dir,
    document_in,
    fill_run_folder,
    new_run_folder,
    run_folder,
)
from zerofit.launching.start import (
    PlannedLaunch,
    launch_command,
    launch_files,
    predicted_tensors,
    ranks_of,
    start,
)
from zerofit.launching.trials import TrialPolicy, Tuning, run_trials
from zerofit.machine.extensions import clear_abandoned_locks, ops_to_compile
from zerofit.machine.gpus import free_gpu_bytes
from zerofit.machine.versions import check_libraries, check_libraries_of
from zerofit.planning.answer_lines import launch_line
from zerofit.planning.applied_table import applied_rows, applied_table
from zerofit.planning.resolve import Verb, own_environment, resolve
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S
from zerofit.scripts.target import script_arguments, script_name, script_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.launching.diagnose import RunEnd
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.solve import Answer

_SHOWN_ROWS = 6
"""Changes listed before a script starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """A run that has ended, or, after a dry run, would be started."""

    plan: Plan
    folder: Path
    """The run folder: plan, configurations, command, logs and record of each rank."""
    command: str
    """The `accelerate launch` command, for a shell."""
    files: Mapping[Path, str] = field(repr=False)
    """Texts of the run folder's files before the start, by path."""
    exit_code: int | None
    """The script's own, or 128 + the number of the signal that ended it; None after a dry run."""
    cause: str | None
    """Why it failed, in a sentence; None on success."""
    recoveries: tuple[Recovery, ...] = ()
    """Restarts after running out of memory; `plan` is then that of the last attempt."""


@own_environment()
def launch(
    script: str,
    *arguments: str,
    module: bool = False,
    plan: Plan | Answer | str | Path | None = None,
    gpus: str | None = None,
    captures: bool = True,
    capture_limit_s: float = CAPTURE_LIMIT_S,
    is_checked: bool = True,
    trusts_checkpoint: bool = False,
    generate_limit_s: int = GENERATE_LIMIT_S,
    hang_limit_s: float | None = None,
    run_dir: str | Path = RUNS,
    hostfile: str | Path | None = None,
    config_file: str | None = None,
    deepspeed_file: str | None = None,
    recover: RecoverMode | str = RecoverMode.AUTO,
    max_recoveries: int = 3,
    max_lost_steps: int = 100,
    num_trials: int = 0,
    dry_run: bool = False,
    observer: Observer = SILENT,
    **settings: Any,
) -> LaunchedRun:
    """Train an unmodified script under the fastest memory strategy that fits, and wait for its end.

    `zerofit.launch("train.py", "--epochs", "3", zero_stage=3)`. Each rank is a separate process, started by
    `accelerate launch`; no training happens in this process.

    Args:
        script: the script, or with `module` the module, to train.
        arguments: the script's own.
        module: True to run a module, as with `python -m`.
        plan: a plan, or its file; by default it is made for the script.
        gpus: GPUs of another machine: with `on_cpu=True` to plan for them and test on the CPU, with
            `dry_run=True` to show what would run there.
        captures: False to use only the given settings, without capturing what the script trains.
        capture_limit_s: time limit for the script to reach its training.
        is_checked: False to continue despite errors of compatibility rules.
        trusts_checkpoint: True to resume checkpoints whose files run code when they are loaded.
        generate_limit_s: how long a rank may wait in model.generate until all call it, under ZeRO-3.
        hang_limit_s: time without progress of any rank after which the run is ended; 0 for never, None to
            adapt to the run's own pace.
        run_dir: folder of all run folders.
        hostfile: DeepSpeed's list of nodes.
        config_file: of `accelerate config`; by default the one in accelerate's cache, as for `accelerate
            launch`, unless a plan is given.
        deepspeed_file: DeepSpeed's JSON.
        recover: "auto" to restart with another plan when memory runs out, with the same global batch and
            from the last checkpoint; "ask" to ask the observer first; "off" to end.
        max_recoveries: maximum number of such restarts.
        max_lost_steps: steps that may be repeated if the script can't resume and starts from scratch.
        num_trials: number of the plan's best strategies to try for some steps first, to use the fastest; see
            `zerofit.tune`.
        dry_run: True to only return what would be written and run.
        observer: receives progress, plans and findings; silent by default.
        settings: of strategy and model as for zerofit.plan, and of nodes: the fields of
            zerofit.planning.sources.nodes.Nodes, such as `num_nodes`, `machine_rank` and `gpu_ids`.

    Returns:
        How the run ended, and its folder.

    Raises:
        UserError: an argument is wrong, nothing fits, or it can't run here.
        ExceptionGroup: of UserErrors, if configuration files can't be read or compatibility rules forbid
            the run.
    """
    check_libraries(observer)
    spec = resolve(
        (script, *arguments),
        verb=Verb.LAUNCH,
        module=module,
        plan=plan,
        gpus=gpus,
        captures=captures,
        capture_limit_s=capture_limit_s,
        hostfile=hostfile,
        config_file=config_file,
        deepspeed_file=deepspeed_file,
        dry_run=dry_run,
        observer=observer,
        **settings,
    )
    spec, run_dir = on_this_node(spec), Path(run_dir)
    check_run_dir(run_dir)
    policy = RecoverPolicy(
        mode=RecoverMode(recover), max_recoveries=max_recoveries, max_lost_steps=max_lost_steps
    )
    run_settings: dict[str, Any] = {
        "is_checked": is_checked,
        "generate_limit_s": generate_limit_s,
        "trusts_checkpoint": trusts_checkpoint,
    }
    tuning = None
    if num_trials and not dry_run:
        tuning = run_trials(
            spec,
            TrialPolicy(num_trials=num_trials),
            run_dir=run_dir,
            settings=run_settings,
            hang_limit_s=hang_limit_s,
            check=check_launch,
            dry_run=False,
            observer=observer,
        )
        if tuning.launch is None or tuning.stopped_by is not None:
            return _not_started(tuning)
    to_launch = prepare_launch(spec, observer) if tuning is None or tuning.launch is None else tuning.launch
    recovers = may_recover(spec, to_launch.plan, policy)
    plan = replace(to_launch.plan, **run_settings, recovers=recovers, resume_from=None)
    to_launch = replace(to_launch, plan=plan)
    check_num_ranks(plan, None if dry_run else spec.node)
    check_launch(to_launch, observer, said=spec.overrides)
    begins = run_folder if dry_run else new_run_folder
    folder = begins(run_dir, target=script_name(to_launch.target), at=datetime.now())
    if dry_run:
        announce_plan(to_launch, observer)
        line = launch_line(spec)
        how = f"`{line}`" if line else "a launch without dry_run"
        observer.say(unwritten("the one above" if line and spec.makes_a_plan else how, "trains"))
        return _planned_run(to_launch, folder)
    return _run_to_its_end(to_launch, folder, spec, policy, hang_limit_s=hang_limit_s, observer=observer)


def unwritten(how: str, what: str) -> str:
    """Return what keeps the command of a dry run from running when pasted, and what runs in its place."""
    return f"a dry run writes none of the files that the command below reads: {how} writes them and {what}"


def _planned_run(to_launch: PlannedLaunch, folder: RunFolder) -> LaunchedRun:
    """Return a run that has not started."""
    return LaunchedRun(
        plan=to_launch.plan,
        folder=folder.path,
        command=launch_command(to_launch, folder),
        files=launch_files(to_launch, folder),
        exit_code=None,
        cause=None,
    )


def _run_to_its_end(
    to_launch: PlannedLaunch,
    folder: RunFolder,
    spec: RunSpec,
    policy: RecoverPolicy,
    *,
    hang_limit_s: float | None,
    observer: Observer,
) -> LaunchedRun:
    """Run a launch to its end, recovering from out of memory."""
    plan = to_launch.plan
    planned = _planned_run(to_launch, folder)
    if plan.recovers:
        warn_if_not_resumable(plan, policy, observer)
    own_folders = own_folders_of(to_launch.target, plan.capture, cwd=Path.cwd())
    attempt = Attempt(
        launch=to_launch,
        folder=folder,
        spec=replace(spec, own_folders=own_folders),
        free_gpu_bytes=free_gpu_bytes(),
    )
    attempt, ended = _run(attempt, policy, hang_limit_s=hang_limit_s, observer=observer)
    return replace(
        planned,
        plan=attempt.launch.plan,
        exit_code=ended.exit_code,
        cause=ended.cause,
        recoveries=attempt.recoveries,
    )


def _run(
    attempt: Attempt, policy: RecoverPolicy, *, hang_limit_s: float | None, observer: Observer
) -> tuple[Attempt, RunEnd]:
    """Run a launch to its end, recovering from out of memory; return the last attempt."""
    folder = attempt.folder
    ended = _start(attempt, hang_limit_s=hang_limit_s, observer=observer)
    while following := next_attempt(attempt, ended, policy, check_launch, observer):
        attempt = following
        record_recoveries(folder, attempt.recoveries)
        ended = _start(attempt, hang_limit_s=hang_limit_s, observer=observer)
        record_recoveries(folder, attempt.recoveries, ended)
    return attempt, ended


def _not_started(tuning: Tuning) -> LaunchedRun:
    """Return the result of a launch that starts no run: its trials were stopped, or none was measured."""
    stopped_by = tuning.stopped_by
    unmeasured = "no trial could be measured, so no run is started"
    cause = f"stopped by {stopped_by.name}" if stopped_by else unmeasured
    return LaunchedRun(
        plan=tuning.candidates[0],
        folder=tuning.folder,
        command="",
        files={},
        exit_code=128 + stopped_by if stopped_by else 1,
        cause=cause,
    )


def check_launch(to_launch: PlannedLaunch, observer: Observer, *, said: Overrides = NOTHING_SAID) -> None:
    """Check that libraries and rules allow a launch; findings name what files say by its line."""
    check_libraries_of(to_launch.plan.strategy)
    check_rules(to_launch, observer, said=said)


def _start(attempt: Attempt, *, hang_limit_s: float | None, observer: Observer) -> RunEnd:
    """Announce a run, and run it to its end."""
    to_launch, folder = attempt.launch, attempt.folder
    fill_run_folder(folder, launch_files(to_launch, folder))
    announce_plan(to_launch, observer)
    observer.say(f"run folder {folder.path}")
    observer.detail(f"zerofit: command: {launch_command(to_launch, folder)}")
    if to_launch.plan.strategy.engine is Engine.DEEPSPEED:
        for sentence in clear_abandoned_locks(environ=os.environ, home=Path.home()):
            observer.say(sentence)
        if ops := ops_to_compile(_ops_of(to_launch.plan), environ=os.environ, home=Path.home()):
            observer.say(f"DeepSpeed compiles {' and '.join(ops)} at first use, for 1 to 2 minutes each")
    began = time.monotonic()
    ended = start(to_launch, folder, hang_limit_s=hang_limit_s, observer=observer)
    if ended.exit_code:  # its ranks may have been killed in the middle of a build
        for sentence in clear_abandoned_locks(environ=os.environ, home=Path.home(), are_signed=True):
            observer.detail(f"zerofit: {sentence}")
    if not ended.exit_code:
        ranks = [
            observation
            for rank in ranks_of(to_launch)
            if (observation := read_observation(folder.ranks, rank))
        ]
        line = closing_line(ranks, time.monotonic() - began, predicted_tensors(to_launch.plan))
        with contextlib.suppress(OSError):  # a closed terminal
            is_recorded = document_in(folder.run).get("exit_code") == 0
            where = "is in" if is_recorded else "could not be written into"  # as on a full disk
            observer.say(f"{line}; its record {where} {folder.path}")
    return ended


def _ops_of(plan: Plan) -> tuple[str, ...]:
    """Return the ops that DeepSpeed compiles for a plan: deepspeed/comm/torch.py, runtime/zero/."""
    ops = ("deepspeed_shm_comm",) if plan.topology.on_cpu else ()
    if plan.strategy.optimizer_offload is not OffloadDevice.NONE:
        ops = (*ops, "cpu_adam")
    return (*ops, "async_io") if plan.strategy.uses_nvme else ops


def check_rules(to_launch: PlannedLaunch, observer: Observer, *, said: Overrides) -> None:
    """Check that no compatibility rule forbids a launch.

    Args:
        to_launch: the launch.
        observer: receives findings that do not end it.
        said: what the user set.
    """
    plan, target = to_launch.plan, to_launch.target
    script, arguments = script_path(target), script_arguments(target)
    check_resumed_checkpoint(arguments)
    tell = partial(_tell_finding, observer)
    check_plan(plan, script=script, arguments=arguments, say=tell, said=said)


def _tell_finding(observer: Observer, text: str) -> None:
    """Report a finding: the finding itself at once, its reason and fix as details."""
    first, _, rest = text.partition("\n")
    observer.show(first)
    observer.detail(rest)


def announce_plan(to_launch: PlannedLaunch, observer: Observer) -> None:
    """Report the strategy, and every change to the script's settings."""
    plan = to_launch.plan
    machine, strategy = head_lines(plan)
    observer.detail(f"zerofit: {machine}")
    observer.say(strategy)
    rows = applied_rows(plan)
    shown = rows if len(rows) <= _SHOWN_ROWS else rows[:_SHOWN_ROWS]
    observer.show(applied_table(shown, width=observer.width))
    if len(rows) > _SHOWN_ROWS:
        observer.show(f"and {len(rows) - _SHOWN_ROWS} more, listed in plan.json in the run folder")
    if is_on_one_of_many_gpus(plan):
        alone = f"one rank uses only GPU {to_launch.rendezvous.gpu_ids}"
        observer.say(f"{alone}: with more visible, Trainer would use them all")
