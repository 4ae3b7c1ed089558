"""A trial in a process of its own: how it waits, runs and ends, and how its errors are classified."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from measuring import trial_program
from measuring.results import TrialOutcome, TrialState, spec_from_json, spec_to_json
from measuring.trial import STAGE, run_trial, start_trial, trial_environment
from runs import ROOT
from small_specs import files_in, spec_in

from zerofit.core.processes import wait_for_end

_MOST_S = 200.0


def _child(others: list[psutil.Process]) -> psutil.Process:
    (child,) = (one for one in psutil.Process().children() if one not in others)
    return child


def _wait_until_it_waits(log: Path) -> None:
    """Wait until a process says in its log that it waits."""
    until = time.monotonic() + _MOST_S
    while time.monotonic() < until:
        if f"{STAGE}waiting for its turn\n" in log.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("it never waited")


@pytest.mark.slow
def test_several_wait_until_told_to_go_one_after_another(tmp_path: Path) -> None:
    others = psutil.Process().children()
    names = ("one", "two")
    rungs = [start_trial(spec_in(tmp_path, waits=True), files_in(tmp_path, name)) for name in names]
    for name in names:
        _wait_until_it_waits(files_in(tmp_path, name).log)
    first = rungs[0].finish(limit_s=_MOST_S)
    assert not files_in(tmp_path, "two").result.exists()
    second = rungs[1].finish(limit_s=_MOST_S)
    assert [first.state, second.state] == [TrialState.DONE] * 2, (first, second)
    assert first.measured is not None
    assert second.measured is not None
    assert first.measured.losses == second.measured.losses
    assert psutil.Process().children() == others


@pytest.mark.slow
def test_what_is_over_its_time_was_running_not_waiting(tmp_path: Path) -> None:
    with start_trial(spec_in(tmp_path, waits=True, num_steps=10**6), files_in(tmp_path)) as rung:
        _wait_until_it_waits(files_in(tmp_path).log)
        outcome = rung.finish(limit_s=2)
    assert outcome.state is TrialState.TOO_SLOW
    assert outcome.reason.startswith("not done after 2 s, while ")
    assert "importing" not in outcome.reason
    assert "waiting" not in outcome.reason


@pytest.mark.slow
def test_a_closed_standard_input_ends_it_quietly(tmp_path: Path) -> None:
    spec, place = spec_in(tmp_path, waits=True), files_in(tmp_path)
    place.spec.write_text(spec_to_json(spec))
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "measuring.trial_program"),
            *(str(place.spec), str(place.result), str(os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=trial_environment(on_cpu=True),
    )
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert not place.result.exists()


@pytest.mark.slow
def test_one_that_fails_before_its_turn_says_why_at_its_turn(tmp_path: Path) -> None:
    others = psutil.Process().children()
    spec = spec_in(tmp_path, waits=True, task="no-such-task")
    with start_trial(spec, files_in(tmp_path)) as rung:
        psutil.wait_procs([_child(others)], timeout=1)
        outcome = rung.finish(limit_s=_MOST_S)
    assert outcome == TrialOutcome(
        state=TrialState.FAILED, reason="ValueError: 'no-such-task' is not a valid Task"
    )


def test_a_killed_one_that_waits_says_so(tmp_path: Path) -> None:
    others = psutil.Process().children()
    with start_trial(spec_in(tmp_path, waits=True), files_in(tmp_path)) as rung:
        _child(others).kill()
        outcome = rung.finish(limit_s=_MOST_S)
    assert outcome.state is TrialState.KILLED
    assert outcome.reason.startswith("ended by SIGKILL, while importing")


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from small_specs import files_in, spec_in; from measuring.trial import start_trial\n"
        "folder = Path(sys.argv[1]); rung = start_trial(spec_in(folder, waits=True), files_in(folder))\n"
        "print('started', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program,
            str(tmp_path),
            str(ROOT / "tests" / "support"),
            str(ROOT / "benchmarks"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    children = psutil.Process(parent.pid).children()
    _wait_until_it_waits(files_in(tmp_path).log)
    parent.kill()
    parent.wait()
    assert wait_for_end(children, within_s=30) == []
    parent.stdout.close()


def test_a_spec_comes_back_from_its_json_as_it_was(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, "micro-batch-2,sgd,lora-4", num_ranks=2, waits=True)
    assert spec_from_json(spec_to_json(spec)) == spec
    assert spec.batch_size == 4


def test_a_rung_over_its_time_is_ended(tmp_path: Path) -> None:
    others = psutil.Process().children()  # of tests that ran before in this process
    outcome = run_trial(spec_in(tmp_path), files_in(tmp_path), limit_s=0.2)
    assert outcome == TrialOutcome(state=TrialState.TOO_SLOW, reason="not done after 0.2 s, while importing")
    assert psutil.Process().children() == others


def test_a_rung_that_is_killed_says_by_what_and_when(tmp_path: Path) -> None:
    others = psutil.Process().children()  # of tests that ran before in this process

    def kill() -> None:
        while not (children := [one for one in psutil.Process().children() if one not in others]):
            time.sleep(0.01)
        children[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = run_trial(spec_in(tmp_path), files_in(tmp_path), limit_s=60)
    killer.join()
    assert outcome.state is TrialState.KILLED
    assert outcome.reason.startswith("ended by SIGKILL, while importing")


def test_a_rung_gets_the_defaults_of_torch_and_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_MODULE_LOADING",
        "LOCAL_WORLD_SIZE",
        "ACCELERATE_MIXED_PRECISION",
    )
    for name in (*left_out, "KEPT"):
        monkeypatch.setenv(name, "1")
    program = tmp_path / "names.py"
    program.write_text("import os\nprint(sorted(os.environ))\n")
    spec, place = spec_in(tmp_path), files_in(tmp_path)
    with start_trial(spec, place, program=(str(program),)) as rung:
        rung.finish(limit_s=60)
    names = place.log.read_text()
    assert "'KEPT'" in names
    assert [name for name in left_out if f"'{name}'" in names] == []


_GPU = {"on_cpu": False}
_LIMITED = {"memory_limit_bytes": 1}


@pytest.mark.parametrize(
    ("error", "fields", "state"),
    [
        (MemoryError(), {}, TrialState.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory."), {}, TrialState.OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), {}, TrialState.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), {}, TrialState.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("CUDA driver error: out of memory"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), _GPU, TrialState.OUT_OF_MEMORY),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            _GPU,
            TrialState.OUT_OF_MEMORY,
        ),
        (
            RuntimeError("NCCL error in: c10d\nLast error:\nFailed to CUDA calloc async 608 bytes"),
            _GPU,
            TrialState.OUT_OF_MEMORY,
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), _GPU, TrialState.FAILED),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"), _GPU, TrialState.FAILED),
        (RuntimeError("could not create a primitive"), _LIMITED, TrialState.OUT_OF_MEMORY),
        (RuntimeError("could not create a primitive"), {**_LIMITED, **_GPU}, TrialState.FAILED),
        (RuntimeError("could not create a primitive"), {}, TrialState.FAILED),
        (RuntimeError("shapes differ"), _LIMITED, TrialState.FAILED),
    ],
)
def test_a_full_memory_is_told_from_other_errors(
    tmp_path: Path, error: Exception, fields: dict[str, Any], state: TrialState
) -> None:
    assert trial_program.state_of(error, spec_in(tmp_path, **fields)) is state
