"""Both examples, and others' scripts, under FSDP2 as measured: each trains as one process, or is refused.

Loops that follow the number of ranks train as under DDP on as many.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from real_scripts import MEASURED, SHARDED_WAYS, page_table, row_digest
from real_scripts_table import SCRIPTS, SHARDED
from runs import ROOT

_LOSS, _LOSS_OF_TRAINER = 2e-5, 1e-4
"""Tolerances, relative; Trainer sums and rounds what it logs."""
_WAY = 5e-3
"""Of the weights in the end, against the way that training took them: Adam's first steps are as long for a
gradient that is only rounding as for any."""
_MOST_OF_DDP = 2.0
"""In bf16: how many times further from one process in fp32 than DDP is."""
_UNTIED = "fsdp2-unties-weights"
_REFUSED = {"run_summarization": _UNTIED}
"""T5's encoder has embeddings that are tied to the decoder's."""


def _rows() -> dict[tuple[str, str], dict[str, Any]]:
    cases = json.loads(MEASURED.read_text())["cases"]
    return {(name, way): row for name, ways in cases.items() for way, row in ways.items()}


def test_both_examples_were_run_in_every_way() -> None:
    ways = {way for way, run in SHARDED_WAYS.items() if run.compared_with}
    for example in ("train_accelerate", "train_trainer"):
        assert {way for name, way in _rows() if name == example} == ways


def test_every_script_was_run_sharded() -> None:
    assert {name for name, way in _rows() if way == "fsdp2"} == set(SHARDED)


def test_the_page_has_the_table_of_what_was_measured() -> None:
    page = (ROOT / "docs" / "fsdp2.md").read_text("utf-8")
    assert page_table(json.loads(MEASURED.read_text())["cases"]) in page


def test_every_row_is_of_the_script_and_the_way_as_both_are_now() -> None:
    scripts = {script.name: script for script in SCRIPTS if script.name in SHARDED}
    assert {key: row["of"] for key, row in _rows().items()} == {
        (name, way): row_digest(scripts[name], way) for name, way in _rows()
    }


@pytest.mark.parametrize("name", SHARDED)
def test_each_run_in_fp32_is_that_of_one_process_or_refused_by_name(name: str) -> None:
    (script,) = (script for script in SCRIPTS if script.name == name)
    loss = _LOSS_OF_TRAINER if script.has_trainer else _LOSS
    wrong = {}
    for (of, way), row in _rows().items():
        is_fp32 = SHARDED_WAYS[way].precision == "no"
        if of == name and is_fp32 and not _is_right(row, loss, _REFUSED.get(name, "")):
            wrong[way] = row
    assert wrong == {}


def _is_right(row: dict[str, Any], loss: float, refused: str) -> bool:
    if refused or "refused" in row:
        return row.get("refused") == refused
    return "others" not in row and row["loss"] <= loss and max(row["weights"], row["saved"]) <= _WAY


def test_in_bf16_fsdp2_is_at_most_twice_as_far_from_one_process_as_ddp() -> None:
    rows = _rows()
    wrong = {
        name: (row, rows[name, "ddp-bf16"])
        for (name, way), row in rows.items()
        if way == "bf16" and "refused" not in row
        if "others" in row or row["weights"] > _MOST_OF_DDP * rows[name, "ddp-bf16"]["weights"]
    }
    assert wrong == {}
