"""DeepSpeed's hostfile, and the nodes and slots that --include and --exclude name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.setting import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
"""The launcher's own (deepspeed/launcher/runner.py, _parse_hostfile)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostfile:
    """The nodes that a hostfile lists."""

    name: str
    slots: Mapping[str, int]
    """The GPUs of each node; empty if the launcher refuses the file."""
    refused: Refusal | None = None
    """The first thing that the launcher refuses; None if it reads the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the launcher refuses a hostfile."""

    found: str
    """The line as it is written, or that there is none."""
    why: str
    fix: str
    place: Place


def read_hostfile(text: str, *, name: str) -> Hostfile | None:
    """Return the nodes of a hostfile, or what the launcher refuses; None if a shell has to fill it in."""
    slots: dict[str, int] = {}
    refused: Refusal | None = None
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        if "$" in line or "{{" in line:
            return None
        match = _LINE.match(line)
        if match is not None and match[1] not in slots:
            slots[match[1]] = int(match[2][:9])  # Python refuses numbers of thousands of digits
        elif refused is None:
            place = Place(file=name, line=number)
            refused = _bad_line(line, place) if match is None else _second_line(match[1], line, place)
    if refused is None and not slots:
        refused = Refusal(
            found=f"no nodes in {name}",
            why="DeepSpeed's launcher ends at a hostfile without a node",
            fix='write a line "NODE slots=GPUS" for each node, or leave --hostfile out on one machine',
            place=Place(file=name, line=1),
        )
    return Hostfile(name=name, slots={} if refused else slots, refused=refused)


def _bad_line(line: str, place: Place) -> Refusal:
    """Return the refusal of a line that is not "NODE slots=GPUS"."""
    node, _, rest = line.replace(":", " ", 1).partition(" ")
    number = next(iter(re.findall(r"\d+", rest)), None)
    return Refusal(
        found=line,
        why='DeepSpeed\'s launcher only reads lines of the form "NODE slots=GPUS", and ends at any other',
        fix=f"write {node} slots={number or 'GPUS'}",
        place=place,
    )


def _second_line(node: str, line: str, place: Place) -> Refusal:
    """Return the refusal of a node's second line."""
    return Refusal(
        found=f"{line}, the second line of {node}",
        why="DeepSpeed's launcher accepts a node only once",
        fix=f"keep one line for {node}, with the number of its GPUs as slots",
        place=place,
    )


def named_slots(filter_: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each node of an --include or --exclude, and the slots that are named; none for all of them.

    Nothing is yielded for one that the launcher can't read.
    """
    found = []
    for node in filter_.split("@"):
        name, colon, listed = node.partition(":")
        numbers = listed.split(",") if colon else []
        if not all(number.strip().isdecimal() for number in numbers):
            return
        found.append((name, tuple(map(int, numbers))))
    yield from found
