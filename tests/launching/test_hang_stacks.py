"""What stacks of ranks tell: who waits in which collective, called from where, and which rank is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_runs import observation

import zerofit
from zerofit.core.observer import Observer
from zerofit.core.rank_observation import Phase, read_observation
from zerofit.launching.hang import RunWatch
from zerofit.launching.stacks import Stack, StackFrame, dump_stacks, read_stack

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


_LIBRARY = "/venv/lib/python3.12/site-packages"
_PACKAGE = Path(zerofit.__file__).parent
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
                (f"{_PACKAGE}/training/wrapping.py", "wrapped"),
                (f"{_PACKAGE}/training/reporting/observe.py", "save_state"),
                (f"{_PACKAGE}/training/wrapping.py", "wrapped"),
                ("/home/me/train.py", "main"),
            ),
            "all_gather_object",
            "save_state() at /home/me/train.py:7",
        ),
        # A function of zerofit's own that only it knows is not who called.
        (
            _stack(
                (_C10D, "all_reduce"),
                (f"{_PACKAGE}/training/step/sharded_writes.py", "_before_pass"),
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
    stack = read_stack(file, len("an earlier stack\n"))
    assert (stack.collective, stack.is_backward_without_python) == (collective, without_python)


def _watch(folder: Path, num_ranks: int) -> RunWatch:
    return RunWatch(ranks_folder=folder, ranks=range(num_ranks), limit_s=6, observer=Observer())


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
    watch = _watch(tmp_path, len(waiting))
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
    watch = _watch(tmp_path, 2)
    watch._stacks = {0: _DDP, 1: other}
    watch._seen = {rank: (0.0, number) for rank, number in enumerate(called)}
    said = watch._state(0, observation(Phase.BACKWARD, pid=os.getpid(), step=4))
    where = "backward() at /me/train.py:7"
    if waits:
        assert said == f"rank 0 waits in all_reduce, called by {where}, in backward of step 5"
    else:
        assert said == f"rank 0 is in backward of step 5, in {where}"
