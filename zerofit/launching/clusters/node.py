"""The launcher on one node of a submitted run: python -m zerofit.launching.clusters.node JOB_FOLDER FLAGS.

A scheduler's job starts it once per node. It meets the others, checks with them that all is as planned,
starts this node's ranks, and exits with the exit code of the whole run: 75 if the run can be resumed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.command import Rendezvous
from zerofit.core.errors import UserError, bad_value
from zerofit.core.observer import Observer
from zerofit.core.plan import Plan, plan_from_json
from zerofit.launching.clusters.clients import ClusterEngine
from zerofit.launching.clusters.heartbeat import Heartbeat
from zerofit.launching.clusters.job import (
    JOB_FILE,
    STOP_FILE,
    Job,
    check_no_deepspeed_env,
    job_from_json,
)
from zerofit.launching.clusters.meeting import Meeting, NodePlace, met, name_of
from zerofit.launching.clusters.preflight import (
    check_all_reduce,
    check_nodes,
    choose_interface,
    clock_warnings,
    facts_of_node,
    warnings_of,
)
from zerofit.launching.clusters.slurm import JOB_ID
from zerofit.launching.clusters.submitted import SubmittedJob, now, read_submitted, write_submitted
from zerofit.launching.diagnose import EXIT_STOPPED, GOES_ON_AFTER, RunEnd
from zerofit.launching.run_folder import (
    RunFolder,
    attempts,
    fill_run_folder,
    newest_checkpoint,
)
from zerofit.launching.start import PlannedLaunch, launch_files, start
from zerofit.machine.port import free_port
from zerofit.planning.sources.nodes import is_host
from zerofit.scripts.resume import resume_way

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Said(Observer):
    """Prefixes messages on stderr with the node."""

    def __init__(self, name: str) -> None:
        self._name = name

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        print(f"zerofit: {self._name}: {sentence}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run this node's part and return the exit code."""
    flags = _flags(arguments)
    folder = Path(flags.job)
    observer = _Said(name_of(flags.node, os.uname().nodename))
    try:
        job = job_from_json((folder / JOB_FILE).read_text(encoding="utf-8"), name=str(folder / JOB_FILE))
        plan_file = folder / "plan.json"
        plan = plan_from_json(plan_file.read_text(encoding="utf-8"), name=str(plan_file))
        if job.work_dir is not None:
            os.chdir(job.work_dir)
        check_no_deepspeed_env(Path.cwd(), Path.home())
        if flags.node == 0:
            _note_slurm_job(job, os.environ.get("SLURM_JOB_ID", ""))
        place = NodePlace(
            node=flags.node,
            num_nodes=job.num_nodes,
            address=_checked_host(flags.address),
            port=flags.port,
            limit_s=job.join_limit_s,
        )
        end = _run(job, plan, place, observer)
    except UserError as error:
        print(f"{error}\n  node:  {observer._name}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        print(f"zerofit: {observer._name}: {error.strerror}: {error.filename}", file=sys.stderr, flush=True)
        return 2
    if end.cause:
        observer.say(f"{end.cause}; its log and record are in {job.run_folder}")
    return EXIT_STOPPED if end.kind in GOES_ON_AFTER else end.exit_code


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node", description=__doc__)
    parser.add_argument("job", help="the folder with job.json and plan.json")
    parser.add_argument("--node", type=int, default=0, help="this node's number, from 0")
    parser.add_argument("--address", default="127.0.0.1", help="name or address of node 0")
    parser.add_argument("--port", type=int, default=29500, help="port on node 0 at which the nodes meet")
    return parser.parse_args(arguments)


def _note_slurm_job(job: Job, job_id: str) -> None:
    """Record the job of a run that was written and submitted by hand, so that `zerofit runs` finds it."""
    if job.engine != "slurm" or not JOB_ID.fullmatch(job_id):
        return
    folder = Path(job.run_folder)
    try:
        noted = read_submitted(folder)
    except UserError:
        noted = None
    noted = noted or SubmittedJob(engine=ClusterEngine.SLURM, job_id=None, submitted_at=now())
    if noted.job_id != job_id:
        write_submitted(folder, replace(noted, job_id=job_id))


def _checked_host(host: str) -> str:
    if is_host(host):
        return host
    raise bad_value(
        "--address",
        host,
        why="it may have letters, digits, dots, hyphens and colons, and must begin with a letter or digit",
        fix="check the first node in the scheduler's job",
    )


def _run(job: Job, plan: Plan, place: NodePlace, observer: Observer) -> RunEnd:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # set by an operator; torchrun would parse them as its own flags
    # With it torchrun's agent and the ranks share a store that a restart breaks (pytorch issue 135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    stop_file = Path(job.run_folder, STOP_FILE)
    if place.node == 0:
        stop_file.unlink(missing_ok=True)  # of the previous attempt
    with met(place, job.run, facts_of_node(plan, job)) as meeting:
        _check_together(job, plan, meeting, observer)
        launch, folder = _next_start(job, plan, meeting, observer)
        heartbeat = Heartbeat(meeting, stop_file)
        signal.signal(signal.SIGUSR1, lambda *_: heartbeat.ask_to_stop())
        fill_run_folder(folder, launch_files(launch, folder))
        return start(launch, folder, observer=observer, others=heartbeat)


def _check_together(job: Job, plan: Plan, meeting: Meeting, observer: Observer) -> None:
    """Check that the nodes are as planned and can train together; node 0 prints warnings."""
    place = meeting.place
    check_nodes(plan, meeting.names, meeting.facts)
    if place.num_nodes == 1:
        return
    choose_interface(meeting)
    took_s = check_all_reduce(meeting)
    found = warnings_of(plan, job, meeting.names, meeting.facts) + clock_warnings(meeting)
    met_in = f"{place.num_nodes} nodes have met and run an all-reduce in {took_s:.0f} s"
    for sentence in (*found, met_in) if place.node == 0 else ():
        observer.say(sentence)


def _next_start(
    job: Job, plan: Plan, meeting: Meeting, observer: Observer
) -> tuple[PlannedLaunch, RunFolder]:
    """Return this node's launch and its folder, for the first start or the next after a requeue."""
    run_folder = Path(job.run_folder)

    def by_node_0() -> dict[str, Any]:
        earlier = attempts(run_folder)
        checkpoint = newest_checkpoint(*reversed(earlier))
        return {
            "number": sum((folder / "ranks").exists() for folder in earlier),
            "checkpoint": None if checkpoint is None else str(checkpoint.path),
            "port": free_port(0),
        }

    node = meeting.place.node
    agreed = meeting.from_node_0("start", by_node_0)
    number, checkpoint = agreed["number"], agreed["checkpoint"]
    rendezvous = Rendezvous(main_process_port=agreed["port"])
    if meeting.place.num_nodes > 1:
        rendezvous = replace(rendezvous, machine_rank=node, main_process_ip=meeting.master_address)
    if node == 0 and number:
        how = f"resumes from {checkpoint}" if checkpoint else "starts from scratch, since nothing was saved"
        observer.say(f"start {number} of at most {job.max_requeues} after the first: {how}")
    plan, target = _resumed(plan, job, checkpoint)
    folder = RunFolder(path=run_folder if number == 0 else run_folder / f"requeue-{number}", node=node)
    return PlannedLaunch(plan=plan, target=target, rendezvous=rendezvous), folder


def _resumed(plan: Plan, job: Job, checkpoint: str | None) -> tuple[Plan, tuple[str, ...]]:
    """Return plan and script arguments that resume from a checkpoint."""
    way = resume_way(plan.capture, target=job.target)
    if checkpoint is None or not way.is_known:
        return plan, job.target
    by_trainer = checkpoint if way.is_by_trainer else None
    return replace(plan, resume_from=by_trainer), way.with_checkpoint(job.target, Path(checkpoint))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread may be waiting for a node that is gone
