"""Runs the user's script in a rank, with the plan applied: python -m zerofit.runtime.runner PLAN TARGET...

TARGET is a script or `-m module`, then its arguments. The plan file stands in the run folder, where this
rank's log and record go too.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.capture import capture_from_json
from zerofit.errors import UserError
from zerofit.plan import plan_from_json
from zerofit.runtime.apply import install
from zerofit.runtime.changes import Changes
from zerofit.runtime.last_exit import LastExit
from zerofit.runtime.record import write_record
from zerofit.runtime.tee import tee_output

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from zerofit.capture import Capture


def main(arguments: Sequence[str]) -> int:
    """Run the target and return the process's exit code."""
    last_exit = LastExit()
    plan_file, *target = arguments
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(plan_file).parent
    tee_output(folder / "logs" / f"rank{rank}.log")
    changes = Changes(announce=rank == 0)
    error: BaseException | None = None
    exit_code = 0
    try:
        install(
            plan_from_json(Path(plan_file).read_text(encoding="utf-8"), name=plan_file),
            changes,
            capture=_capture_beside(Path(plan_file)),
        )
        _run(target)
    except SystemExit as stop:
        exit_code = _code_of(stop)
        error = stop if exit_code else None
    except UserError as refused:
        exit_code, error = refused.exit_code, refused
        print(refused, file=sys.stderr)
    except KeyboardInterrupt as interrupt:
        exit_code, error = 130, interrupt
    except BaseException as failure:
        exit_code, error = 1, failure
        failure = failure.with_traceback(_script_frames(failure.__traceback__))
        sys.excepthook(type(failure), failure, failure.__traceback__)
    last_exit.exit_code = exit_code  # before the record: no trouble with that may change how the script ended
    try:
        write_record(folder / "ranks", rank=rank, exit_code=exit_code, error=error, changes=changes.lines)
    except OSError as unwritten:
        print(f"zerofit: the record of rank {rank} can't be written: {unwritten}", file=sys.stderr)
    return exit_code


def _capture_beside(plan_file: Path) -> Capture | None:
    """Return what the script was seen to train; None where it was not captured."""
    file = plan_file.with_name("capture.json")
    if not file.exists():
        return None
    return capture_from_json(file.read_text(encoding="utf-8"), name=str(file))


def _run(target: Sequence[str]) -> None:
    if target[0] == "-m":
        sys.argv = list(target[1:])
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(target)
    sys.path[0] = str(Path(target[0]).resolve().parent)  # as `python script.py` has it
    _run_file(str(Path(target[0]).absolute()))


def _run_file(path: str) -> None:
    """Run a script as Python does: runpy.run_path would make __file__ and sys.argv[0] the same text."""
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def _code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)  # as Python itself does with sys.exit("text")
    return 1


def _script_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first frame on: ours and runpy's say nothing to its author."""
    own = (__file__, "<frozen runpy>", runpy.__file__)
    while traceback is not None and traceback.tb_frame.f_code.co_filename.endswith(own):
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
