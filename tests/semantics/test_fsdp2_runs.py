"""FSDP2 as measured: one script in many ways on two and four CPU ranks, against one process."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import pytest
from covered_runs import Case, Trained, distance, train_by_itself, train_under_zerofit
from runs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

MEASURED = ROOT / "tests" / "evidence" / "measured" / "fsdp2_runs.json"
_LOSS, _LOSS_OF_TRAINER = 2e-5, 1e-4
"""Tolerances, relative; Trainer sums and rounds what it logs."""
_WAY = 1e-5
"""Of the weights in the end, against the way that training took them."""


def _case(layout: str, route: str, way: tuple[str, ...], precision: str = "no") -> Case:
    """Return the case; a loop's batches weigh alike on all ranks, as its own mean over them does, and are not
    bucketed, as each number of ranks has other buckets."""
    if route == "loop":
        way = (*(name for name in way if name != "bucketed"), "even")
    return Case(layout, route, way, precision)


_CASES = (
    _case("fsdp", "trainer", ("split", "accumulated")),
    _case("fsdp", "trainer", ("lora", "accumulated")),
    _case("fsdp", "trainer", ("resumed",)),
    _case("fsdp", "loop", ()),
    _case("fsdp", "loop", ("checkpointed",)),
    _case("fsdp", "loop", ("frozen",)),
    _case("fsdp-kept", "trainer", ()),
    _case("fsdp-kept", "trainer", ("checkpointed",)),
    _case("fsdp-kept", "trainer", ("frozen", "bucketed")),
    _case("fsdp-kept", "loop", ("split", "accumulated")),
    _case("hybrid", "trainer", ("split", "accumulated")),
    _case("hybrid", "trainer", ("lora", "accumulated")),
)


def _name(case: Case) -> str:
    changes = (name for name in case.changes if name != "even")
    return ", ".join((case.layout, case.route, case.precision, *changes))


def _most_apart(seen: Trained, alone: Trained) -> float:
    """Return the largest relative difference of a step's loss."""
    last = alone.steps[-len(seen.steps) :]
    return max(abs(ours - theirs) / theirs for (ours, _), (theirs, _) in zip(seen.steps, last, strict=True))


@pytest.mark.timeout(7200)
@pytest.mark.evidence
def test_all_runs(covered_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    @cache
    def alone(route: str, changes: tuple[str, ...], precision: str) -> Trained:
        case = Case("one", route, tuple(name for name in changes if name != "resumed"), precision)
        return train_by_itself(case, covered_model, tmp_path_factory.mktemp("alone"))

    rows = {}
    for case in _CASES:
        seen = train_under_zerofit(case, covered_model, tmp_path_factory.mktemp("run"))
        assert seen.applied == (), _name(case)
        expected = alone(case.route, case.changes, case.precision)
        rows[_name(case)] = {
            "loss": float(f"{_most_apart(seen, expected):.1e}"),
            "weights": float(f"{distance(expected, seen):.1e}"),
        }
        MEASURED.write_text(json.dumps(rows, indent=1) + "\n")


def _measured() -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = json.loads(MEASURED.read_text())
    return rows


def test_what_was_measured_has_every_run() -> None:
    assert list(_measured()) == [_name(case) for case in _CASES]


def test_in_fp32_each_run_is_that_of_one_process() -> None:
    wrong = {}
    for name, row in _measured().items():
        tolerance = _LOSS_OF_TRAINER if "trainer" in name else _LOSS
        if ", no" in name and (row["loss"] > tolerance or row["weights"] > _WAY):
            wrong[name] = row
    assert wrong == {}
