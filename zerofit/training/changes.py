"""The list of changes to a script's settings: printed as they happen, and stored in the record."""

from __future__ import annotations

import contextlib
import os
import stat
import sys

from zerofit.core.own_file import identity_of

_STDERR = 2


def tell(text: str) -> None:
    """Print a message on standard error, unless the script has closed it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Changes:
    """Sentences without duplicates."""

    def __init__(self, *, announce: bool) -> None:
        self._announce = announce
        self._stderr = identity_of(_STDERR)
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
                self.warn(f"zerofit: {line}")

    def warn(self, text: str) -> None:
        """Print a warning, which is not a change."""
        if self._announce and self._has_stderr():
            print(text, file=sys.stderr, flush=True)

    def _has_stderr(self) -> bool:
        """Return False if the script has closed it, or opened a file in its place."""
        found = identity_of(_STDERR)
        return found is not None and (found == self._stderr or not stat.S_ISREG(os.fstat(_STDERR).st_mode))

    @property
    def lines(self) -> tuple[str, ...]:
        """All changes so far, in order."""
        return tuple(self._lines)
