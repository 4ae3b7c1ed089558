"""The end of a rank whose script applies its plan itself: its record, and what the other ranks are told."""

from __future__ import annotations

import atexit
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.ranks.meeting import end_when_stuck, tell_ended
from zerofit.training.changes import tell
from zerofit.training.reporting import observe
from zerofit.training.reporting.record import write_record
from zerofit.training.saving import stop_signal
from zerofit.training.step.deepspeed.placeholders import sharded_weight_error
from zerofit.training.step.sharded_tensors import sharded_tensor_error

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from zerofit.training.changes import Changes


@cache
def print_errors_without_traceback() -> None:
    """Print an error of zerofit that the script does not catch as the command line prints it."""
    show = sys.excepthook

    def show_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        errors = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        if all(isinstance(refused, UserError) for refused in errors):
            tell("\n".join(map(str, errors)))
        else:
            show(kind, error, traceback)

    sys.excepthook = show_error


class RankEnd:
    """Writes the record when the script ends.

    Python tells nobody the code of a SystemExit, so that sys.exit() is wrapped; a script's own
    `raise SystemExit(1)` is recorded as 0.

    Args:
        ranks: the folder of the ranks' records.
        rank: this one.
        changes: the changes to record.
    """

    def __init__(self, ranks: Path, rank: int, changes: Changes) -> None:
        self._ranks, self._rank, self._changes = ranks, rank, changes
        self._pid = os.getpid()
        self._exit_code = 0
        self._error: BaseException | None = None
        self._exit, self._show = sys.exit, sys.excepthook
        sys.exit, sys.excepthook = self._note_exit, self._note_error  # type: ignore[assignment]
        atexit.register(self._end)
        end_when_stuck(self._leave)

    def _note_exit(self, code: Any = None) -> None:
        self._exit_code = code if isinstance(code, int) else int(code is not None)
        self._exit(code)

    def _note_error(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
        self._error = error
        self._show(kind, error, traceback)
        if (named := sharded_weight_error(error) or sharded_tensor_error(error)) is not None:
            self._error = named
            tell(str(named))

    def _end(self) -> None:
        if os.getpid() != self._pid:  # a forked child of the script
            return
        if self._exit_code == 0:
            observe.end()
        self._write()
        tell_ended(self._exit_code)

    def _write(self) -> None:
        try:
            write_record(
                self._ranks,
                rank=self._rank,
                exit_code=self._exit_code,
                error=self._error,
                changes=self._changes.lines,
                saved_to=stop_signal.saved_to(),
            )
        except OSError as unwritten:
            tell(f"zerofit: the record of rank {self._rank} can't be written: {unwritten}")

    def _leave(self, stuck: UserError) -> None:
        """End the process from another thread than the script's, which waits for the other ranks."""
        tell(str(stuck))
        self._exit_code, self._error = stuck.exit_code, stuck
        self._write()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(stuck.exit_code)
