"""README's table of the smallest GPU for each model and method is what plans say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.write_smallest_gpus import BEGIN, END, GPUS, METHODS, MODELS, row, with_table
from zerofit.machine.gpu_catalog import find_gpu

_README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
_LINES = _README.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
_ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in _LINES[2:]}
_CELL = re.compile(rf"({'|'.join(GPUS)}): (\d+\.\d) ±(\d+)%")


def test_the_table_has_each_model_and_method() -> None:
    assert list(_ROWS) == list(MODELS)
    for line in _ROWS.values():
        cells = line.strip("| ").split(" | ")[1:]
        assert len(cells) == len(METHODS)
        assert [cell for cell in cells if not _CELL.fullmatch(cell)] == []


def test_a_method_that_trains_less_never_needs_a_larger_gpu() -> None:
    for line in _ROWS.values():
        cells = line.strip("| ").split(" | ")[1:]
        sizes = [GPUS.index(cell.partition(":")[0]) for cell in cells]
        assert sizes == sorted(sizes, reverse=True)


def test_what_is_needed_fits_with_its_uncertainty() -> None:
    for line in _ROWS.values():
        for gpu, gib, percent in _CELL.findall(line):
            usable = find_gpu(gpu).usable_bytes / 2**30
            assert float(gib) * (1 + int(percent) / 100) < usable + 0.2  # the figures are rounded


def test_writing_the_same_rows_changes_nothing() -> None:
    assert with_table(_README, list(_ROWS.values())) == _README


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_row_is_what_plans_say_today(model: str) -> None:
    assert _ROWS[model] == row(model), "python -m tools.write_smallest_gpus writes it anew"
