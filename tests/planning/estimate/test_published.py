"""The stated errors of estimates, held against the published runs that benchmarks/published.py predicts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import published
import pytest

from zerofit.planning.training_estimator import UNCERTAINTY, UNCERTAINTY_SOURCE

_ROOT = Path(__file__).parents[3]
_NAMES = ("hf-bertL-vanilla", "hf-bertL-adam8bit-all", "litgpt-01", "litgpt-03", "qwen-007")
"""A case of each kind of training on one GPU, and one with modules that train whole, the quickest each."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_ROOT / "benchmarks" / "measured" / "published.json").read_text())
    return found


def _rows() -> dict[str, tuple[str, dict[str, Any]]]:
    sources = tomllib.loads(published.CASES.read_text(encoding="utf-8"))["source"]
    return {
        row["id"]: (source["name"], {**source, **row})
        for source in sources
        for row in source["rows"]
        if "not_predicted" not in {**source, **row}
    }


def test_every_case_that_can_be_predicted_was_predicted(recorded: dict[str, Any]) -> None:
    assert [case["id"] for case in recorded["cases"]] == list(_rows())


@pytest.mark.parametrize(
    "name", [*_NAMES, *(pytest.param(one, marks=pytest.mark.evidence) for one in _rows())]
)
def test_the_recorded_prediction_is_todays(
    name: str, recorded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "_CACHE", tmp_path)
    today = published.predict(*_rows()[name])
    case = next(case for case in recorded["cases"] if case["id"] == name)
    assert (today.predicted_bytes, today.uncertainty) == (case["predicted_bytes"], case["uncertainty"])
    assert today.fast_bytes == case["fast_bytes"]


def test_nine_known_runs_in_ten_are_within_the_stated_uncertainty(recorded: dict[str, Any]) -> None:
    known = {name: group for name, group in recorded["summary"].items() if name.endswith("what is known")}
    classes = ("all full", "all LoRA", "all QLoRA", "all, by closed forms")
    assert {f"{name}: what is known" for name in classes} <= known.keys()
    assert all(group["share_within_uncertainty"] >= 0.9 for group in known.values())


def test_closed_forms_say_how_many_runs_lay_within_their_uncertainty(recorded: dict[str, Any]) -> None:
    known = recorded["summary"]["all, by closed forms: what is known"]
    within = round(known["cases"] * known["share_within_uncertainty"])
    assert UNCERTAINTY_SOURCE.startswith(
        f"{within} of {known['cases']} published runs on one GPU lay within {UNCERTAINTY:.0%}".replace(
            "%", " %"
        )
    )


def test_the_readme_states_the_errors_of_the_known_runs(recorded: dict[str, Any]) -> None:
    known = recorded["summary"]["all: what is known"]
    assert (
        f"{known['cases']} published runs on one GPU whose software and shapes are known, its memory was off "
        f"by {known['median']:.1%} in the median, {known['90th_percentile']:.1%} at the 90th percentile"
    ).replace("%", " %") in " ".join((_ROOT / "README.md").read_text("utf-8").split())
