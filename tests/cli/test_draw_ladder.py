"""The picture of a ladder is drawn, whatever its rungs came to."""

from __future__ import annotations

from pathlib import Path

import pytest
from ladders import on_cpu, on_gpu

from zerofit.cli.output.ladder_plot import ladder_plot
from zerofit.core.errors import UserError
from zerofit.measuring.results import Ladder

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("ladder", [on_cpu(), on_gpu()])
def test_a_ladder_is_drawn(tmp_path: Path, ladder: Ladder) -> None:
    from zerofit.cli.draw_ladder import draw_ladder

    draw_ladder(ladder_plot(ladder), tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_its_folder_is_made(tmp_path: Path) -> None:
    from zerofit.cli.draw_ladder import draw_ladder

    draw_ladder(ladder_plot(on_cpu()), tmp_path / "none" / "ladder.png")
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["ladder.png"]


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    from zerofit.cli.draw_ladder import draw_ladder

    (tmp_path / "none").write_text("")
    path = tmp_path / "none" / "ladder.png"
    with pytest.raises(UserError) as raised:
        draw_ladder(ladder_plot(on_cpu()), path)
    assert str(raised.value) == (
        "error[not-writable]: a file can't be written\n"
        f"  found: File exists: {path}\n"
        "  why:   the folder or the file does not allow it\n"
        "  fix:   name a folder that can be written: --plot FILE"
    )
