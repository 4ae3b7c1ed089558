"""Starting a run: its files and command from the plan, its start, its record."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from zerofit.configs.write.accelerate import accelerate_yaml
from zerofit.configs.write.command import (
    Rendezvous,
    accelerate_launch_arguments,
    launch_environment,
    shell_command,
)
from zerofit.configs.write.deepspeed import run_deepspeed_json
from zerofit.core.checkpoints import remove_partial_of_run
from zerofit.core.errors import UserError
from zerofit.core.module_path import OWN_PROGRAM, safe_path_variables
from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import Plan, plan_to_json
from zerofit.core.rank_record import RankRecord, read_record
from zerofit.core.secrets import secret_variables
from zerofit.core.strategy import Engine
from zerofit.core.supported import release_of
from zerofit.launching.diagnose import RankFailure, RunEnd, judge
from zerofit.launching.explain_run import TRACE_PREFIX
from zerofit.launching.hang import RunWatch
from zerofit.launching.run_folder import RunFolder, note_launcher, write_file
from zerofit.launching.run_observation import store_observation
from zerofit.launching.watch import run_watched
from zerofit.machine.cgroup import count_oom_kills, memory_limit_of_cgroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

RUN_VERSION = 1
"""Raised whenever run.json changes in a way that readers must know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """A plan, a script, and the ranks' rendezvous."""

    plan: Plan
    target: tuple[str, ...]
    """The script or `-m module`, and its arguments."""
    rendezvous: Rendezvous
    """Where the ranks meet."""


def launch_files(launch: PlannedLaunch, folder: RunFolder) -> dict[Path, str]:
    """Return the text of each file of the run folder before the start."""
    plan = launch.plan
    strategy = plan.strategy
    deepspeed = strategy.engine is Engine.DEEPSPEED
    files = {
        folder.plan: plan_to_json(plan),
        folder.accelerate: accelerate_yaml(
            strategy, topology=plan.topology, deepspeed_file=str(folder.deepspeed) if deepspeed else None
        ),
        folder.command: _command_script(launch, folder),
    }
    if deepspeed:
        files[folder.deepspeed] = run_deepspeed_json(plan)
    return files


def _command_script(launch: PlannedLaunch, folder: RunFolder) -> str:
    secrets = secret_variables(launch.target)
    return (
        "#!/bin/sh\n"
        "# The `accelerate launch` command of zerofit. Run again, it writes into the same run folder.\n"
        + (f"# Secrets are not stored: set {', '.join(secrets)} first.\n" if secrets else "")
        + f"cd {shlex.quote(os.getcwd())} || exit\n"
        f'export PATH={shlex.quote(os.path.dirname(sys.executable))}:"$PATH"\n'
        + "".join(f"export {name}={value}\n" for name, value in safe_path_variables(os.environ).items())
        + f"{launch_command(launch, folder)}\n"
    )


def launch_command(launch: PlannedLaunch, folder: RunFolder) -> str:
    """Return the launch as a line for a shell."""
    return shell_command(_arguments(launch, folder), environment=_environment(launch))


def _environment(launch: PlannedLaunch) -> dict[str, str]:
    return launch_environment(launch.plan, inherited=os.environ)


