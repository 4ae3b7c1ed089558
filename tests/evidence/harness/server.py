"""Starts runs by forking a process that has torch, accelerate, DeepSpeed and transformers imported already.

A launch of two ranks costs ten seconds of imports; a fork costs none. The launcher's own code is what runs:
`accelerate launch` parses its flags and files and sets its environment; only torchrun's start of a Python
interpreter for each rank is a fork here. Each run is a session of its own, with its own ranks and ports.

Reads one run a line from stdin, and writes how it ended to stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from harness.rank import run_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_PRELOADED = (
    "accelerate.commands.launch",
    "bitsandbytes",
    "deepspeed.ops.adam",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "peft",
    "torch.distributed.run",
    "transformers.models.llama",
    "transformers.trainer",
)
_POLL_S = 0.02
_GRACE_S = 5.0
"""How long the other ranks have to end after the first failed, as torchrun's own close timeout."""


def main() -> None:
    """Import everything, then start what is asked for until stdin ends."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _preload()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in requests:
        print(json.dumps(_run(json.loads(line))), file=replies, flush=True)


def _preload() -> None:
    import torch
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    for module in _PRELOADED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    for builder in (CPUAdamBuilder, ShareMemCommBuilder):  # each rank would ask ninja whether they are built
        builder().load(verbose=False)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Start a run and wait for its end, or for its time to be over."""
    started = time.monotonic()
    leader = _fork(lambda: _lead(job))
    status = None
    while time.monotonic() - started < job["limit_s"]:
        ended, status = os.waitpid(leader, os.WNOHANG)
        if ended:
            break
        time.sleep(_POLL_S)
    else:
        status = None
    seconds = time.monotonic() - started
    with contextlib.suppress(ProcessLookupError):  # ranks that outlive their launcher
        os.killpg(leader, signal.SIGKILL)
    if status is None:
        os.waitpid(leader, 0)
    exit_code = None if status is None else os.waitstatus_to_exitcode(status)
    return {"exit_code": exit_code, "seconds": round(seconds, 1)}


def _fork(body: Callable[[], int]) -> int:
    """Run a function in a child process, which ends with what it returns, and return the child's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        code = body() if os.getppid() == parent else 1
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """Leave at once: destructors of process groups whose peers are gone may wait for ever."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _lead(job: dict[str, Any]) -> int:
    os.setsid()
    os.chdir(job["folder"])
    _write_output_to("launcher.log")
    os.environ.update(job["environment"])
    if job["launcher"] == "accelerate" and job["num_machines"] == 1:
        return _accelerate_launch(job, job["command"])
    if job["launcher"] == "accelerate":
        return _on_machines(job)
    if job["launcher"] == "torchrun":
        return _torchrun(job["command"], job, num_ranks=job["num_ranks"], port=job["port"])
    if job["launcher"] == "deepspeed":  # it starts Python by itself, and nothing of it is replaced
        os.execvp(sys.executable, [sys.executable, "-m", "deepspeed.launcher.runner", *job["command"]])
    return _torchrun(job["command"], job, num_ranks=0, port=job["port"])


def _write_output_to(name: str) -> None:
    log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _on_machines(job: dict[str, Any]) -> int:
    """Start the command once for each machine, as its user does on each."""
    leaders = [
        _fork(lambda rank=rank: _accelerate_launch(job, ["--machine_rank", str(rank), *job["command"]]))
        for rank in range(job["num_machines"])
    ]
    return max(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]) for leader in leaders)


def _accelerate_launch(job: dict[str, Any], command: Sequence[str]) -> int:
    """Run the stock launch code, up to where it would start Python."""
    import torch.distributed.run
    from accelerate.commands import launch

    codes = []

    def run(arguments: Any) -> None:
        module = ["-m"] if arguments.module else []
        command = [*module, arguments.training_script, *arguments.training_script_args]
        codes.append(
            _torchrun(
                command,
                job,
                num_ranks=int(arguments.nproc_per_node),
                port=job["port"],
                machine=int(arguments.node_rank),
            )
        )

    class OneProcess:
        """In place of the Popen that accelerate starts a script with that is not distributed."""

        def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
            if command[0] != sys.executable:  # the deepspeed launcher, which starts Python by itself
                self.returncode = subprocess.run(command, env=env, check=False).returncode
                return
            with launch.patch_environment(**env):
                self.returncode = _torchrun(list(command[1:]), job, num_ranks=0, port=job["port"])

        def wait(self) -> int:
            return self.returncode

    torch.distributed.run.run = run
    launch.subprocess = type("Subprocess", (), {**vars(subprocess), "Popen": OneProcess})
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(list(command)))
    except subprocess.CalledProcessError as failed:
        return int(failed.returncode)
    return max(codes, default=0)


def _torchrun(command: list[str], job: dict[str, Any], *, num_ranks: int, port: int, machine: int = 0) -> int:
    """Fork the ranks of a machine; return 0 where all end well. The first that fails ends the others.

    Args:
        command: the script or `-m module`, and its arguments.
        job: the run.
        num_ranks: 0 for one process that knows of no ranks.
        port: where the ranks meet.
        machine: its number, from 0.
    """
    ranks: dict[int, int] = {}
    for rank in range(max(1, num_ranks)):
        environment = {
            "RANK": str(machine * num_ranks + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks * job["num_machines"]),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks[_fork(lambda own=environment if num_ranks else {}: _be_rank(command, job, own))] = rank
    worst, kill_at = 0, float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if time.monotonic() > kill_at:
                _signal(ranks, signal.SIGKILL)
            time.sleep(_POLL_S)
            continue
        ranks.pop(pid, None)
        if os.waitstatus_to_exitcode(status) and not worst:
            worst, kill_at = 1, time.monotonic() + _GRACE_S
            _signal(ranks, signal.SIGTERM)
    return worst


def _signal(ranks: dict[int, int], number: signal.Signals) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _be_rank(command: list[str], job: dict[str, Any], environment: dict[str, str]) -> int:
    os.environ.update(environment)
    _write_output_to(f"rank{os.environ.get('RANK', '0')}.log")
    return run_rank(
        command,
        asks=job["asks"],
        stands_alone=job["is_reference"],
        as_on_gpus=job["as_on_gpus"],
        shards=job["shards"],
    )


if __name__ == "__main__":
    main()
