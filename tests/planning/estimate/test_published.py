"""What estimates say of themselves, held against the runs that benchmarks/published.py predicted."""

from __future__ import annotations

import json
import statistics
import tomllib
from pathlib import Path

import pytest

from zerofit.planning.estimate.device_memory.memory import _ONE_RANK

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def errors() -> list[float]:
    cases = json.loads((_BENCHMARKS / "measured" / "published.json").read_text())["cases"]
    return [abs(case["error"]) for case in cases if not case["not_known"] and case["error"] is not None]


def test_the_stated_uncertainty_covers_every_published_run_that_is_known(errors: list[float]) -> None:
    uncertainty, source = _ONE_RANK
    assert max(errors) <= uncertainty
    assert f"{len(errors)} published runs" in source
    assert f"median {statistics.median(errors):.1%}".replace("%", " %") in source
    assert f"worst {max(errors):.1%}".replace("%", " %") in source


def test_every_case_that_can_be_predicted_was_predicted() -> None:
    sources = tomllib.loads((_BENCHMARKS / "published_cases.toml").read_text())["source"]
    rows = [{**source, **row} for source in sources for row in source["rows"]]
    predicted = json.loads((_BENCHMARKS / "measured" / "published.json").read_text())["cases"]
    assert [case["id"] for case in predicted] == [row["id"] for row in rows if "not_predicted" not in row]


def test_most_published_runs_that_are_known_are_within_8_percent(errors: list[float]) -> None:
    assert statistics.median(errors) < 0.03
    assert sum(error < 0.08 for error in errors) / len(errors) >= 0.9
