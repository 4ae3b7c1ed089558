"""The stated errors of estimates, held against the published runs that benchmarks/published.py predicts."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import published
import pytest

from zerofit.planning.estimate.closed_form.uncertainty import UNCERTAINTY, UNCERTAINTY_SOURCE
from zerofit.planning.estimate.device_memory.memory import BY_NAME, BY_OWN_MODEL, QUANTIZED

_ROOT = Path(__file__).parents[3]
_NAMES = tuple(pytest.param(name, marks=pytest.mark.slow) for name in ("hf-bertL-adam8bit-all", "litgpt-30"))
"""Quick cases of full training, in 8 bits with all else, and of adapters; `make test-published` has all."""


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A cache of traces that begins empty; pytest's workers share it, as many cases train the same model."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "published-traces"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_ROOT / "benchmarks" / "measured" / "published.json").read_text())
    return found


@cache
def _rows() -> dict[str, tuple[str, dict[str, Any]]]:
    sources = tomllib.loads(published.CASES.read_text(encoding="utf-8"))["source"]
    return {
        row["id"]: (source["name"], {**source, **row})
        for source in sources
        for row in source["rows"]
        if "not_predicted" not in {**source, **row}
    }


def _slow_if_it_confirms(name: str) -> tuple[Any, ...]:
    """Two rows in three of a source are slow: what moves one of them moves the third, too."""
    rows = _rows()
    of_source = [row for row, (source, _) in rows.items() if source == rows[name][0]]
    return (pytest.mark.slow,) if of_source.index(name) % 3 else ()


def test_every_case_that_can_be_predicted_was_predicted(recorded: dict[str, Any]) -> None:
    assert [case["id"] for case in recorded["cases"]] == list(_rows())


@pytest.mark.parametrize(
    "name",
    [
        *_NAMES,
        *(pytest.param(name, marks=[pytest.mark.evidence, *_slow_if_it_confirms(name)]) for name in _rows()),
    ],
)
def test_the_recorded_prediction_is_todays(
    name: str, recorded: dict[str, Any], traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "_CACHE", traces)
    today = published.predict(*_rows()[name])
    case = next(case for case in recorded["cases"] if case["id"] == name)
    assert (today.predicted_bytes, today.uncertainty) == (case["predicted_bytes"], case["uncertainty"])
    assert today.fast_bytes == case["fast_bytes"]


def test_nine_known_runs_in_ten_are_within_the_stated_uncertainty(recorded: dict[str, Any]) -> None:
    known = {name: group for name, group in recorded["summary"].items() if name.endswith("what is known")}
    classes = (
        *("all full", "all LoRA", "all QLoRA", "all LitGPT's adapters", "all LitGPT's adapters in nf4"),
        *("all, by closed forms", "all, by transformers in LitGPT's place"),
    )
    assert {f"{name}: what is known" for name in classes} <= known.keys()
    assert all(group["share_within_uncertainty"] >= 0.9 for group in known.values())


def test_the_stated_uncertainties_quote_what_was_recorded(recorded: dict[str, Any]) -> None:
    known = [case for case in recorded["cases"] if case["error"] is not None and not case["not_known"]]
    own = [case for case in known if case["source"].startswith("LitGPT")]
    quantized = sum("QLoRA" in case["kind"] or "nf4" in case["kind"] for case in own)
    named = [case for case in own if case["by_transformers_bytes"]]
    worst_own, worst_of_transformers = (
        max(abs(case["error"]) for case in group)
        for group in (own, [case for case in known if case not in own])
    )
    by_name = {case["id"]: abs(case["by_transformers_bytes"] / case["measured_bytes"] - 1) for case in named}
    in_nf4 = [by_name[case["id"]] for case in named if case["kind"] == "QLoRA"]
    assert BY_OWN_MODEL[1].startswith(
        f"{len(own)} published runs, {quantized} in nf4, whose own model code was traced lay within "
        f"{worst_own * 100:.1f} %, and {len(known) - len(own)} of transformers' within "
        f"{worst_of_transformers * 100:.1f} %"
    )
    assert f"{len(named)} runs of another model code than transformers' lay within " in BY_NAME[1]
    assert f"within {max(by_name.values()) * 100:.1f} %" in BY_NAME[1]
    assert f"{max(in_nf4) * 100:.1f} % of {len(in_nf4)} published runs in nf4" in QUANTIZED[1]


def test_runs_in_fp32_are_known_of_one_source_so_that_precisions_have_no_uncertainty_of_their_own(
    recorded: dict[str, Any],
) -> None:
    known = [case for case in recorded["cases"] if case["error"] is not None and not case["not_known"]]
    assert len({case["source"] for case in known if case["precision"] == "fp32"}) == 1


def test_what_is_stated_covers_each_source_better_than_what_the_others_would_give(
    recorded: dict[str, Any],
) -> None:
    assert {row["source"] for row in recorded["left_out"]} == {
        case["source"] for case in recorded["cases"] if not case["not_known"]
    }
    for row in recorded["left_out"]:
        assert row["inside_stated"] >= max(0.9, row["inside_it"]), row


def test_closed_forms_say_how_many_runs_lay_within_their_uncertainty(recorded: dict[str, Any]) -> None:
    known = recorded["summary"]["all, by closed forms: what is known"]
    within = round(known["cases"] * known["share_within_uncertainty"])
    assert UNCERTAINTY_SOURCE.startswith(
        f"{within} of {known['cases']} published runs on one GPU lay within {UNCERTAINTY:.0%}".replace(
            "%", " %"
        )
    )


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            "README.md",
            "Against {cases} published one-GPU runs the predicted memory was off by {median} in the median "
            "and {worst} at worst",
        ),
        (
            "docs/plan-numbers.md",
            "{cases} cases, median {median}, 90th percentile {90th_percentile}, worst {worst}",
        ),
    ],
)
def test_the_pages_state_the_errors_of_the_known_runs(
    page: str, words: str, recorded: dict[str, Any]
) -> None:
    known = recorded["summary"]["all: what is known"]
    said = words.format(
        cases=known["cases"],
        **{
            name: f"{abs(known[name]):.1%}".replace("%", " %")
            for name in ("median", "90th_percentile", "worst")
        },
    )
    assert said in " ".join((_ROOT / page).read_text("utf-8").split())


def test_the_page_of_published_runs_states_the_errors_of_other_model_code(recorded: dict[str, Any]) -> None:
    group = recorded["summary"]["all, by transformers in LitGPT's place: what is known"]
    median, worst = (f"{abs(group[name]):.1%}".replace("%", " %") for name in ("median", "worst"))
    page = " ".join((_ROOT / "docs" / "published-runs.md").read_text("utf-8").split())
    assert f"in the place of LitGPT's are off by {median} in the median and {worst} at worst" in page
