"""A ladder of fixed figures as tables, bars of letters, and a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
from ladders import not_counted, on_cpu, on_gpu

from zerofit.cli.output.ladder_plot import draw_ladder, ladder_figure
from zerofit.cli.output.ladder_table import ladder_table
from zerofit.core.errors import UserError
from zerofit.measuring.ladder import Ladder
from zerofit.measuring.results import peak_of

_Golden = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("name", "ladder"), [("cpu", on_cpu()), ("gpu", on_gpu()), ("not-counted", not_counted())]
)
def test_table(golden: _Golden, name: str, ladder: Ladder) -> None:
    golden(ladder_table(ladder) + "\n", f"ladder/{name}.txt")
    assert max(map(len, ladder_table(ladder, width=80).splitlines())) <= 80


@pytest.mark.parametrize("ladder", [on_cpu(), on_gpu(), not_counted()])
def test_a_picture_has_the_figures_of_the_ladder(ladder: Ladder, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    memory, _ = ladder_figure(ladder).axes
    upper, *parts = memory.containers
    unit = 2**20 if ladder.on_cpu else 2**30
    done = [rung.measured for rung in ladder.rungs]
    assert [bar.get_width() * unit for bar in upper] == [peak_of(one) if one else 0 for one in done]
    counted = [sum(bars[row].get_width() for bars in parts) * unit for row in range(len(done))]
    whole = [one.counted if one else None for one in done]
    assert counted == pytest.approx([sum(astuple(one)) if one else 0 for one in whole])
    notes = [text.get_text() for text in memory.texts if text.get_style() == "italic"]
    assert notes == (_NOTES[ladder.device] if None in done else [])
    marks = {mark.get_label(): [*mark.get_offsets()[:, 0]] for mark in memory.collections}
    if not ladder.on_cpu:
        assert marks['published, "G" as GiB'] == [15.1, 7.5, 7.3, 5.5, 3.5][: len(done)]
        assert marks["predicted"][0] == pytest.approx(14_000 / 1024)
    draw_ladder(ladder, tmp_path / "none" / "ladder.png")
    assert (tmp_path / "none" / "ladder.png").read_bytes().startswith(b"\x89PNG")


_NOTES = {
    "CPU": [
        " can't run here: tf32 needs a GPU that supports it: there is none",
        " killed: ended by SIGKILL, while taking step 1 of 2; the kernel's OOM ...",
    ],
    "NVIDIA H200": [" out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocat..."],
}


def test_a_picture_in_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "none").write_text("")
    path = tmp_path / "none" / "ladder.png"
    with pytest.raises(UserError) as raised:
        draw_ladder(on_cpu(), path)
    assert str(raised.value) == (
        "error[not-writable]: a file can't be written\n"
        f"  found: File exists: {path}\n"
        "  why:   the folder or file is not writable\n"
        "  fix:   name a writable folder: --plot FILE"
    )
