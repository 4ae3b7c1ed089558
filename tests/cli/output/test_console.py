"""What the console shows: how much of it, in which colours, and how wide."""

from __future__ import annotations

import click
import pytest

from zerofit.cli.output.console import Console, for_terminal, wants_colour
from zerofit.core.errors import UserError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, None),
        ({"FORCE_COLOR": "1"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"TERM": "xterm"}, None),
    ],
)
def test_who_says_whether_there_are_colours(environ: dict[str, str], expected: bool | None) -> None:
    assert wants_colour(environ) is expected


@pytest.mark.parametrize(
    ("line", "colour"),
    [
        ("your script as it is: 83.2 GiB ±8% of 23.6 GiB, does not fit", "red"),
        ("your script as it is: 22.2 GiB ±8% of 23.6 GiB, fits closely; nothing is changed", "yellow"),
        ("your script as it is: 5.7 GiB ±8% of 23.6 GiB, fits; nothing is changed", "green"),
        ("your script without these files: 83.2 GiB ±8% of 23.6 GiB, does not fit", "red"),
        ("your script without these files: 5.7 GiB ±8% of 23.6 GiB, fits", "green"),
        (">  one GPU  8 x 8  13.4 ±8%  fits", "green"),
        ("Nothing fits. Nearest is one GPU: needs 16.0 GiB of 14.0 GiB on each GPU.", "red"),
    ],
)
def test_colours_say_whether_it_fits(line: str, colour: str) -> None:
    assert for_terminal(line) == click.style(line, fg=colour, bold=True)


def test_severities_are_coloured_and_the_rest_is_not() -> None:
    assert (
        for_terminal("error[a]: b\n  found: c")
        == click.style("error", fg="red", bold=True) + "[a]: b\n  found: c"
    )


@pytest.mark.parametrize(
    ("console", "expected"),
    [
        (Console(), "zerofit: a\nb\nc\n"),
        (Console(shows_details=False), "zerofit: a\nb\n"),
        (Console(is_quiet=True), ""),
    ],
)
def test_how_much_is_told(console: Console, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.say("a")
    console.show("b")
    console.detail("c")
    assert capsys.readouterr().err == expected


def test_a_table_is_as_wide_as_the_terminal_unless_all_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert (Console().width, Console(is_wide=True).width) == (100, None)


def test_sentences_break_at_words_and_commands_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    error = UserError(
        "a-rule",
        "a headline that is longer than forty columns",
        found="--flag with --another-flag, on 8 GPUs of 80 GB",
        why="short",
        fix="leave it out",
        see="https://www.example.org/a-link/longer-than-forty-columns",
    )
    note = "zerofit: assumed: 48 CPU cores on each node, 6 a GPU"
    command = "zerofit: command: accelerate launch --num_processes 8 -m zerofit.training.run"
    table = "   DeepSpeed ZeRO-3, all on cpu  1 x 8  too large, needs 90 GiB"
    assert (
        click.unstyle(for_terminal("\n".join([str(error), note, command, table])))
        == f"""\
error[a-rule]: a headline that is longer
    than forty columns
  found: --flag with --another-flag, on
         8 GPUs of 80 GB
  why:   short
  fix:   leave it out
  see:   https://www.example.org/a-link/longer-than-forty-columns
zerofit: assumed: 48 CPU cores on each
         node, 6 a GPU
{command}
{table}"""
    )
