"""Checkpoints under zerofit launch: whole or not at all, resumed under another plan, exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, Launch, Run, run_command
from safetensors.torch import load_file

from zerofit.core.checkpoints import find_checkpoints, inspect_checkpoint

_LOOP = str(Path(__file__).parent / "scripts" / "resumable_loop.py")
_TOLERANCE = 1e-5
"""Of fp32 losses: another number of ranks, or another Adam, adds in another order. Measured: 3e-7."""


def _loop(folder: Path, plan: str, *arguments: str) -> Run:
    command = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--no-capture", *plan.split(), _LOOP]
    return run_command([*command, "--losses", "losses.json", *arguments], folder)


def _losses(folder: Path) -> list[float]:
    return list(json.loads((folder / "losses.json").read_text()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> Path:
    """Six steps under ZeRO-2 on two ranks, saved after the third, fourth and sixth; two are kept."""
    folder = tmp_path_factory.mktemp("saved")
    saves = [word for step in (3, 4, 6) for word in ("--save-at", str(step))]
    _loop(folder, "--num-processes 2 --zero-stage 2", *saves, "--total-limit=2", "--weights=gathered").check()
    return folder


def _copy(saved: Path, to: Path) -> Path:
    shutil.copytree(saved / "project", to / "project")
    return to / "project" / "checkpoints"


def test_saves_are_whole_and_old_ones_pruned(saved: Path) -> None:
    folder = saved / "project" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    newest, earlier = (one for one in find_checkpoints(folder, digests=True) if one.is_complete)
    assert (newest.path.name, earlier.path.name) == ("checkpoint_2", "checkpoint_1")
    assert newest.manifest is not None
    assert newest.manifest.layout.world_size == 2
    assert newest.manifest.layout.optimizer == "torch.optim.adamw.AdamW"


@pytest.mark.slow
def test_zero2_of_two_ranks_resumes_as_zero3_on_one_and_a_partial_newest_is_passed_over(
    saved: Path, tmp_path: Path
) -> None:
    folder = _copy(saved, tmp_path)
    (folder / "checkpoint_2" / "random_states_1.pkl").unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run = _loop(tmp_path, "--num-processes 1 --zero-stage 3", "--resume", "--skip=4").check()
    assert _losses(tmp_path) == pytest.approx(_losses(saved)[4:], rel=_TOLERANCE)
    assert "skips checkpoint_2: random_states_1.pkl is missing" in run.stderr
    assert "checkpoint_1 was converted in a copy: it was saved with 2 ranks, ZeRO-2" in run.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not list(folder.glob(".*"))


def _export(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerofit", "export", str(source), "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_export_is_the_gathered_weights_bit_by_bit(saved: Path, tmp_path: Path) -> None:
    run_folder = next(path for path in (saved / "zerofit-runs").iterdir() if path.is_dir())
    finished = _export(run_folder, tmp_path / "out")
    assert finished.returncode == 0, finished.stderr
    exported = load_file(tmp_path / "out" / "model.safetensors")
    gathered = load_file(saved / "gathered" / "model.safetensors")
    assert gathered.keys() - exported.keys() == {"lm_head.weight"}  # tied: the gathering leaves both
    assert all(weight.equal(gathered[name]) for name, weight in exported.items())
    assert gathered["lm_head.weight"].equal(exported["transformer.wte.weight"])
    again = _export(run_folder, tmp_path / "out")
    assert (again.returncode, "export-folder-not-empty" in again.stderr) == (2, True)


def test_an_incomplete_checkpoint_in_the_arguments_is_refused_before_the_start(
    saved: Path, tmp_path: Path, launch: Launch
) -> None:
    folder = _copy(saved, tmp_path)
    (folder / "checkpoint_2" / "scheduler.bin").unlink()
    run = launch("--no-capture", _LOOP, f"--resume_from_checkpoint={folder / 'checkpoint_2'}")
    assert run.exit_code == 2
    assert run.stderr.endswith(
        "error[checkpoint-incomplete]: the checkpoint is not complete\n"
        f"  found: {folder / 'checkpoint_2'}: scheduler.bin is missing\n"
        "  why:   a run that was stopped while saving, or an interrupted copy, leaves only part of the "
        "state\n"
        f"  fix:   take {folder / 'checkpoint_1'}, the newest complete one, and delete this one\n"
    )
    assert not (tmp_path / "zerofit-runs").exists()


_PLANS = [
    ("--num-processes 2 --zero-stage 3", "--num-processes 1 --zero-stage 2"),
    ("--num-processes 2 --zero-stage 3", "--num-processes 1 --zero-stage 3 --offload-optimizer cpu"),
    ("--num-processes 1 --zero-stage 3 --offload-optimizer cpu", "--num-processes 2 --zero-stage 2"),
    ("--num-processes 1 --zero-stage 2 --offload-optimizer cpu", "--num-processes 2 --zero-stage 3"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "resumed_by"), _PLANS)
def test_the_first_losses_after_a_conversion_are_those_of_the_whole_run(
    tmp_path: Path, built_ops: None, saved_by: str, resumed_by: str
) -> None:
    _loop(tmp_path, saved_by, "--save-to=ckpt", "--save-at=3", "--weights=gathered").check()
    whole = _losses(tmp_path)
    _loop(tmp_path, resumed_by, "--resume=ckpt", "--skip=3").check()
    assert _losses(tmp_path) == pytest.approx(whole[3:], rel=_TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path, built_ops: None) -> None:
    _loop(tmp_path, "--num-processes 1 --engine native", "--save-to=ckpt", "--save-at=3").check()
    run = _loop(tmp_path, "--num-processes 1 --zero-stage 2", "--resume=ckpt", "--skip=3")
    assert run.exit_code == 2
    assert "error[checkpoint-of-other-engine]" in run.stderr


@pytest.mark.faults
@pytest.mark.parametrize("plan", ["--engine native", "--zero-stage 2", "--zero-stage 3"])
@pytest.mark.parametrize("moment", range(20))
def test_a_save_that_is_killed_at_any_moment_loses_nothing_before_it(
    tmp_path: Path, built_ops: None, plan: str, moment: int
) -> None:
    """The third save ends by SIGKILL at one of 20 moments, spread over what it does to files."""
    saves = [word for step in (1, 2, 3) for word in ("--save-at", str(step))]
    saves += [f"--die-in-third-save={moment / 20}"]
    run = _loop(tmp_path, f"--num-processes 1 {plan}", *saves)
    assert run.exit_code != 0
    folder = tmp_path / "project" / "checkpoints"
    assert inspect_checkpoint(folder / "checkpoint_1", digests=True).is_complete
    assert all(one.is_complete for one in find_checkpoints(folder, digests=True))
