"""What counts as a hang of real processes, which rank is named, and whose stacks are written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from small_runs import observation

import zerofit
from zerofit.core.observer import Observer
from zerofit.core.rank_observation import Phase, read_observation
from zerofit.launching import stacks
from zerofit.launching.hang import RunWatch
from zerofit.launching.stacks import Stack, StackFrame, dump_stacks
from zerofit.launching.work import LOG_COPIER, WorkMeter
from zerofit.training.reporting import copy_output

_RANK = """
import subprocess, sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from zerofit.training.reporting.observe import Observed

class Samples:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        Path(sys.argv[1], "worker").touch()
        time.sleep(600)

observed = Observed(Path(sys.argv[1]), 0, on_cpu=True)
subprocess.Popen(["sleep", "600"])
next(iter(DataLoader(Samples(), num_workers=1)))
"""
"""A rank whose DataLoader worker hangs, beside a child process without its signal handler."""


def test_stacks_of_a_rank_and_its_dataloader_worker(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", _RANK, str(tmp_path)])
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "worker").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        observed = read_observation(tmp_path, 0)
        assert observed is not None
        dump_stacks({0: observed}, tmp_path)
        of_rank, of_worker = (tmp_path / "rank0.stack").read_text().split("in _worker_loop")
        assert "in _try_get_data" in of_rank
        assert "in __getitem__" in of_rank  # the innermost frame comes first
        assert "in _worker_loop" not in of_worker
        children = {one.name(): one.status() for one in psutil.Process(rank.pid).children()}
        assert "sleep" in children
        assert psutil.STATUS_ZOMBIE not in children.values()
    finally:
        for process in (*psutil.Process(rank.pid).children(), rank):
            process.kill()
        rank.wait()


_LIKE_A_RANK = """
import importlib.util, os, signal, subprocess, sys, time
from pathlib import Path
from zerofit.core.rank_observation import Phase
from zerofit.training.reporting import observe
from zerofit.training.reporting.record import write_record

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
observe.start(folder, rank, on_cpu=True)
own = observe._observed
spec = importlib.util.spec_from_file_location("c10d", folder / "torch/distributed/distributed_c10d.py")
c10d = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c10d)
own.step = 3
"""
"""The start of a process that is watched like a rank; torch, which it does not need, is slow to import."""
_COLLECTIVES = """
import time

def barrier(spins=False):
    until = time.time() + 600
    while time.time() < until:
        None if spins else time.sleep(600)

all_reduce = broadcast = barrier
"""
_WAITS = "own.move(Phase.BACKWARD); c10d.all_reduce()"
_SPINS = "own.move(Phase.SAVING); c10d.barrier(spins=True)"
_WORKS = "while True: pass"
_SLEEPS = "time.sleep(600)"
_LIMIT_S = 2
_PATIENCE_S = 90


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[bytes]]]]:
    """Start processes that are watched like ranks, and wait until they can be."""
    (tmp_path / "torch/distributed").mkdir(parents=True)
    (tmp_path / "torch/distributed/distributed_c10d.py").write_text(_COLLECTIVES)
    begun: list[subprocess.Popen[bytes]] = []

    def start(*programs: str) -> list[subprocess.Popen[bytes]]:
        for rank, program in enumerate(programs):
            script = tmp_path / f"train{rank}.py"
            script.write_text(_LIKE_A_RANK + program)
            begun.append(subprocess.Popen([sys.executable, str(script), str(tmp_path), str(rank)]))
        until = time.monotonic() + _PATIENCE_S
        while any(read_observation(tmp_path, rank) is None for rank in range(len(programs))):
            assert time.monotonic() < until
            time.sleep(0.05)
        return begun

    yield start
    for process in begun:
        with_below = [*psutil.Process(process.pid).children(), process]
        for found in with_below:
            found.kill()
        process.wait()


class _Told(Observer):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def _watch(folder: Path, *, num_ranks: int = 2, limit_s: float | None = _LIMIT_S, **more: bool) -> RunWatch:
    ranks = range(num_ranks)
    return RunWatch(ranks_folder=folder, ranks=ranks, limit_s=limit_s, observer=_Told(), **more)


def _hang(watch: RunWatch, *, within_s: float = _PATIENCE_S) -> str | None:
    """Return how a run hangs; None if it does not in this time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if watch.look():
            assert watch.hang is not None
            return watch.hang.sentence
        time.sleep(0.1)
    return None


