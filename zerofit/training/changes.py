"""The list of changes to a script's settings: printed as they happen, and stored in the record."""

from __future__ import annotations

import sys


class Changes:
    """Sentences, without duplicates."""

    def __init__(self, *, announce: bool) -> None:
        self._announce = announce
        self._lines: list[str] = []
        self._noted: set[str] = set()

    def add(self, line: str, *, once: str | None = None) -> None:
        """Add a change, unless already listed.

        Args:
            line: the sentence.
            once: a topic, if later sentences on the same topic add nothing.
        """
        if (once or line) not in self._noted:
            self._noted.add(once or line)
            self._lines.append(line)
            if self._announce:
                print(f"zerofit: {line}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning once, which is not a change."""
        if self._announce:
            print(text, file=sys.stderr, flush=True)

    @property
    def lines(self) -> tuple[str, ...]:
        """All changes so far, in order."""
        return tuple(self._lines)
