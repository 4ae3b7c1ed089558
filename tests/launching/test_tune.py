"""zerofit tune: trials are real launches that end after some steps and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from example_runs import accelerate_example, trainer_example
from runs import ROOT, SCRIPTS, Run, environment, run_command

from zerofit.core.processes import has_ended
from zerofit.machine.observations import read_observations

pytestmark = pytest.mark.slow

_TUNE = (
    *(sys.executable, "-m", "zerofit", "tune", "--cpu", "--gpus=2xRTX4090", "--num-processes=2"),
    *("--warm-up=1", "--steps=2"),
)
_LIMITED = str(ROOT / "tests" / "support" / "limited_memory")


def _tune(folder: Path, *words: str, **more: str) -> Run:
    return run_command([*_TUNE, *words], folder, **more)


def _document(run: Run) -> dict[str, Any]:
    return json.loads(run.check().stdout)


def _users_files(folder: Path) -> dict[str, str]:
    """Make files of the user's that the example overwrites, and return them."""
    (folder / "out" / "checkpoint-1").mkdir(parents=True)
    for name in ("metrics.jsonl", "checkpoint-1/random_states_0.pkl"):
        (folder / "out" / name).write_text("the user's")
    return _files(folder)


def _files(folder: Path) -> dict[str, str]:
    out = folder / "out"
    return {str(one.relative_to(out)): one.read_text() for one in out.rglob("*") if one.is_file()}


def test_trials_are_measured_stored_and_change_no_file(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without DeepSpeed: its op for CPU ranks is built below XDG_CACHE_HOME, too.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = _users_files(tmp_path)
    example = [*accelerate_example(data_dir, micro_batch_size=4), "--checkpointing-steps=1"]
    words = ("--engine=native", "--trials=2", "--json")
    first = _tune(tmp_path, *words, "--out=best.json", *example)
    document = _document(first)
    one, other = document["trials"]
    assert [trial["end"] for trial in (one, other)] == ["measured", "measured"]
    assert one["strategy"] != other["strategy"]
    assert 0 < min(one["step_time_s"], other["step_time_s"]) < 5
    assert document["best"] == int(other["step_time_s"] < one["step_time_s"])
    assert document["on_cpu"] is True
    assert document["stopped_by"] is None
    assert _files(tmp_path) == before

    assert {(seen.num_steps, seen.step_time_s) for seen in read_observations()} == {
        (3, one["step_time_s"]),
        (3, other["step_time_s"]),
    }
    plan = json.loads((tmp_path / "best.json").read_text())
    assert plan["trial"] is None
    assert plan["topology"] == {"num_nodes": 1, "world_size": 2, "on_cpu": True}
    assert plan["reasons"][0]["why"].startswith("the fastest of 2 measured here, ")

    more = ("--engine=native", "--trials=3", "--budget=0s", "--json")
    again = _document(_tune(tmp_path, *more, *example))
    assert again["is_out_of_time"] is True
    assert [trial["is_kept"] for trial in again["trials"]] == [True, True]
    assert [trial["step_time_s"] for trial in again["trials"]] == [one["step_time_s"], other["step_time_s"]]
    assert len(read_observations()) == 2


def test_ctrl_c_ends_a_trial_and_the_same_command_continues(data_dir: Path, tmp_path: Path) -> None:
    before = _users_files(tmp_path)
    command = [*_TUNE, "--zero-stage=2", "--trials=2", *accelerate_example(data_dir, micro_batch_size=4)]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 240
    while not list(tmp_path.glob("zerofit-runs/tune-*/trial-2/ranks/rank0.live")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.endswith("zerofit: stopped by SIGINT; the same command continues\n")
    assert "\nfastest: ZeRO-2" in stdout
    assert _files(tmp_path) == before
    assert all(has_ended(process) for process in ranks)

    again = _tune(tmp_path, *command[len(_TUNE) :]).check()
    assert "1 trial of an earlier start is reused" in again.stderr
    assert (again.stderr.count("trial 2 of 2"), again.stderr.count("trial 1 of 2")) == (2, 0)


def test_after_out_of_memory_strategies_that_need_as_much_are_skipped(data_dir: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (_LIMITED, os.environ.get("PYTHONPATH"))))
    one = ("--num-processes=1", "--gpus=1x24GB", "--optimizer=adamw", "--no-gradient-checkpointing")
    run = _tune(
        tmp_path,
        *(*one, "--trials=3", "--json", *accelerate_example(data_dir, micro_batch_size=8)),
        MEMORY_LIMIT="8000000 all 1",
        PYTHONPATH=path,
    )
    document = _document(run)
    ends = [(trial["end"], trial["strategy"]["micro_batch_size"]) for trial in document["trials"]]
    assert ends[0] == ("out of memory", 8)
    assert "ran out of GPU memory" in document["trials"][0]["cause"]
    assert document["trials"][document["best"]]["strategy"]["micro_batch_size"] < 8


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_trainer_neither_saves_nor_evaluates_in_a_trial(stage: str, data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    example = trainer_example(data_dir, micro_batch_size=4)
    flags = ("--save_strategy=steps", "--save_steps=1", "--eval_strategy=steps", "--eval_steps=1")
    run = _tune(tmp_path, f"--zero-stage={stage}", "--trials=1", *example, *flags).check()
    assert "trial 1 of 1: " in run.stderr
    assert _files(tmp_path) == {}
    (log,) = tmp_path.glob("zerofit-runs/tune-*/trial-1/logs/rank0.log")
    assert "eval_loss" not in log.read_text()


def test_a_launch_trains_under_the_fastest_of_its_trials(data_dir: Path, tmp_path: Path) -> None:
    example = accelerate_example(data_dir, micro_batch_size=4)
    command = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--gpus=2xRTX4090", "--num-processes=2"]
    run = run_command([*command, "--tune=2", *example], tmp_path).check()
    plan = json.loads((run.run_folder / "plan.json").read_text())
    assert plan["trial"] is None
    assert any(one["why"].startswith("the fastest of 2 measured here, ") for one in plan["reasons"])
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 9  # 8 steps, one evaluation


def test_a_script_without_enough_steps_says_so(tmp_path: Path) -> None:
    run = _tune(tmp_path, "--trials=1", "--warm-up=40", str(SCRIPTS / "tiny_loop.py"), "done.txt")
    assert run.exit_code == 1
    assert "trial 1 of 1: the script ended within 40 steps, before a timed one" in run.stderr
    assert not (tmp_path / "done.txt").exists()
