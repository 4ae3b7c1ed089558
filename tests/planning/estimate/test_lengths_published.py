"""The longest samples that others trained, beside those that the traced estimate finds room for."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from published_lengths import CASES, OUT, Predicted, line_of, predict

RECORDED: dict[str, dict[str, Any]] = {one["name"]: one for one in json.loads(OUT.read_text("utf-8"))}


def test_each_recipe_was_predicted_and_is_less_than_a_fifth_off() -> None:
    assert list(RECORDED) == [case.name for case in CASES]
    assert all(abs(one["error"]) < 0.2 for one in RECORDED.values())


def test_whole_logits_take_most_of_a_long_sample_and_ranks_that_share_it_take_longer_ones() -> None:
    tiled = [one for one in RECORDED.values() if one["without_tiling"] is not None]
    assert all(one["without_tiling"] < one["predicted_length"] / 3 for one in tiled)
    alone, shared = (RECORDED[f"sp8 no-{name}"] for name in ("ulysses yes-liger", "mlp no-act-offload"))
    assert 7 < shared["predicted_length"] / alone["predicted_length"] < 8


def test_a_case_is_a_line() -> None:
    found = Predicted(**RECORDED["sp1 baseline"])
    expected = "sp1 baseline                  36,000 tokens:  78.5 GiB, full at    36,310 (+1%)"
    assert line_of(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_recorded_lengths_are_todays(case: Any) -> None:
    assert asdict(predict(case)) == RECORDED[case.name]
