"""Pairs of (loop or Trainer, layout of ranks, change of the training): each is in a row that trains as alone.

The rows are a covering array of strength two, found by a greedy search. A row that differs names what went
another way: losses, learning rates, samples or weights. Faults that are planted show that it would.
"""

from __future__ import annotations

import itertools
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from covered_runs import (
    CHANGES,
    LAYOUTS,
    Case,
    Trained,
    differences,
    train_by_itself,
    train_under_zerofit,
)
from runs import ROOT, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = [
    Case("one", "loop", ("split", "accumulated", "checkpointed", "lora", "bucketed", "resumed")),
    Case("one", "trainer", ("offloaded", "eight_bit", "frozen")),
    Case("ddp", "loop", ("accumulated", "offloaded", "eight_bit", "lora", "resumed")),
    Case("ddp", "trainer", ("split", "checkpointed", "frozen", "bucketed")),
    Case("z1", "loop", ("split", "accumulated", "frozen")),
    Case("z1", "trainer", ("checkpointed", "offloaded", "eight_bit", "lora", "bucketed", "resumed")),
    Case("z2", "loop", ("eight_bit", "frozen")),
    Case(
        "z2", "trainer", ("split", "accumulated", "checkpointed", "offloaded", "lora", "bucketed", "resumed")
    ),
    Case("z3", "loop", ("split", "checkpointed", "offloaded", "frozen", "bucketed")),
    Case("z3", "trainer", ("accumulated", "eight_bit", "lora", "resumed")),
    Case("fsdp", "loop", ("split", "accumulated", "checkpointed", "offloaded", "frozen")),
    Case("fsdp", "trainer", ("lora", "bucketed", "resumed")),
    Case("hybrid", "loop", ("accumulated", "offloaded", "lora", "resumed")),
    Case("hybrid", "trainer", ("split", "checkpointed", "frozen", "bucketed")),
    Case("tp", "loop", ("split", "accumulated", "eight_bit", "frozen", "bucketed", "resumed")),
    Case("tp", "trainer", ("checkpointed", "offloaded")),
    Case("sp", "loop", ("split", "accumulated", "eight_bit", "lora", "bucketed")),
    Case("sp", "trainer", ("checkpointed", "offloaded", "frozen", "resumed")),
    Case("pp", "loop", ("split", "accumulated", "frozen", "resumed")),
    Case("pp", "trainer", ("checkpointed", "offloaded", "eight_bit", "bucketed")),
]
AT_EACH_CHANGE = {
    ("one", "trainer"),
    ("ddp", "trainer"),
    ("z1", "loop"),
    ("z2", "trainer"),
    ("z3", "loop"),
    ("fsdp", "loop"),
    ("fsdp", "trainer"),
    ("hybrid", "trainer"),
    ("tp", "trainer"),
    ("sp", "trainer"),
    ("pp", "trainer"),
}
"""What `make test` trains: each layout and each change. The others: `make semantics ONLY=slow`, in CI."""
REFUSED = {
    ("tp", "lora"): "tensor-parallel-adapters",
    ("pp", "lora"): "pipeline-adapters",
    ("fsdp", "eight_bit"): "fsdp2-optimizer-takes-no-dtensors",
    ("hybrid", "eight_bit"): "fsdp2-optimizer-takes-no-dtensors",
}
"""Pairs that zerofit refuses, with the id of its error."""
MEASURED_ELSEWHERE = ("fsdp-kept", "fsdp-alone", "fsdp-four")
"""Layouts of FSDP2 that test_fsdp2_runs.py and test_fsdp2_resume.py train."""
MEANINGLESS = {("lora", "frozen"): "adapters are trained on weights that are frozen already"}


