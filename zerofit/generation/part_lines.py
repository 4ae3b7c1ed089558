"""The lines that runs have written so far: whole ones only, each prompt once, read from disk when asked."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Document = Mapping[str, Any]
"""What is kept of one prompt; its place among all is its "index"."""

_ABSENT = -1
_MOST_OPEN = 128
"""ASSUMPTION: of the 1024 files that a process may usually open (RLIMIT_NOFILE), so many are to spare."""


class PartLines(Mapping[int, dict[str, Any]]):
    """The documents in some JSONL files by the index of their prompt; where two have one, the first counts.

    A line without an end is what a killed run leaves, and is no line; so is one that holds no document, which
    a machine leaves that lost its power. Memory: 8 bytes a prompt.

    Args:
        paths: the files, in their order.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, IO[bytes]] = {}
        self._begins = [0]
        """Of each file, were all written one behind the other; then the place behind the last."""
        self._places = array("q")
        """Of each prompt's line, likewise."""
        self._num_documents = 0
        for path in paths:
            self._begins.append(self._add(path, self._begins[-1]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.line(index))
        return document

    def __iter__(self) -> Iterator[int]:
        return (index for index, place in enumerate(self._places) if place != _ABSENT)

    def __len__(self) -> int:
        return self._num_documents

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self._place(index) != _ABSENT

    def line(self, index: int) -> bytes:
        """Return the line of a prompt, with its end, as it stands in its file."""
        place = self._place(index)
        if place == _ABSENT:
            raise KeyError(index)
        number = bisect_right(self._begins, place) - 1
        file = self._file(number)
        file.seek(place - self._begins[number])
        return file.readline()

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _place(self, index: int) -> int:
        return self._places[index] if 0 <= index < len(self._places) else _ABSENT

    def _file(self, number: int) -> IO[bytes]:
        if number not in self._open:
            if len(self._open) == _MOST_OPEN:
                self.close()
            self._open[number] = self._paths[number].open("rb")
        return self._open[number]

    def _add(self, path: Path, place: int) -> int:
        """Note the lines of a file that begins at a place, and return the place behind it."""
        with path.open("rb") as file:
            for line in file:
                index = _index(line)
                if index is not None and index not in self:
                    self._places.extend([_ABSENT] * (index + 1 - len(self._places)))
                    self._places[index] = place
                    self._num_documents += 1
                place += len(line)
        return place


def _index(line: bytes) -> int | None:
    """Return the index of a line's document; None where it holds none, or has no end."""
    try:
        document = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    index = document.get("index") if isinstance(document, dict) else None
    return index if type(index) is int and index >= 0 else None