_HANGS = {
    "asleep in its imports": ((_SLEEPS, "own.move(Phase.PREPARING); c10d.broadcast()"), 0, "loading"),
    "a lock in prepare()": (
        (
            "own.move(Phase.PREPARING); import threading; threading.Event().wait()",
            "own.move(Phase.PREPARING); c10d.broadcast()",
        ),
        0,
        "in wait() at",
    ),
    "alone in save_state()": (
        (_WAITS, "own.move(Phase.SAVING); c10d.barrier()"),
        1,
        "waits in barrier, called at",
    ),
    "alone in an evaluation": (("own.move(Phase.EVALUATING); c10d.barrier()", _WAITS), 0, "waits in barrier"),
    "a pipe that nobody writes to": (
        ("os.mkfifo('f'); open('f')".replace("'f'", "folder / 'f'"), _WAITS),
        0,
        "",
    ),
    "in an exit handler": (
        ("own.move(Phase.ENDED)", "own.move(Phase.ENDED); time.sleep(600)"),
        1,
        "but its process",
    ),
    "failed, in an exit handler": (
        (
            _WAITS,
            "write_record(folder, rank=1, exit_code=1, error=KeyError('a'), changes=()); time.sleep(600)",
        ),
        1,
        "rank 1 has failed with KeyError, and its process does not end",
    ),
    "gone without a record": ((_WAITS, "own.move(Phase.FORWARD); os._exit(0)"), 1, "gone without a record"),
    "stopped": ((_WAITS, "os.kill(os.getpid(), signal.SIGSTOP)"), 1, "is stopped by a signal in"),
    "a stopped process below it": (
        (
            _WAITS,
            "os.kill(subprocess.Popen(['sleep', '600']).pid, signal.SIGSTOP); own.move(Phase.DATA); "
            + _SLEEPS,
        ),
        1,
        "a process started by rank 1 (process ",
    ),
    "waiting takes a core, as on a GPU": (
        (_SPINS, "own.move(Phase.FORWARD); c10d.all_reduce(True)"),
        0,
        "barrier",
    ),
    "a loop without an end keeps others waiting": (
        (_WAITS, _WORKS),
        1,
        "though rank 1 used CPU time; rank 1 is in",
    ),
}


@pytest.mark.parametrize(("programs", "rank", "words"), _HANGS.values(), ids=_HANGS)
def test_each_hang_is_ended_and_the_rank_named(
    tmp_path: Path,
    ranks: Callable[..., list[subprocess.Popen[bytes]]],
    programs: tuple[str, str],
    rank: int,
    words: str,
) -> None:
    ranks(*programs)
    watch = _watch(tmp_path)
    sentence = _hang(watch)
    assert sentence is not None
    assert watch.hang is not None
    assert watch.hang.rank == rank, sentence
    assert words in sentence


_NO_HANGS = {
    "data prepared by one rank alone": ("c10d.barrier()", _WORKS),
    "a download by one rank alone": (
        "c10d.barrier()",
        "with open(folder / 'data', 'wb') as file:\n"
        "    while True: file.write(bytes(2**16)); file.flush(); time.sleep(0.3)",
    ),
    "a file read slowly": (
        "c10d.barrier()",
        "while True: open('/dev/zero', 'rb').read(2**17); time.sleep(0.5)",
    ),
    "a compiler below a rank": (
        "own.move(Phase.FORWARD); c10d.broadcast()",
        f"own.move(Phase.PREPARING); subprocess.run([sys.executable, '-c', '{_WORKS}'])",
    ),
    "an evaluation that moves": (
        "c10d.barrier()",
        "while True: own.move(Phase.EVALUATING); time.sleep(0.4)",
    ),
    "collectives": (
        _WAITS,
        "count = 0\nwhile True: count += 1; observe.note_collectives(count); time.sleep(0.4)",
    ),
    "all ranks in the script's own code": ("own.move(Phase.BETWEEN_STEPS)\n" + _WORKS,) * 2,
}


@pytest.mark.parametrize("programs", _NO_HANGS.values(), ids=_NO_HANGS)
def test_what_works_or_moves_is_no_hang(
    tmp_path: Path, ranks: Callable[..., list[subprocess.Popen[bytes]]], programs: tuple[str, str]
) -> None:
    ranks(*programs)
    watch = _watch(tmp_path)
    assert _hang(watch, within_s=4 * _LIMIT_S) is None
    watch.clear_unused()
    assert not list(tmp_path.glob("*.stack"))


