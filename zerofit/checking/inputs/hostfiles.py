"""DeepSpeed's hostfile, and the nodes and slots that --include and --exclude name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
"""The launcher's own (deepspeed/launcher/runner.py, _parse_hostfile)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostfile:
    """The nodes that a hostfile lists."""

    name: str
    slots: Mapping[str, int]
    """The GPUs of each node."""


def read_hostfile(text: str, *, name: str) -> Hostfile | None:
    """Return the nodes of a hostfile; None if the launcher refuses it, or a shell has to fill it in."""
    slots: dict[str, int] = {}
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None or match[1] in slots or "$" in line:
            return None
        slots[match[1]] = int(match[2])
    return Hostfile(name=name, slots=slots) if slots else None


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
