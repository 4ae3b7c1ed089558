"""Tables in a width that is given: which columns go first, and what is cut."""

from __future__ import annotations

import pytest

from zerofit.core.text_table import folded_table_lines, table_lines, wrapped

_ROWS = (("", "name", "number", "reason"), (">", "a long name", "12", "because it is so for long reasons"))


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, ">  a long name  12      because it is so for long reasons"),
        (80, ">  a long name  12      because it is so for long reasons"),
        (50, ">  a long name  because it is so for long reasons"),
        (40, ">  a long name  because it is so for lo…"),
        (22, ">  a lo…  because it …"),
    ],
)
def test_the_least_important_column_goes_before_a_cell_is_cut(width: int | None, expected: str) -> None:
    lines = table_lines(_ROWS, width=width, leaves_out=(2,))
    assert lines[1] == expected
    assert all(len(line) <= (width or 80) for line in lines)


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
