"""Trainer under FSDP2 on two CPU ranks: what it evaluates, generates and saves is that of one process."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from runs import SCRIPTS, Run, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow
_SCRIPT = str(SCRIPTS / "sharded_trainer.py")
_LOSS, _WEIGHTS = 1e-4, 1e-3
"""Tolerances, relative; Trainer rounds what it logs."""


def _train(case: str, folder: Path, *flags: str) -> Run:
    launch = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--num-processes", "2")
    return run_command([*launch, "--engine", "fsdp2", "--no-capture", *flags, _SCRIPT, case, "2"], folder)


def _seen(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "out" / "seen.json").read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a case trained in one process without zerofit."""

    @cache
    def train(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        run_command([sys.executable, _SCRIPT, case, "1"], folder, ACCELERATE_USE_CPU="true").check()
        return folder

    return train


def _assert_same_weights(ours: Path, theirs: Path) -> None:
    from safetensors.torch import load_file

    seen, known = load_file(ours), load_file(theirs)
    assert seen.keys() == known.keys()
    apart = {name: float((seen[name] - known[name]).norm() / (known[name].norm() + 1e-12)) for name in known}
    assert max(apart.values()) <= _WEIGHTS, apart


@pytest.mark.parametrize(
    ("case", "flags", "file"),
    [
        ("plain", (), "model.safetensors"),
        ("plain", ("--state-dict-type", "full"), "model.safetensors"),
        ("adapters", (), "adapter_model.safetensors"),
        ("adapters", ("--state-dict-type", "full"), "adapter_model.safetensors"),
        ("best", (), "model.safetensors"),
        ("compiled", (), "model.safetensors"),
    ],
)
def test_a_trainer_ends_as_in_one_process(
    case: str, flags: tuple[str, ...], file: str, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    _train(case, tmp_path, *flags).check()
    seen, known = _seen(tmp_path), _seen(alone(case))
    assert [line.keys() for line in seen["log"]] == [line.keys() for line in known["log"]]
    for line, expected in zip(seen["log"], known["log"], strict=True):
        assert line == pytest.approx(expected, rel=_LOSS)
    assert seen["samples"] == known["samples"]  # of rank 0; rank 1 makes longer ones
    _assert_same_weights(tmp_path / "out" / "saved" / file, alone(case) / "out" / "saved" / file)
    export = (sys.executable, "-m", "zerofit", "export", "out/checkpoint-4", "--out", "exported")
    run_command(export, tmp_path).check()
    if case != "best":  # whose saved model is that of the better checkpoint
        _assert_same_weights(tmp_path / "exported" / file, alone(case) / "out" / "saved" / file)
