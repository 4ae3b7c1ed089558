"""How far a generation is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

_LINE_EVERY_S = 30.0
"""ASSUMPTION: often enough to see that it goes on, seldom enough to keep a log short."""
_REFRESHES_PER_S = 2
"""ASSUMPTION: nobody sees more, and each of them goes into the rank's log too."""


class ShownProgress:
    """Shows on standard error how many prompts are done; a context manager that takes the bar away.

    Args:
        is_shown: whether this rank shows it.
        every_s: seconds between lines where there is no bar.
        num_done: prompts that an earlier run has done: they say nothing about the time that the others take.
    """

    def __init__(self, *, is_shown: bool, num_done: int = 0, every_s: float = _LINE_EVERY_S) -> None:
        self._is_shown = is_shown
        self._num_done = num_done
        self._every_s = every_s
        self._bar: Any = None
        self._task: Any = None
        self._said_at = time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Show that so many prompts of all are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif self._is_shown and time.monotonic() - self._said_at >= self._every_s:
            self._said_at = time.monotonic()
            print(f"zerofit: {done} of {total} prompts are done", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._is_shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("prompts"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                refresh_per_second=_REFRESHES_PER_S,
            )
            self._task = self._bar.add_task("generating", total=None, completed=self._num_done)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
