"""The list of what zerofit changed in a script's settings: printed as it happens, kept for the record."""

from __future__ import annotations

import sys


class Changes:
    """Sentences, each once."""

    def __init__(self, *, announce: bool) -> None:
        self._announce = announce
        self._lines: list[str] = []
        self._noted: set[str] = set()

    def add(self, line: str, *, once: str | None = None) -> None:
        """Note one change, unless it was noted before.

        Args:
            line: the sentence.
            once: what it is about, where later sentences about the same say no more than the first.
        """
        if (once or line) not in self._noted:
            self._noted.add(once or line)
            self._lines.append(line)
            if self._announce:
                print(f"zerofit: {line}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print what is no change, and is to be seen once all the same."""
        if self._announce:
            print(text, file=sys.stderr, flush=True)

    @property
    def lines(self) -> tuple[str, ...]:
        """All changes so far, in order."""
        return tuple(self._lines)
