"""Ranks meet before a call that all of them must make: who comes alone learns it, in place of a hang.

The ranks count their calls on the process group's store, with no collective, so that nothing depends on
whether NCCL or gloo can still answer. A small thread in each rank says where its script stands when another
rank waits in vain.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.generation.ranks.meetings import Board, RankMeetings, open_board
from zerofit.generation.script_lines import is_handled_by_main_thread, main_place, script_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["arranged", "end_when_stuck", "is_arranged", "meet", "script_line", "tell_ended", "watch"]

_LOOK_S = 1.0
"""How often a rank looks whether another asks where it stands. ASSUMPTION: next to no work for the store,
and short beside any limit."""

_arranged: ContextVar[bool] = ContextVar("zerofit_generation_arranged", default=False)


def meet(name: str, *, line: str, limit_s: float) -> None:
    """Wait until all ranks have come to this call; return at once without other ranks.

    Ranks are counted on from one call of a name to its next. A call that ends with the error counts as not
    made, so that a script that catches it may try again.

    Args:
        name: the call that all ranks must make, such as "model.generate".
        line: where it stands in the user's script.
        limit_s: how long to wait for the other ranks, from now; 0 does not wait and does not watch.

    Raises:
        UserError: a rank has not come in this time, or has ended its script.
    """
    if limit_s <= 0:
        return
    watch()
    _this_rank.meet(name, line=line, limit_s=limit_s)


def watch() -> None:
    """Let this rank answer where its script stands, from the time on when there is a process group."""
    _this_rank.watch()


def end_when_stuck(leave: Callable[[UserError], None]) -> None:
    """End this process where its script does not end after the error.

    What a script does on its way out, in a `finally` or in the `except` that catches the error, may wait for
    the other ranks again, for ever. It gets as long as the ranks had to come.

    Args:
        leave: prints the error, and ends the process from another thread than the script's.
    """
    _this_rank.leave = leave


def tell_ended(exit_code: int) -> None:
    """Tell the other ranks that this one's script has ended, so that none waits for it in vain."""
    _this_rank.tell_ended(exit_code)


@contextmanager
def arranged() -> Iterator[None]:
    """Leave the calls of model.generate inside alone: the ranks have agreed on them."""
    token = _arranged.set(True)
    try:
        yield
    finally:
        _arranged.reset(token)


def is_arranged() -> bool:
    """Return whether the ranks have agreed on the calls of model.generate that are made now."""
    return _arranged.get()


class _ThisRank:
    """This process's meetings, and the thread that answers for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._board: Board | None = None
        self._meetings: RankMeetings | None = None
        self._num_earlier = 0  # process groups in which the ranks have met: the same number on each rank
        self._raised: UserError | None = None
        self._ends_at = math.inf
        self.leave: Callable[[UserError], None] | None = None

    def meet(self, name: str, *, line: str, limit_s: float) -> None:
        self._raised = None  # the script has caught it, and goes on
        meetings = self._opened()
        if meetings is None:
            return
        try:
            meetings.meet(name, line=line, limit_s=limit_s)
        except UserError as error:
            self._raised, self._ends_at = error, time.monotonic() + limit_s
            raise

    def _opened(self) -> RankMeetings | None:
        """Return the meetings of the process group that there is; None without one, or with one rank."""
        with self._lock:
            number = self._num_earlier + (self._meetings is not None and self._meetings.have_met)
            board = open_board(self._board, number=number)
            if board is not self._board:
                self._num_earlier, self._board = number, board
                self._meetings = RankMeetings(board, place=main_place) if board is not None else None
            return self._meetings

    def watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="zerofit-meetings", daemon=True)
            self._thread.start()
            # Not left to the interpreter's end: a thread that is in torch's C++ code then aborts the process.
            atexit.register(self._end_thread)

    def tell_ended(self, exit_code: int) -> None:
        with contextlib.suppress(RuntimeError):  # every error of torch's stores: the others have gone already
            meetings = self._opened() if self._thread is not None else None
            if meetings is not None:
                meetings.tell_ended(exit_code)

    def _look(self) -> None:
        has_store = True
        while not self._stop.wait(_LOOK_S):
            self._end_if_stuck()
            try:
                meetings = self._opened() if has_store else None
                if meetings is not None:
                    meetings.answer()
            except RuntimeError:  # it has gone, with rank 0 or with the launcher
                has_store = False

    def _end_if_stuck(self) -> None:
        error = self._raised
        if error is None or self.leave is None or time.monotonic() < self._ends_at:
            return
        if is_handled_by_main_thread(error):
            self.leave(error)

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=_LOOK_S)


_this_rank = _ThisRank()
