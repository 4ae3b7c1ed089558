"""`zerofit plan SCRIPT` and `zerofit launch SCRIPT` for real: captured, planned, launched on CPU ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from runs import SCRIPTS, Run, run_command

pytestmark = pytest.mark.slow

_SCRIPT = str(SCRIPTS / "tiny_loop.py")
_FLAGS = ("--engine", "native", "--mixed-precision", "no")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that the tests share; DeepSpeed's ops are those that were compiled before."""
    cache = tmp_path_factory.mktemp("cache")
    ops = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions")
    ops.mkdir(parents=True, exist_ok=True)
    (cache / "torch_extensions").symlink_to(ops)
    return cache


def _zerofit(folder: Path, cache: Path, *words: str) -> Run:
    command = (sys.executable, "-m", "zerofit", *words)
    return run_command(command, folder, XDG_CACHE_HOME=str(cache), CUDA_VISIBLE_DEVICES="")


def test_a_script_is_captured_planned_and_rehearsed(tmp_path: Path, cache: Path) -> None:
    flags = ("--cpu", "--gpus", "2xA100-40G", "--micro-batch-size", "2", "--gradient-checkpointing", *_FLAGS)
    run = _zerofit(tmp_path, cache, "launch", *flags, _SCRIPT, "done.txt").check()
    assert (tmp_path / "done.txt").read_text() == "2 steps on 2 ranks"
    assert f"capturing what {_SCRIPT} trains" in run.stderr
    rows = [" ".join(line.split()) for line in run.stderr.splitlines()]
    assert "batch on each rank 8 x 1 2 x 4 --micro-batch-size says so; global batch 16 as before" in rows
    assert "gradient checkpointing off on --gradient-checkpointing says so" in rows
    plan = json.loads((run.run_folder / "plan.json").read_text())
    capture = plan["capture"]
    assert (plan["strategy"]["micro_batch_size"], plan["strategy"]["gradient_accumulation_steps"]) == (2, 4)
    assert (capture["micro_batch_size"], capture["route"]) == (8, "accelerate")
    assert (capture["model"]["loads_weights"], capture["model"]["is_made_whole"]) == (False, True)
    changed = json.loads((run.run_folder / "ranks" / "rank0.json").read_text())["changes"]
    assert "each forward pass of 8 samples runs as 4 micro-batches of 2" in changed


def test_a_plan_made_once_is_launched_under_zero_2_from_its_one_file(tmp_path: Path, cache: Path) -> None:
    script = (str(SCRIPTS / "token_trainer.py"), "4", "1")
    flags = (
        "--gpus",
        "2xA100-40G",
        "--zero-stage",
        "2",
        "--micro-batch-size",
        "2",
        "--mixed-precision",
        "no",
    )
    planned = _zerofit(tmp_path, cache, "plan", *flags, "--output", "p.json", *script).check()
    assert "global batch 8, " in planned.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"p.json"}
    run = _zerofit(tmp_path, cache, "launch", "--cpu", "--plan", "p.json", *script).check()
    assert "capturing what" not in run.stderr
    assert run.stdout.count("step ") == 3
    made, runs = (
        json.loads(path.read_text()) for path in (tmp_path / "p.json", run.run_folder / "plan.json")
    )
    assert (made["capture"], made["capture"]["route"]) == (runs["capture"], "trainer")
    assert (runs["strategy"]["zero_stage"], runs["strategy"]["micro_batch_size"]) == (2, 2)
    assert not (run.run_folder / "capture.json").exists()


def test_a_script_that_trains_nothing_is_not_launched(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "nothing.py").write_text("print('hello')\n")
    run = _zerofit(tmp_path, cache, "launch", "--cpu", "--gpus", "2xT4", "nothing.py")
    assert run.exit_code == 2
    assert "error[capture-no-training]: nothing.py ended before training anything\n" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["nothing.py"]