@pytest.fixture(scope="session")
def alone(covered_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Trained]:
    """Return a function that gives the script's training by itself; each is run once."""

    @cache
    def train(data_parallel_size: int, route: str, arguments: tuple[str, ...]) -> Trained:
        case = next(
            row
            for row in ROWS
            if (row.data_parallel_size, row.route, row.arguments(by_itself=True))
            == (data_parallel_size, route, arguments)
        )
        return train_by_itself(case, covered_model, tmp_path_factory.mktemp("alone"))

    return lambda case: train(case.data_parallel_size, case.route, case.arguments(by_itself=True))


def _name(case: Case) -> str:
    return "-".join((case.layout, case.route, *case.changes))


def _marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    return () if (case.layout, case.route) in AT_EACH_CHANGE else (pytest.mark.slow,)


@pytest.mark.parametrize("case", [pytest.param(row, id=_name(row), marks=_marks(row)) for row in ROWS])
def test_a_script_trains_as_it_does_by_itself(
    case: Case, covered_model: Path, alone: Callable[[Case], Trained], tmp_path: Path
) -> None:
    seen = train_under_zerofit(case, covered_model, tmp_path)
    assert differences(alone(case), seen, case) == [], seen.stderr


def test_make_test_trains_each_layout_and_each_change() -> None:
    rows = [row for row in ROWS if (row.layout, row.route) in AT_EACH_CHANGE]
    assert {row.layout for row in rows} == {row.layout for row in ROWS}
    assert {change for row in rows for change in row.changes} == set(CHANGES)


def test_each_possible_pair_is_in_a_row() -> None:
    def factors(case: Case) -> dict[str, Any]:
        return {
            "layout": case.layout,
            "route": case.route,
            **{name: name in case.changes for name in CHANGES},
        }

    values: dict[str, list[Any]] = {
        "layout": [layout for layout in LAYOUTS if layout not in MEASURED_ELSEWHERE],
        "route": ["loop", "trainer"],
        **{name: [False, True] for name in CHANGES},
    }
    seen = {pair for row in ROWS for pair in itertools.combinations(factors(row).items(), 2)}
    missing = {
        ((first, one), (second, other))
        for first, second in itertools.combinations(values, 2)
        for one in values[first]
        for other in values[second]
    } - seen
    left_out = {(("layout", layout), (change, True)) for layout, change in REFUSED}
    left_out |= {((first, True), (second, True)) for first, second in MEANINGLESS}
    assert missing == left_out


@pytest.mark.parametrize(("layout", "change"), REFUSED)
def test_a_pair_that_is_left_out_is_refused_by_name(
    layout: str, change: str, covered_model: Path, tmp_path: Path
) -> None:
    case = Case(layout, "loop", (change,))
    script = (str(ROOT / "tests/semantics/scripts/covered.py"), "--model", str(covered_model))
    launcher = (sys.executable, "-m", "zerofit", "launch", "--cpu", *case.flags)
    run = run_command((*launcher, *script, *case.arguments(by_itself=False)), tmp_path)
    assert run.exit_code == 2, run.stderr
    assert f"error[{REFUSED[layout, change]}]" in run.stderr
    assert not (tmp_path / "out" / "model").exists()


_SPLIT = Case("z1", "loop", ("split", "accumulated", "frozen"))
PLANTED = {
    "gradients 1 % too large": (_SPLIT, "weights"),
    "a micro-batch dropped": (_SPLIT, "loss"),
    "a sample twice": (Case("sp", "trainer", ("checkpointed", "frozen")), "samples"),
    "a norm over one rank": (_SPLIT, "weights"),
    "a stale weight": (Case("z3", "loop", ("split", "checkpointed", "frozen", "bucketed")), "weights"),
}
"""Faults of tests/semantics/planted, the case in which each is planted, and what has to differ."""


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(
    fault: str, covered_model: Path, alone: Callable[[Case], Trained], tmp_path: Path
) -> None:
    case, differing = PLANTED[fault]
    planted = {"PYTHONPATH": str(ROOT / "tests" / "semantics" / "planted"), "PLANTED": fault}
    found = differences(alone(case), train_under_zerofit(case, covered_model, tmp_path, **planted), case)
    assert any(sentence.startswith(differing) for sentence in found), found
