"""What was saved outlives a fault: the next start goes on from it, with the losses of a whole run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import Run, run_command, run_process

from zerofit.core.checkpoints import find_checkpoints

pytestmark = pytest.mark.faults

_SCRIPT = str(Path(__file__).parent / "scripts" / "fault.py")
_PLANS = {"plain": "--engine native", "ZeRO-2": "--zero-stage 2", "ZeRO-3": "--zero-stage 3"}
_STEPS_DONE, _NEWEST = 5, 4
"""Steps before the fault, and the step of the newest checkpoint; the one before it is of step 2."""


def _command(plan: str, *fault: str) -> list[str]:
    launch = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--no-capture", "--num-processes", "1"]
    return [*launch, *_PLANS[plan].split(), _SCRIPT, *fault]


def _losses(folder: Path) -> list[str]:
    """Return the losses step by step; the steps done twice must have one loss."""
    return sorted(set((folder / "losses").read_text().splitlines()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Return the losses of a run without a fault, by plan."""
    known: dict[str, list[str]] = {}

    def losses(plan: str) -> list[str]:
        if plan not in known:
            folder = tmp_path_factory.mktemp("whole")
            run_command(_command(plan), folder).check()
            known[plan] = _losses(folder)
        return known[plan]

    return losses


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without DeepSpeed whose rank was killed after the fifth step."""
    folder = tmp_path_factory.mktemp("killed")
    assert run_command(_command("plain", "die"), folder).exit_code == 137
    return folder


def _resume(plan: str, folder: Path) -> tuple[Run, int]:
    """Start again; return the run and the step that it went on from."""
    shutil.rmtree(folder / "zerofit-runs", ignore_errors=True)
    run = run_command(_command(plan), folder).check()
    return run, int((folder / "resumed").read_text())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


_DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "optimizer missing": lambda folder: (folder / "optimizer.bin").unlink(),
    "random states missing": lambda folder: (folder / "random_states_0.pkl").unlink(),
    "weights cut off": lambda folder: os.truncate(folder / "model.safetensors", 100),
    "optimizer emptied": lambda folder: os.truncate(folder / "optimizer.bin", 0),
    "optimizer one byte longer": lambda folder: os.truncate(
        folder / "optimizer.bin", (folder / "optimizer.bin").stat().st_size + 1
    ),
    "a bit of the weights flipped": lambda folder: _flip(folder / "model.safetensors"),
    "a bit of the optimizer flipped": lambda folder: _flip(folder / "optimizer.bin"),
    "manifest emptied": lambda folder: os.truncate(folder / "zerofit-checkpoint.json", 0),
    "manifest no JSON": lambda folder: (folder / "zerofit-checkpoint.json").write_text("{"),
    "manifest nested too deep": lambda folder: (folder / "zerofit-checkpoint.json").write_text("[" * 100_000),
    "all files missing": _empty,
}


_CONFIRM = {
    ("optimizer missing",),
    ("random states missing",),
    ("optimizer emptied",),
    ("a bit of the optimizer flipped",),
    ("manifest emptied",),
    ("die", "plain"),
    ("worker", "ZeRO-2"),
    ("worker", "ZeRO-3"),
    ("ZeRO-2",),
}
"""What the same damage to another file, or the same fault under another plan, shows already."""


def _case(*values: str) -> Any:
    return pytest.param(*values, id="-".join(values), marks=[pytest.mark.slow] * (values in _CONFIRM))


@pytest.mark.parametrize("damage", [_case(damage) for damage in _DAMAGES])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str,
    killed: Path,
    tmp_path: Path,
    whole: Callable[[str], list[str]],
    note_fault: Callable[..., None],
) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    _DAMAGES[damage](tmp_path / "project" / "checkpoints" / "checkpoint_1")
    run, step = _resume("plain", tmp_path)
    said = [line for line in run.stderr.splitlines() if "skips checkpoint_1" in line]
    assert step == _NEWEST - 2
    assert _losses(tmp_path) == whole("plain")
    assert said or damage == "all files missing"  # an empty folder is no checkpoint
    note_fault(
        f"checkpoint damaged: {damage}", cause=said[0] if said else None, steps_lost=_STEPS_DONE - step
    )


@pytest.mark.parametrize(
    ("fault", "plan"), [_case(fault, plan) for fault in ("die", "worker") for plan in _PLANS]
)
def test_the_next_start_has_the_losses_of_a_whole_run(
    fault: str,
    plan: str,
    tmp_path: Path,
    whole: Callable[[str], list[str]],
    note_fault: Callable[..., None],
) -> None:
    run = run_command(_command(plan, fault), tmp_path)
    ended_after_s = time.time() - float((tmp_path / "at.txt").read_text())
    assert run.exit_code == (137 if fault == "die" else 1), run.stderr
    record = run.record()
    done = len((tmp_path / "losses").read_text().splitlines())
    _, step = _resume(plan, tmp_path)
    assert done - step < 2
    assert _losses(tmp_path) == whole(plan)
    note_fault(
        f"{'rank' if fault == 'die' else 'DataLoader worker'} killed, resumed, {plan}",
        ended_after_s=round(ended_after_s, 2),
        exit_code=run.exit_code,
        cause=record["cause"],
        steps_lost=done - step,
    )


@pytest.mark.parametrize("plan", [_case(plan) for plan in _PLANS])
def test_a_save_on_a_full_disk_leaves_the_checkpoints_before_it(
    plan: str, tmp_path: Path, whole: Callable[[str], list[str]], note_fault: Callable[..., None]
) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("may not mount here")
    (tmp_path / "project").mkdir()
    mount, keep = "mount -t tmpfs -o size=2m none project", "rm project/fill; cp -r project kept"
    shell = f'{mount}; "$@"; code=$?; {keep}; exit $code'
    run = run_process(["unshare", "-m", "sh", "-c", shell, "sh", *_command(plan, "full")], tmp_path)
    ended_after_s = time.time() - float((tmp_path / "at.txt").read_text())
    assert run.exit_code == 1, run.stderr
    record = run.record()
    (tmp_path / "project").rmdir()
    (tmp_path / "kept").rename(tmp_path / "project")
    found = find_checkpoints(tmp_path / "project" / "checkpoints", digests=True)
    assert [one.path.name for one in found if one.is_complete] == ["checkpoint_1", "checkpoint_0"]
    _, step = _resume(plan, tmp_path)
    assert step == _NEWEST
    assert _losses(tmp_path) == whole(plan)
    note_fault(
        f"disk full in a save, {plan}",
        ended_after_s=round(ended_after_s, 2),
        exit_code=run.exit_code,
        cause=record["cause"],
        steps_lost=6 - step,
    )
