"""Tags that mark where a thing begins, to the tags that go on inside of it: B-ORG to I-ORG."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerofit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

_BEFORE = re.compile(r"([BIELSU])(?:[-_.:/](.+))?", re.IGNORECASE)
_BEHIND = re.compile(r"(.+)[-_.:/]([BIELSU])", re.IGNORECASE)
"""Begin, inside; end, last, single and unit of IOBES and BILOU: "B-ORG", "b_org", "B", "ORG-B"."""
_ENDS = frozenset("ELSU")


def insides(names: Sequence[str]) -> list[int]:
    """Return, for each tag, the number of the one that continues it: itself, or the inside of a begin.

    Args:
        names: all tags.

    Raises:
        UserError: a begin has no inside, or the tags also mark ends of things.
    """
    numbers = {name: number for number, name in enumerate(names)}
    parts = [_parts(name, numbers) for name in names]
    letters = {letter for letter, _ in parts}
    # S- and U- alone mark things of one word; E-mail alone marks nothing.
    are_singles = letters & {"S", "U"} and all(letter or name == "O" for letter, name in parts)
    are_marks = letters & {"B", "I"} or are_singles
    inside = []
    for number, (letter, continued) in enumerate(parts):
        if letter in _ENDS and are_marks:
            raise UserError(
                "tag-ends-a-thing",
                f"the tag {names[number]} says where a thing ends, which its later tokens would say again",
                found=f"names={list(names)}",
                why="only B-, I- and O tags can be carried on inside a word",
                fix="label first tokens only: pieces=Pieces.IGNORED; or turn the tags into B-, I- and O",
            )
        if letter == "B" and continued not in numbers:
            raise UserError(
                "tag-without-inside",
                f"the tag {names[number]} has no {continued} for the later tokens of its words",
                found=f"names={list(names)}",
                why="a second B- inside a word would begin a second thing",
                fix=f"add {continued} to the labels, or label first tokens only: pieces=Pieces.IGNORED",
            )
        inside.append(numbers[continued] if letter == "B" else number)
    return inside


def _parts(name: str, names: Sequence[str] | dict[str, int]) -> tuple[str, str]:
    """Return which mark a tag has ("" for none), and the same with the mark of an inside.

    A mark behind is one only where a tag ends in the other of B and I too: "vitamin-b" is a word.
    """
    if found := _BEFORE.fullmatch(name):
        letter = found[1]
        return letter.upper(), ("I" if letter.isupper() else "i") + name[1:]
    if found := _BEHIND.fullmatch(name):
        letter = found[2]
        continued = name[:-1] + ("I" if letter.isupper() else "i")
        if any(other.endswith(continued[-2:]) for other in names):
            return letter.upper(), continued
    return "", name