def flight_recorder(plan: Plan, folder: RunFolder, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make NCCL record its last collectives, and dump them on a timeout.

    The names are those of torch/csrc/distributed/c10d: TORCH_FR_* since 2.9, TORCH_NCCL_* before.
    """
    if plan.topology.on_cpu or plan.topology.world_size == 1:
        return {}
    is_new = plan.versions.torch is None or release_of(plan.versions.torch) >= (2, 9)
    size, place = (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
        if is_new
        else ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    )
    wanted = {
        size: "2000",
        place: str(folder.ranks / TRACE_PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    return {name: value for name, value in wanted.items() if name not in inherited}


def _arguments(launch: PlannedLaunch, folder: RunFolder) -> tuple[str, ...]:
    runner = ("-m", "zerofit.training.runner", str(folder.plan))
    return accelerate_launch_arguments(
        launch.plan,
        config_file=str(folder.accelerate),
        rendezvous=launch.rendezvous,
        target=(*runner, *launch.target),
    )


class OtherNodes(Protocol):
    """The other nodes of a run, and the scheduler that may reclaim this one."""

    def look(self, has_begun: Callable[[], bool]) -> bool:
        """Return True if the ranks of this node must end; `has_begun` tells if all of them handle signals."""

    def agree(self, end: RunEnd) -> RunEnd:
        """Return how the run ended on all nodes."""


def start(
    launch: PlannedLaunch,
    folder: RunFolder,
    *,
    hang_limit_s: float | None = None,
    observer: Observer = SILENT,
    others: OtherNodes | None = None,
    output: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> RunEnd:
    """Run the launch to its end, write run.json, and return how it ended.

    Args:
        hang_limit_s: time without progress after which the run is ended; 0 for never, None to adapt to the
            run's own pace.
        observer: receives progress, and reports of ranks that make none.
        others: the other nodes; None if each node acts independently.
        output: file for all output; None for the terminal.
        variables: more environment variables of the ranks.
    """
    note_launcher(folder)
    started_at = datetime.now(UTC)
    oom_kills = count_oom_kills()
    reader, writer = os.pipe()
    command = (
        *OWN_PROGRAM,
        "zerofit.launching.agent",
        str(os.getpid()),
        str(writer),
        "cpu" if launch.plan.topology.on_cpu else "gpu",
        *_arguments(launch, folder),
    )
    # torch calls ninja by name when it builds an op: pip's must be found without an activated environment
    # too.
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    recorder = flight_recorder(launch.plan, folder, inherited=os.environ)
    safe_path = safe_path_variables(os.environ)
    environment = {**_environment(launch), **recorder, **safe_path, "PATH": path, **variables}
    ranks = ranks_of(launch)
    watch = RunWatch(
        ranks_folder=folder.ranks,
        ranks=ranks,
        limit_s=hang_limit_s,
        observer=observer,
        predicted_bytes=predicted_tensors(launch.plan),
        is_one_of_nodes=launch.plan.topology.num_nodes > 1,
    )

    def is_over(launcher: int) -> bool:
        if others is not None and others.look(lambda: len(watch.observations()) == len(ranks)):
            return True
        return watch.look(launcher)

    ended = run_watched(command, environment=environment, report_fd=writer, output=output, is_over=is_over)
    watch.clear_unused()
    remove_partial_of_run(folder.path)
    now = count_oom_kills()
    with open(reader, encoding="utf-8") as report:
        failures = _failures(report.read())
    records = {rank: record for rank in ranks if (record := read_record(folder.ranks, rank)) is not None}
    observations = watch.observations()
    verdict = judge(
        launcher_code=ended.exit_code,
        stopped_by=ended.stopped_by,
        failures=failures,
        records=records,
        oom_kills=None if now is None or oom_kills is None else now - oom_kills,
        observations=observations,
        num_ranks=len(ranks),
        host_limit_bytes=memory_limit_of_cgroups(),
        is_one_of_nodes=launch.plan.topology.num_nodes > 1,
        hang=watch.hang,
    )
    if others is not None:
        verdict = others.agree(verdict)
    step_time_s = watch.step_time_s if launch.plan.trial is None else trial_step_time_s(records.values())
    store_observation(
        launch.plan,
        launch.target,
        verdict,
        observations,
        peak_host_bytes=max((record.peak_host_bytes for record in records.values()), default=0),
        step_time_s=step_time_s,
    )
    document = _run_document(launch, folder, started_at, verdict, failures, records)
    document["step_time_s"] = step_time_s
    try:
        write_file(folder.run, json.dumps(document, indent=2) + "\n")
    except UserError as error:  # the run's result does not depend on whether it can be recorded
        print(f"zerofit: the record of the run can't be written: {error.found}", file=sys.stderr)
    return verdict


def predicted_tensors(plan: Plan) -> int | None:
    """Return the tensors that a plan predicts on a GPU at most; None without an estimate or GPUs."""
    return None if plan.topology.on_cpu or plan.estimate is None else plan.estimate.device.most_tensors


def trial_step_time_s(records: Iterable[RankRecord]) -> float | None:
    """Return a trial's measured step time on the slowest rank; None if there is none."""
    return max((record.step_time_s for record in records if record.step_time_s is not None), default=None)


def _failures(report: str) -> dict[int, RankFailure]:
    """Return the ranks' failures from the agent's report; empty if it was killed before it could send one."""
    document = json.loads(report or "{}")
    return {int(rank): RankFailure(**failure) for rank, failure in document.items()}


def ranks_of(launch: PlannedLaunch) -> range:
    """Return the ranks of this node."""
    ranks_per_node = launch.plan.topology.ranks_per_node
    first = launch.rendezvous.machine_rank * ranks_per_node
    return range(first, first + ranks_per_node)


def _run_document(
    launch: PlannedLaunch,
    folder: RunFolder,
    started_at: datetime,
    verdict: RunEnd,
    failures: dict[int, RankFailure],
    records: dict[int, RankRecord],
) -> dict[str, object]:
    return {
        "version": RUN_VERSION,
        "command": launch_command(launch, folder),
        "started_at": started_at.isoformat(timespec="seconds"),
        **fields_of_end(verdict, started_at),
        "recoveries": [],
        "versions": asdict(launch.plan.versions),
        "exit_code_of_rank": {str(rank): failure.exit_code for rank, failure in failures.items()},
        "ranks": [asdict(record) for record in records.values()],
    }


def fields_of_end(end: RunEnd, started_at: datetime) -> dict[str, object]:
    """Return the fields of run.json for a run that has just ended."""
    ended_at = datetime.now(UTC)
    return {
        "ended_at": ended_at.isoformat(timespec="seconds"),
        "wall_time_s": round((ended_at - started_at).total_seconds(), 3),
        "exit_code": end.exit_code,
        "cause": end.cause,
        "kind": end.kind,
        "rank": end.rank,
        "phase": None if end.phase is None else end.phase.value,
        "missing_bytes": end.missing_bytes,
        "peak_bytes": end.peak_bytes,
    }
