"""README's picture shows the plan of its first command, and its alternative text says the same."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from commands import ROOT

from tools.write_readme_picture import PICTURE, Bar, alternative, first_command, picture, rendered

_README = (ROOT / "README.md").read_text("utf-8")
_DRAWN = (ROOT / PICTURE).read_text("utf-8")
_WORDS = [element.text or "" for element in ElementTree.fromstring(_DRAWN).iter() if element.text]
_NUMBER = re.compile(r"\d[\d.]* (?:GiB|m?s) ±\d+%")


def test_the_picture_has_the_figures_of_the_first_answer() -> None:
    answer = _README.partition("your script as it is: ")[2].partition("\n\n")[0]
    figures = _NUMBER.findall(answer)
    assert len(figures) == 3
    assert [figure for figure in figures if figure not in _WORDS] == []
    assert f"the card: {answer.partition(' of ')[2].partition(',')[0]}" in _WORDS


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_alternative_text_has_each_figure_of_the_picture(page: str) -> None:
    (text,) = re.findall(rf"!\[(.*?)\]\((?:docs/)?{PICTURE.name}\)", (ROOT / page).read_text("utf-8"))
    shown = [word for word in _WORDS if _NUMBER.fullmatch(word)]
    assert len(shown) > 4
    assert [figure for figure in shown if figure not in text] == []


def test_the_first_command_is_read_as_it_stands() -> None:
    words = first_command(_README)
    assert words[:3] == ["--gpus", "1xRTX4090", "examples/train_accelerate.py"]
    assert words[-2:] == ["--per-device-train-batch-size", "128"]


def test_what_does_not_fit_has_no_time_and_bars_are_to_scale() -> None:
    large = Bar(name="as it is", note="batch 8", gib=40, memory="40", seconds=0, time="", is_chosen=False)
    chosen = Bar(name="a <b>", note="", gib=20, memory="20", seconds=2, time="2 s", is_chosen=True)
    drawn = picture((large, chosen), card_gib=24, title="t")
    root = ElementTree.fromstring(drawn)
    widths = [float(box.get("width", 0)) for box in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[0] == 2 * widths[1]
    assert "does not fit" in drawn
    assert alternative((large, chosen), card_gib=24) == (
        "Memory and step time on a card of 24.0 GiB: as it is 40, does not fit; a <b> 20, 2 s (chosen)"
    )


@pytest.mark.slow
def test_the_picture_is_what_the_plan_says_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    drawn, text = rendered(_README)
    assert drawn == _DRAWN, "python -m tools.write_readme_picture draws it anew"
    assert f"![{text}]({PICTURE})" in _README
