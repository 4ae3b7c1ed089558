"""The list of changes to a script's settings: printed as they happen, and stored in the record."""

from __future__ import annotations

import sys


class Changes:
    """Sentences without duplicates."""

    def __init__(self, *, announce: bool) -> None:
        self._announce = announce
        self._lines: list[str] = []
        self._noted: set[str] = set()

    def add(self, *lines: str, once: str | None = None) -> None:
        """Add changes that are not listed yet.

        Args:
            lines: sentences.
            once: a topic, of which only the first sentence is added.
        """
        for line in lines:
            if (once or line) not in self._noted:
                self._noted.add(once or line)
                self._lines.append(line)
                if self._announce:
                    print(f"zerofit: {line}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning, which is not a change."""
        if self._announce:
            print(text, file=sys.stderr, flush=True)

    @property
    def lines(self) -> tuple[str, ...]:
        """All changes so far, in order."""
        return tuple(self._lines)
