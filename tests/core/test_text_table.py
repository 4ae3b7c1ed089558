"""Tables in a width that is given: which columns go first, and what is cut."""

from __future__ import annotations

import pytest

from zerofit.core.text_table import folded_table_lines, table_lines, wrapped

_ROWS = (("", "name", "number", "reason"), (">", "a long name", "12", "because it is so for long reasons"))


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, [">  a long name  12      because it is so for long reasons"]),
        (80, [">  a long name  12      because it is so for long reasons"]),
        (50, [">  a long name  because it is so for long reasons"]),
        (40, [">  a long name  because it is so for", "                long reasons"]),
        (
            22,
            [
                ">  a long    because",
                "   name      it is so",
                "             for long",
                "             reasons",
            ],
        ),
    ],
)
def test_the_least_important_column_goes_before_a_cell_is_wrapped(
    width: int | None, expected: list[str]
) -> None:
    lines = table_lines(_ROWS, width=width, leaves_out=(2,))
    assert lines[-len(expected) :] == expected
    assert all(len(line) <= (width or 80) for line in lines)


@pytest.mark.parametrize(
    "reason",
    [
        "needs 133.7 GiB of 7.6 GiB of host memory on each node",
        "without it: needs at least 23.9 GiB of 22.5 GiB on each GPU",
        "with 64: 0.4 s less time, within the estimate's error, and more complex",
        "(likely) set in /srv/configs/deepspeed/zero3-offload-optimizer-and-parameters.json:17",
        "3.2 times as long; nothing fits without offload unless the training changes",
    ],
)
@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_every_word_of_a_reason_is_printed_at_any_width(reason: str, width: int) -> None:
    rows = (("strategy", "verdict"), ("ZeRO-3, optimizer on cpu, weights on cpu, checkpointing", reason))
    lines = table_lines(rows, width=width)
    printed = "".join("".join(lines).split())
    assert all(len(line) <= width for line in lines)
    assert sorted(printed) == sorted("".join("".join(map("".join, rows)).split()))


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, ["error   rule-id-of-a-rule  a long summary of what it forbids, and of why", "advice  short"]),
        (
            68,
            [
                "error   rule-id-of-a-rule  a long summary of what it forbids, and of",
                "                           why",
                "advice  short",
            ],
        ),
        (
            40,
            [
                "error   rule-id-of-a-rule",
                "        a long summary of what it",
                "        forbids, and of why",
                "advice  short",
            ],
        ),
    ],
)
def test_a_long_last_cell_is_wrapped_beside_or_below(width: int | None, expected: list[str]) -> None:
    summary = "a long summary of what it forbids, and of why"
    rows = [("error", "rule-id-of-a-rule", summary), ("advice", "short", "")]
    assert folded_table_lines(rows, width=width) == expected


def test_a_line_that_is_too_long_hangs_and_a_command_stays_whole() -> None:
    lines = wrapped(["  one two three four", "$ zerofit plan train.py"], 12, whole="$ ")
    assert list(lines) == ["  one two", "      three", "      four", "$ zerofit plan train.py"]
