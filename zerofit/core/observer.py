"""Observer: receives a verb's messages and progress; silent by default, printed by the command line."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Observer:
    """Receives messages and progress of zerofit's functions and discards them; subclass it to show them."""

    def say(self, sentence: str) -> None:
        """Receive one sentence for the user, such as an assumption of a plan."""

    def show(self, text: str) -> None:
        """Receive a text of several lines, such as a summary of the capture or the table of a plan."""

    def detail(self, text: str) -> None:
        """Receive a text for users who want all details; passed to show() by default."""
        self.show(text)

    def announce(self, title: str) -> None:
        """Receive the title of what may take minutes, where its progress can't be shown."""

    def progress(self, sentence: str) -> None:
        """Receive a sentence on the progress of a run, once a minute."""

    def ask(self, question: str) -> bool:
        """Ask a yes-or-no question and return the answer; False if nobody can answer."""
        return False

    @property
    def width(self) -> int | None:
        """Columns that a table may take; None for unlimited."""
        return None

    def task(
        self, title: str, *, is_announced: bool = False
    ) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context manager around a task; it yields a function that reports progress.

        Args:
            title: what is done.
            is_announced: print the title where progress can't be shown, since the task may take minutes.
        """
        return nullcontext(_ignore)


def _ignore(progress: str) -> None:
    pass


SILENT = Observer()
