"""What a ladder of fixed figures looks like: tables, bars of letters, and the content of a plot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ladders import not_counted, on_cpu, on_gpu

from zerofit.cli.output.ladder_plot import ladder_plot
from zerofit.cli.output.ladder_table import ladder_table
from zerofit.measuring.results import Ladder

_Golden = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("name", "ladder"), [("cpu", on_cpu()), ("gpu", on_gpu()), ("not-counted", not_counted())]
)
def test_table(golden: _Golden, name: str, ladder: Ladder) -> None:
    golden(ladder_table(ladder) + "\n", f"ladder/{name}.txt")


def test_a_plot_has_a_bar_for_each_rung_and_a_reason_for_each_that_is_not_done() -> None:
    plot = ladder_plot(on_cpu())
    assert [bar.measured for bar in plot.bars] == [1800.0, 900.0, None, None, 360.0]
    assert [bar.note for bar in plot.bars] == [
        "",
        "",
        "can't run here: tf32 needs a GPU that has it: there is none",
        "killed: ended by SIGKILL, while taking step 1 of 2; the kernel ended ...",
        "",
    ]
    assert plot.bars[0].parts == (87.0, 87.0, 174.0, 1100.0)
    assert {bar.published for bar in plot.bars} == {None}


def test_a_plot_of_the_published_ladder_has_its_figures_in_the_same_unit() -> None:
    plot = ladder_plot(on_gpu())
    assert plot.unit == "GiB"
    assert [bar.published for bar in plot.bars] == [15.1, 7.5, 7.3, 5.5, 3.5, 3.4]
    assert plot.bars[0].predicted == pytest.approx(14_000 / 1024)


def test_a_plot_has_no_parts_where_none_were_counted() -> None:
    assert [len(bar.parts) for bar in ladder_plot(not_counted()).bars] == [4, 0]