def test_ranks_that_wait_for_another_node_get_the_time_of_one_that_works(
    tmp_path: Path, ranks: Callable[..., list[subprocess.Popen[bytes]]]
) -> None:
    ranks("c10d.barrier()", "c10d.barrier()")
    assert _hang(_watch(tmp_path, is_one_of_nodes=True), within_s=3 * _LIMIT_S) is None
    assert _hang(_watch(tmp_path)) is not None


def test_a_stopped_launcher_is_named_resumed_and_ended_if_it_starts_no_rank(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    launcher = subprocess.Popen(["sleep", "600"])
    try:
        os.kill(launcher.pid, signal.SIGSTOP)
        until = time.monotonic() + _PATIENCE_S
        while not watch.look(launcher.pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert watch.hang is not None
        assert (watch.hang.rank, watch.hang.phase) == (0, None)
        assert watch.hang.sentence.endswith("; rank 0 has not begun")
        assert isinstance(watch.observer, _Told)
        who = f"accelerate launch (process {launcher.pid}) is"
        assert watch.observer.said == [
            f"{who} stopped by a signal; `kill -CONT {launcher.pid}` resumes it",
            f"nothing goes on: {who} resumed",
        ]
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize(
    ("phases", "step", "longest_s", "limit_s"),
    [
        ((Phase.LOADING, Phase.LOADING), 0, 0, 1800),
        ((Phase.FORWARD, Phase.BACKWARD), 0, 0, 1800),  # the first step may compile
        ((Phase.FORWARD, Phase.BACKWARD), 5, 2, 300),
        ((Phase.FORWARD, Phase.BETWEEN_STEPS), 5, 20, 400),
        ((Phase.BETWEEN_STEPS, Phase.BETWEEN_STEPS), 5, 2, 1800),
        ((Phase.SAVING, Phase.BACKWARD), 5, 2, 1800),
        ((Phase.EVALUATING, Phase.FORWARD), 5, 100, 2000),
        ((Phase.ENDED, Phase.ENDED), 5, 2, 1800),
    ],
)
def test_the_default_limit(
    tmp_path: Path, phases: tuple[Phase, ...], step: int, longest_s: float, limit_s: float
) -> None:
    found = {
        rank: observation(phase, step=step, longest_phase_s=longest_s) for rank, phase in enumerate(phases)
    }
    assert _watch(tmp_path, limit_s=None)._limit_s(found) == limit_s
    assert _watch(tmp_path, limit_s=7)._limit_s(found) == 7


_LIBRARY = "/venv/lib/python3.12/site-packages"
PACKAGE = Path(zerofit.__file__).parent
_C10D = f"{_LIBRARY}/torch/distributed/distributed_c10d.py"


def _stack(*frames: tuple[str, str]) -> Stack:
    """Return a stack of (path, function), innermost first."""
    return Stack(tuple(StackFrame(path, 7, function) for path, function in frames))


@pytest.mark.parametrize(
    ("stack", "collective", "script"),
    [
        (
            _stack(
                (_C10D, "barrier"),
                (f"{_LIBRARY}/torch/distributed/c10d_logger.py", "wrapper"),
                (f"{_LIBRARY}/accelerate/utils/other.py", "wait_for_everyone"),
                (f"{_LIBRARY}/accelerate/accelerator.py", "save_state"),
                ("/home/me/train.py", "main"),
            ),
            "barrier",
            "save_state() at /home/me/train.py:7",
        ),
        (
            _stack(
                (_C10D, "broadcast"),
                (f"{_LIBRARY}/torch/distributed/c10d_logger.py", "wrapper"),
                (_C10D, "broadcast_object_list"),
                ("/home/me/data.py", "tell"),
            ),
            "broadcast_object_list",
            "broadcast_object_list() at /home/me/data.py:7",
        ),
        (
            _stack(
                (f"{_LIBRARY}/torch/distributed/rendezvous.py", "_create_c10d_store"),
                (f"{_LIBRARY}/torch/distributed/rendezvous.py", "_env_rendezvous_handler"),
                (_C10D, "init_process_group"),
                (f"{_LIBRARY}/accelerate/state.py", "__init__"),
                ("/home/me/train.py", "<module>"),
            ),
            "init_process_group",
            "init_process_group() at /home/me/train.py:7",
        ),
        (
            _stack(
                (f"{_LIBRARY}/torch/distributed/_functional_collectives.py", "wait_tensor"),
                (f"{_LIBRARY}/torch/nn/modules/module.py", "_call_impl"),
                ("/home/me/model.py", "forward"),
            ),
            "wait_tensor",
            "wait_tensor() at /home/me/model.py:7",
        ),
        # FSDP is around a model's own forward pass, too.
        (
            _stack(
                ("/home/me/model.py", "forward"),
                (f"{_LIBRARY}/torch/distributed/fsdp/fully_sharded.py", "forward"),
                ("/home/me/train.py", "main"),
            ),
            None,
            "/home/me/model.py:7",
        ),
        # zerofit's wrappers are around methods of libraries.
        (
            _stack(
                (_C10D, "all_gather_object"),
                (f"{PACKAGE}/training/wrapping.py", "wrapped"),
                (f"{PACKAGE}/training/reporting/observe.py", "save_state"),
                (f"{PACKAGE}/training/wrapping.py", "wrapped"),
                ("/home/me/train.py", "main"),
            ),
            "all_gather_object",
            "save_state() at /home/me/train.py:7",
        ),
        # A function of zerofit's own that only it knows is not who called.
        (
            _stack(
                (_C10D, "all_reduce"),
                (f"{PACKAGE}/training/step/sharded_writes.py", "_before_pass"),
                (f"{_LIBRARY}/torch/nn/modules/module.py", "_call_impl"),
                ("/home/me/train.py", "<module>"),
            ),
            "all_reduce",
            "all_reduce() at /home/me/train.py:7",
        ),
        (
            _stack(
                (_C10D, "all_gather_into_tensor"),
                (f"{_LIBRARY}/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "fsdp_hook_wrapper"),
                (f"{_LIBRARY}/torch/_dynamo/eval_frame.py", "_fn"),
                (f"{_LIBRARY}/torch/nn/modules/module.py", "_call_impl"),
                ("/home/me/train.py", "evaluate"),
            ),
            "all_gather_into_tensor",
            "all_gather_into_tensor() at /home/me/train.py:7",
        ),
        (
            _stack(
                (_C10D, "all_gather_into_tensor"),
                (f"{_LIBRARY}/torch/nn/modules/module.py", "_call_impl"),
                (f"{_LIBRARY}/transformers/generation/utils.py", "_sample"),
                (f"{_LIBRARY}/transformers/generation/utils.py", "generate"),
                (f"{_LIBRARY}/torch/utils/_contextlib.py", "decorate_context"),
                ("/home/me/train.py", "main"),
            ),
            "all_gather_into_tensor",
            "generate() at /home/me/train.py:7",
        ),
        (
            _stack(
                (_C10D, "all_reduce"),
                (f"{_LIBRARY}/deepspeed/comm/comm.py", "log_wrapper"),
                (f"{_LIBRARY}/deepspeed/runtime/engine.py", "backward"),
                (f"{_LIBRARY}/deepspeed/utils/nvtx.py", "wrapped_fn"),
                ("/home/me/train.py", "main"),
            ),
            "all_reduce",
            "backward() at /home/me/train.py:7",
        ),
        (_stack((f"{_LIBRARY}/torch/autograd/graph.py", "_engine_run_backward")), None, None),
        # On a GPU autograd runs hooks in a thread of its own.
        (
            Stack(
                _stack(
                    (f"{_LIBRARY}/torch/autograd/graph.py", "_engine_run_backward"),
                    (f"{_LIBRARY}/accelerate/accelerator.py", "backward"),
                    ("/home/me/train.py", "main"),
                ).frames,
                _stack(
                    (_C10D, "reduce_scatter_tensor"),
                    (f"{_LIBRARY}/deepspeed/runtime/zero/stage3.py", "reduce_partition"),
                ).frames,
            ),
            "reduce_scatter_tensor",
            "backward() at /home/me/train.py:7",
        ),
        (Stack(), None, None),
    ],
)
def test_a_stack_names_the_collective_and_the_line_that_called_it(
    stack: Stack, collective: str | None, script: str | None
) -> None:
    assert (stack.collective, stack.script) == (collective, script)


_HOOK = f"""  File "{_C10D}", line 4200 in reduce_scatter_tensor
  File "{_LIBRARY}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "{_LIBRARY}/deepspeed/runtime/zero/stage3.py", line 1500 in reduce_partition
"""
_GUARD_THREAD = """  File "/venv/guard.py", line 32 in _guard
  File "/usr/lib/python3.12/threading.py", line 1010 in run
  File "/usr/lib/python3.12/threading.py", line 1030 in _bootstrap
"""
_WRITER = f'  File "{_C10D}", line 9 in barrier\n' + _GUARD_THREAD
_MAIN = f"""  File "{_LIBRARY}/torch/autograd/graph.py", line 825 in _engine_run_backward
  File "/home/me/train.py", line 7 in main
"""


@pytest.mark.parametrize(
    ("threads", "collective", "without_python"),
    [
        ((_GUARD_THREAD, _HOOK, _MAIN), "reduce_scatter_tensor", False),
        ((_HOOK, _GUARD_THREAD, _MAIN), "reduce_scatter_tensor", False),
        ((_GUARD_THREAD, _MAIN), None, True),
        ((_WRITER, _MAIN), None, True),  # a thread of the script's own, as of an asynchronous checkpoint
        ((_GUARD_THREAD, _HOOK.replace(_C10D, "/venv/stage3.py"), _MAIN), None, False),
        ((_HOOK, _MAIN.replace("_engine_run_backward", "grad_hook")), None, False),
    ],
)
def test_a_backward_pass_on_a_gpu_waits_where_autograds_thread_does(
    tmp_path: Path, threads: tuple[str, ...], collective: str | None, without_python: bool
) -> None:
    *others, main = threads
    text = [f"Thread 0x00007fe235dff6c0 (most recent call first):\n{thread}\n" for thread in others]
    text += [f"Current thread 0x00007fe259a35b80 (most recent call first):\n{main}"]
    file = tmp_path / "rank0.stack"
    file.write_text("an earlier stack\n" + "".join(text))
    stack = stacks._read(file, len("an earlier stack\n"))
    assert (stack.collective, stack.is_backward_without_python) == (collective, without_python)


_ACCELERATOR = f"{_LIBRARY}/accelerate/accelerator.py"
_ENGINE = f"{_LIBRARY}/deepspeed/runtime/engine.py"
_MODULE = f"{_LIBRARY}/torch/nn/modules/module.py"
_GATHER = _stack((_C10D, "all_gather"), (_ACCELERATOR, "gather"), ("/me/gather.py", "main"))
_BROADCAST = _stack((_C10D, "broadcast_object_list"), ("/me/broadcast.py", "main"))
_BARRIER = _stack((_C10D, "barrier"), (_ACCELERATOR, "wait_for_everyone"), ("/me/barrier.py", "main"))
_GENERATE = _stack(
    (_C10D, "all_gather_into_tensor"),
    (_MODULE, "_call_impl"),
    (f"{_LIBRARY}/transformers/generation/utils.py", "generate"),
    ("/me/generate.py", "main"),
)
_DDP = _stack(
    (f"{_LIBRARY}/torch/autograd/graph.py", "_engine_run_backward"),
    (_ACCELERATOR, "backward"),
    ("/me/train.py", "main"),
)
_ZERO = _stack((_C10D, "all_reduce"), (_ENGINE, "backward"), (_ACCELERATOR, "backward"), ("/me/train.py", ""))
_FORWARD = _stack((_C10D, "all_gather_into_tensor"), (_MODULE, "_call_impl"), ("/me/train.py", "main"))
_STEP = _stack((_C10D, "all_reduce"), (_ENGINE, "step"), ("/me/train.py", "main"))
_TRAINER = _stack(
    (_C10D, "all_reduce"),
    (_ENGINE, "backward"),
    (f"{_LIBRARY}/transformers/trainer.py", "training_step"),
    (f"{_LIBRARY}/transformers/trainer.py", "train"),
    ("/me/train.py", "main"),
)
_DATA = _stack(
    (_C10D, "broadcast"), (f"{_LIBRARY}/accelerate/data_loader.py", "__iter__"), ("/me/train.py", "")
)
_IN = Phase.FORWARD, Phase.BACKWARD
_DIFFERENT = {
    "gather beside DDP's backward": (_GATHER, _IN[0], [(_DDP, _IN[1])]),
    "broadcast beside DDP's backward": (_BROADCAST, _IN[0], [(_DDP, _IN[1])]),
    "gather after backward": (_GATHER, Phase.BETWEEN_STEPS, [(_ZERO, _IN[1])]),
    "a barrier beside a gathered layer": (_BARRIER, _IN[0], [(_FORWARD, _IN[0])]),
    "a barrier beside the optimizer": (_BARRIER, Phase.BACKWARD, [(_STEP, Phase.OPTIMIZER_STEP)]),
    "generate() under ZeRO-3": (_GENERATE, _IN[0], [(_ZERO, _IN[1])]),
    "gather beside Trainer": (_GATHER, _IN[1], [(_TRAINER, _IN[1])]),
    "a broadcast beside the next data": (_BROADCAST, _IN[0], [(_DATA, Phase.DATA)]),
    "an evaluation beside a gather of the loss": (_FORWARD, Phase.EVALUATING, [(_GATHER, _IN[0])]),
    "three ranks, three calls": (_GATHER, _IN[0], [(_ZERO, _IN[1]), (_STEP, Phase.OPTIMIZER_STEP)]),
    "one of four in a step": (_ZERO, _IN[1], [(_GATHER, _IN[0])] * 3),
    "one of four in a gather": (_GATHER, _IN[0], [(_ZERO, _IN[1])] * 3),
    "an earlier phase": (_FORWARD, _IN[0], [(_ZERO, _IN[1])]),
}
"""The stack and phase of the rank that is named, and those of the others."""


@pytest.mark.parametrize(("named", "phase", "others"), _DIFFERENT.values(), ids=_DIFFERENT)
@pytest.mark.parametrize("came_first", [True, False])
@pytest.mark.parametrize("is_rank_0", [True, False])
def test_of_ranks_in_different_collectives_one_is_named_whichever_came_first(
    tmp_path: Path,
    named: Stack,
    phase: Phase,
    others: list[tuple[Stack, Phase]],
    came_first: bool,
    is_rank_0: bool,
) -> None:
    rank = 0 if is_rank_0 else len(others)
    mine = named, phase, 100.0 if came_first else 101.0
    theirs = [(stack, where, 100.5) for stack, where in others]
    waiting = [mine, *theirs] if is_rank_0 else [*theirs, mine]
    watch = _watch(tmp_path, num_ranks=len(waiting))
    watch._stacks = {number: stack for number, (stack, _, _) in enumerate(waiting)}
    watch._seen = {number: (at, 9) for number, (_, _, at) in enumerate(waiting)}
    found = {
        number: observation(where, pid=os.getpid(), step=4, changed_at=at, collectives=9)
        for number, (_, where, at) in enumerate(waiting)
    }
    first, *rest = watch._cause_first(found)
    assert first == rank
    assert watch._what_others_call(first, rest) == ", which no other rank has called"
    words = "; ".join(watch._state(number, found[number]) for number in (first, *rest))
    for number, (stack, _, _) in enumerate(waiting):
        assert f"rank {number} waits in {stack.collective or 'all_reduce'}, called " in words


@pytest.mark.parametrize(
    ("called", "other", "waits"),
    [
        ((9, 9), _GATHER, True),
        ((9, 8), Stack(), True),  # the other one sleeps
        ((9, 10), _GATHER, False),  # the other one's is later: this one computes, or its kernel hangs
        ((9, 9), Stack(), False),
        ((9, 9), _DDP, False),
    ],
)
def test_a_backward_pass_waits_in_all_reduce_if_another_rank_has_not_called_it(
    tmp_path: Path, called: tuple[int, int], other: Stack, waits: bool
) -> None:
    watch = _watch(tmp_path)
    watch._stacks = {0: _DDP, 1: other}
    watch._seen = {rank: (0.0, number) for rank, number in enumerate(called)}
    said = watch._state(0, observation(Phase.BACKWARD, pid=os.getpid(), step=4))
    where = "backward() at /me/train.py:7"
    if waits:
        assert said == f"rank 0 waits in all_reduce, called by {where}, in backward of step 5"
    else:
        assert said == f"rank 0 is in backward of step 5, in {where}"


@pytest.mark.parametrize(
    ("program", "works"),
    [
        ("while True: pass", True),
        ("import time\nwhile True: time.sleep(0.1)", False),
        ("import time\nwhile True: print('still waiting', file=open('log', 'a')); time.sleep(0.2)", False),
        ("import time\nwhile True: open('/dev/zero', 'rb').read(10**5); time.sleep(0.2)", True),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])", True),
        ("import os\nwhile True: os.system('true')", True),  # children that end at once
        ("import threading\nthreading.Event().wait()", False),
    ],
)
def test_work_is_cpu_time_or_bytes_of_a_process_and_all_below(
    tmp_path: Path, program: str, works: bool
) -> None:
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        meter = WorkMeter()
        time.sleep(2)  # its start is work
        assert not meter.look([process.pid])
        time.sleep(2)
        assert (process.pid in meter.look([process.pid])) == works
    finally:
        for found in (*psutil.Process(process.pid).children(), process):
            found.kill()
        process.wait()


def test_the_launcher_knows_the_process_that_copies_output_by_its_name() -> None:
    assert copy_output.NAME == LOG_COPIER
