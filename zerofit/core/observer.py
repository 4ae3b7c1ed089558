"""Observer: what a verb tells while it works; silent by itself, on a terminal for the command line."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Observer:
    """Is told what a verb of zerofit does meanwhile. This one stays silent; subclass it to listen."""

    def say(self, sentence: str) -> None:
        """Take one sentence for the user, such as an assumption of a plan."""

    def show(self, text: str) -> None:
        """Take a text of several lines, such as what a script trains or the table of a plan."""

    def detail(self, text: str) -> None:
        """Take a text that only a user who wants all of it reads; shown like any other if not overridden."""
        self.show(text)

    def progress(self, sentence: str) -> None:
        """Take a sentence on how far a run is, once a minute."""

    def ask(self, question: str) -> bool:
        """Return what the user answers to a yes-or-no question; False where nobody is there to ask."""
        return False

    @property
    def width(self) -> int | None:
        """Columns that a table may take; None for any number."""
        return None

    def task(
        self, title: str, *, is_announced: bool = False
    ) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context for as long as a task takes; what it yields takes a few words on the progress.

        Args:
            title: what is done.
            is_announced: whether to say so where no progress can be shown, as the task may take minutes.
        """
        return nullcontext(_ignore)


def _ignore(progress: str) -> None:
    pass


SILENT = Observer()
