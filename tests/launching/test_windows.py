"""Loops that the stock stack treats wrongly under DeepSpeed train under zerofit as in plain data parallel.

One launch of each stack runs them all, on two ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, SCRIPTS, run_command, stock_launcher

SCRIPT = str(SCRIPTS / "windows.py")
Shown = dict[str, dict[str, Any]]

SILENTLY_WRONG = (
    "by_hand",
    "by_hand_and_clip",
    "calls_backward_itself",
    "calls_backward_itself_and_clips",
    "clips",
    "clips_once",
    "leaves_a_rest_that_goes_on",
    "leaves_a_rest_that_is_dropped",
    "saves_within",
    "torch_clips",
    "triggers_the_exchange",
    "two_losses",
    "two_losses_of_one_forward",
)
"""Those that stock accelerate trains otherwise under DeepSpeed, and says nothing."""
FAILS = (
    "empty_group_and_own_scheduler",
    "makes_the_optimizer_late",
    "prepares_by_kind",
    "prepares_the_model_first",
    "prepares_the_optimizer_first",
    "skips_steps_without_a_norm",
)
"""Loops that end with an error there."""
RIGHT = (
    "accumulate",
    "accumulate_and_clip",
    "empty_group",
    "evaluates_before_the_step",
    "forwards_before_the_step",
    "learns_from_a_teacher",
    "makes_the_scheduler_last",
    "plain",
    "prepares_the_rest_later",
    "skips_a_loss_of_the_model",
    "skips_batches",
    "zeroes_before",
)
"""Loops that are to stay right."""
REFUSED = {
    "clips_by_value": "deepspeed-clips-by-norm-only",
    "clips_each_pass": "script-clips-between-steps",
    "steps_its_own_optimizer": "optimizer-not-prepared",
}
REFUSED_UNDER_ZERO3 = {
    "makes_the_optimizer_late": "optimizer-made-after-prepare",
    # It releases the weights after a backward pass: a second one through them fails.
    "two_losses_of_one_forward": "RuntimeError",
}
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    "z2": (("--preset", "z2"), (), REFUSED),
    "z3": (("--preset", "z3"), (), REFUSED | REFUSED_UNDER_ZERO3),
    "z3 in micro-batches": (
        ("--preset", "z3", "--micro-batch-size", "1"),
        (
            "accumulate",
            "by_hand_and_clip",
            "calls_backward_itself",
            "leaves_a_rest_that_is_dropped",
            "prepares_the_model_first",
            "skips_a_loss_of_the_model",
            "triggers_the_exchange",
            "two_losses_of_one_forward",  # each piece has a forward pass of its own
        ),
        {},
    ),
}
"""Flags of a run, the loops that it runs (all, if empty), and those of them that it refuses."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


def _shown(command: list[str], folder: Path, loops: tuple[str, ...] = (), **environment: str) -> Shown:
    run_command([*command, SCRIPT, "shown.json", *loops], folder, **environment).check()
    return json.loads((folder / "shown.json").read_text())


@pytest.fixture(scope="module")
def plain(folder: Path) -> Shown:
    """Plain accelerate in DistributedDataParallel."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return _shown(command, folder, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Shown:
    """Plain accelerate under ZeRO-2."""
    (folder / "ds_configs").symlink_to(ROOT / "ds_configs")
    flags = "--config_file ds_configs/accelerate_z2.yaml --num_processes 2 --mixed_precision no"
    command = [*stock_launcher(), *flags.split()]
    loops = (*SILENTLY_WRONG, *FAILS)
    return _shown(command, folder, loops, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")


_MARKS = {"z3": pytest.mark.evidence, "z3 in micro-batches": pytest.mark.slow}


@pytest.fixture(
    scope="module",
    # With its micro-batches it says all that it says without.
    params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in RUNS],
)
def ours(request: pytest.FixtureRequest, folder: Path) -> tuple[Shown, dict[str, str]]:
    """What `zerofit launch` makes of them, and which it is to refuse."""
    flags, loops, refused = RUNS[request.param]
    command = [sys.executable, "-m", "zerofit", "launch", "--cpu", "--num-processes", "2", *flags]
    return _shown(command, folder, loops), refused


def _is_as(shown: dict[str, Any], expected: dict[str, Any]) -> bool:
    if "error" in shown:
        return False
    return shown["steps"] == expected["steps"] and all(
        shown[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)
        for name in ("losses", "rates", "weights")
    )


@pytest.mark.slow
def test_every_loop_is_looked_at(plain: Shown) -> None:
    assert sorted(plain) == sorted((*SILENTLY_WRONG, *FAILS, *RIGHT, *REFUSED))
    assert all("error" not in shown for shown in plain.values())


@pytest.mark.slow
def test_loops_train_as_in_data_parallel(ours: tuple[Shown, dict[str, str]], plain: Shown) -> None:
    shown, refused = ours
    loops = shown.keys() - refused.keys()
    assert {loop: (shown[loop], plain[loop]) for loop in loops if not _is_as(shown[loop], plain[loop])} == {}


@pytest.mark.slow
def test_what_deepspeed_can_not_do_is_refused(ours: tuple[Shown, dict[str, str]]) -> None:
    shown, refused = ours
    assert {loop: shown[loop].get("error") for loop in refused} == refused


@pytest.mark.slow
def test_the_stock_stack_trains_them_otherwise(stock: Shown, plain: Shown) -> None:
    for loop in SILENTLY_WRONG:
        assert "error" not in stock[loop]
        assert not _is_as(stock[loop], plain[loop]), loop
    assert {loop for loop in FAILS if "error" in stock[loop]} == set(FAILS)
