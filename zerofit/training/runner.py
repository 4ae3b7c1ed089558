"""Runs the user's script in a rank, with the plan applied: python -m zerofit.training.runner PLAN TARGET...

TARGET is a script or `-m module`, followed by its arguments. The plan file is in the run folder, where this
rank's log and record are written, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.plan import plan_from_json
from zerofit.machine.stopping import end_with_agent
from zerofit.ranks.meeting import end_when_stuck, tell_ended
from zerofit.scripts.on_import import when_imported
from zerofit.scripts.run_target import code_of, run_target, script_frames
from zerofit.training import trial
from zerofit.training.changes import Changes, tell
from zerofit.training.hooks import install
from zerofit.training.reporting import guard, observe
from zerofit.training.reporting.record import write_record
from zerofit.training.reporting.tee import tee_output
from zerofit.training.saving import stop_signal
from zerofit.training.step.deepspeed.placeholders import sharded_weight_error
from zerofit.training.step.sharded_tensors import sharded_tensor_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_NOISY = "bitsandbytes.backends.cpu.ops"
"""Warns "Failed to load CPU gemm_4bit" when bitsandbytes is imported on a CPU with AVX512.

peft and accelerate import it for runs that don't use it (bitsandbytes 0.50).
"""


def main(arguments: Sequence[str]) -> int:
    """Run the target and return the process's exit code."""
    end_with_agent()
    last_exit = LastExit()
    logging.getLogger(_NOISY).setLevel(logging.ERROR)
    plan_file, *target = arguments
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(plan_file).parent
    copier = tee_output(folder / "logs" / f"rank{rank}.log")
    last_exit.at_end = lambda: guard.keep(copier, rank)
    changes = Changes(announce=rank == 0)

    def end(exit_code: int, error: BaseException | None) -> None:
        last_exit.exit_code = exit_code  # before the record: errors in it must not change how the rank ended
        try:
            write_record(
                folder / "ranks",
                rank=rank,
                exit_code=exit_code,
                error=error,
                changes=changes.lines,
                saved_to=stop_signal.saved_to(),
                step_time_s=trial.step_time_s(),
            )
        except OSError as unwritten:
            tell(f"zerofit: the record of rank {rank} can't be written: {unwritten}")

    def leave(stuck: UserError) -> None:
        tell(str(stuck))
        end(stuck.exit_code, stuck)
        last_exit.leave()

    def end_trial() -> None:
        observe.end()
        end(0, None)
        tell_ended(0)
        last_exit.leave()

    end_when_stuck(leave)
    error: BaseException | None = None
    exit_code = 0
    try:
        plan = plan_from_json(Path(plan_file).read_text(encoding="utf-8"), name=plan_file)
        if plan.saves_when_told:
            stop_signal.start(folder.absolute())
        # From here on signals may come.
        observe.start(folder / "ranks", rank, on_cpu=plan.topology.on_cpu)
        install(plan, changes, run_folder=folder.absolute())
        # Not earlier: a script that only forks, before it imports torch, has one thread.
        when_imported("torch.autograd", lambda _: guard.start(copier, rank))
        if plan.trial is not None:
            trial.start(plan.trial, end_trial)
        run_target(target)
    except SystemExit as stop:
        exit_code = code_of(stop)
        error = (_memory_error_of(stop) or stop) if exit_code else None
    except UserError as refused:
        exit_code, error = refused.exit_code, refused
        tell(str(refused))
    except KeyboardInterrupt as interrupt:
        exit_code, error = 130, interrupt
    except BaseException as failure:
        exit_code, error = 1, failure
        failure = failure.with_traceback(script_frames(failure.__traceback__, caller=__file__))
        exit_code = _show(failure)
        if (named := sharded_weight_error(failure) or sharded_tensor_error(failure)) is not None:
            error = named
            tell(str(named))
    if (
        last_exit.is_forked_child()
    ):  # its end is none of this rank's, whose record and peers must not hear of it
        last_exit.exit_code = exit_code
        return exit_code
    if exit_code == 0:
        observe.end()
    end(exit_code, error)
    tell_ended(exit_code)
    return exit_code


def _show(failure: BaseException) -> int:
    """Show a script's exception by its own hook, and return the process's exit code, as Python does."""
    try:
        sys.excepthook(type(failure), failure, failure.__traceback__)
    except SystemExit as stop:
        return code_of(stop)
    except BaseException as broken:
        with contextlib.suppress(Exception):
            print("Error in sys.excepthook:", file=sys.stderr)
            sys.__excepthook__(type(broken), broken, broken.__traceback__)
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(type(failure), failure, failure.__traceback__)
    return 1


def _memory_error_of(stop: SystemExit) -> BaseException | None:
    """Return the out-of-memory error that a script answered with sys.exit(); None if there was none."""
    met = stop.__context__
    return met if isinstance(met, MemoryError) or type(met).__name__ == "OutOfMemoryError" else None


class LastExit:
    """Exits the process once every exit handler registered after this one has run.

    Python runs them in reverse order: created before the script starts, this comes after all of the script's.
    Handlers of modules loaded even earlier (such as sitecustomize) do not run. A child that the script has
    forked and that leaves through sys.exit() ends here too: Python would go on to delete its copies of
    process groups, whose threads exist in the rank alone, and wait for them forever.
    """

    exit_code = 1
    """Exit code of the process; a failure until the script's own is known."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.at_end: Callable[[], None] = lambda: None
        """Called before the last flush."""
        atexit.register(self.leave)

    def is_forked_child(self) -> bool:
        """Return True in a child that the script has forked."""
        return os.getpid() != self._pid

    def leave(self) -> None:
        """End the process now, after flushing its output."""
        with contextlib.suppress(Exception):  # whatever it is, the process has to end
            self.at_end()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # buffered output of C libraries
        os._exit(self.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
