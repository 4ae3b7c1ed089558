"""An accelerate loop that resumes amid an epoch trains on the samples that the epoch has not had."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from runs import SCRIPTS, run_command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built_ops")]

_EPOCH = 6
_ONE, _TWO = "--num-processes 1", "--num-processes 2 --engine native"
_ZERO2 = "--num-processes 2 --zero-stage 2"


def _steps(folder: Path, plan: str, *arguments: str) -> list[Any]:
    """Return the indices of samples, sorted, and the loss of each step."""
    target = [str(SCRIPTS / "shuffled_loop.py"), *arguments]
    launch = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--no-capture", *plan.split()]
    run_command([*launch, *target], folder).check()
    return list(json.loads((folder / "steps.json").read_text()))


@pytest.mark.parametrize(
    ("plan", "arguments"),
    [
        pytest.param(_ONE, [], id="one process"),
        pytest.param(_ONE, ["--own-generator"], id="a generator of its own"),
        pytest.param(_ONE, ["--workers=2"], id="workers"),
        pytest.param(_TWO, [], id="two ranks"),
        pytest.param(_ZERO2, ["--workers=1"], id="ZeRO-2"),
    ],
)
def test_a_resumed_epoch_goes_on_as_it_would_have(plan: str, arguments: list[str], tmp_path: Path) -> None:
    at = _EPOCH + 2
    whole = _steps(tmp_path, plan, f"--save-at={at}", *arguments)
    assert sorted(chain(*(indices for indices, _ in whole[_EPOCH : 2 * _EPOCH]))) == list(range(24))
    # Another seed: nothing but the checkpoint says what the order was.
    resumed = _steps(tmp_path, plan, f"--resume={at}", "--seed=5", *arguments)
    assert resumed == whole[at:]


@pytest.mark.parametrize(("before", "after"), [(_ONE, _TWO), (_TWO, _ONE)], ids=["more", "fewer"])
def test_the_order_is_that_of_another_number_of_ranks(before: str, after: str, tmp_path: Path) -> None:
    at = _EPOCH + 2
    whole = _steps(tmp_path, before, f"--save-at={at}")
    resumed = _steps(tmp_path, after, f"--resume={at}", "--seed=5")
    rest = slice(at, 2 * _EPOCH)
    assert [indices for indices, _ in resumed][: 2 * _EPOCH - at] == [indices for indices, _ in whole[rest]]


def test_a_new_epoch_draws_its_own_order(tmp_path: Path) -> None:
    whole = _steps(tmp_path, _ONE, f"--save-at={_EPOCH}")
    resumed = _steps(tmp_path, _ONE, f"--resume={_EPOCH}")
    assert resumed == whole[_EPOCH:]
