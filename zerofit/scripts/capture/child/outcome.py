"""The end of a capture: writes a file for the parent, and exits without returning to the script.

capture.json contains what the script trains, failure.json why it did not reach its training.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerofit.core.atomic_file import write_whole
from zerofit.core.capture import capture_to_json
from zerofit.scripts.capture.child.meta_weights import chain_of, unloaded_bytes

if TYPE_CHECKING:
    from zerofit.scripts.capture.child.observations import Live, Observations

_ZEROFIT = f"{Path(__file__).parents[3]}{os.sep}"
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
_MET_META = "_zerofit_met_meta"
_META_MESSAGES = (
    "meta tensor",
    "meta device",
    "device meta",
    "device='meta'",
    "'meta' device",
    "meta backend",
    "meta is not on the expected",
    "meta and cpu",
    "meta, cpu",
    "cpu, meta",
    "device type of meta",
    "'aten::_local_scalar_dense'",
    "aten::equal",
)
"""PyTorch's errors when a meta tensor's value is needed, or two devices are mixed."""


def exit_captured(seen: Observations, live: Live) -> NoReturn:
    """Write capture.json, serve the parent's trace requests if any, and exit."""
    write_whole(seen.folder / "capture.json", capture_to_json(live.capture), mode=0o600)
    if seen.pipes and all(pipe.is_own() for pipe in seen.pipes):
        from zerofit.scripts.capture.child.serve import serve

        _flush()
        reader, writer = (pipe.number for pipe in seen.pipes)
        with os.fdopen(reader, encoding="utf-8") as asked, os.fdopen(writer, "w", encoding="utf-8") as told:
            serve(live, asked, told)
    _exit_at_once()


_SCRIPT_ERRORS = (ImportError, NameError, SyntaxError, FileNotFoundError)
"""Errors that also occur with weights."""


def exit_failed(
    seen: Observations,
    kind: str,
    message: str,
    *,
    where: str = "",
    error: BaseException | None = None,
    path: str = "",
) -> NoReturn:
    """Write failure.json and exit.

    Args:
        seen: the capture.
        kind: "exited", "raised", "stdin", "needs-values", "confined" or "unsupported".
        message: what happened.
        where: file and line of the script.
        error: the exception; the size of unloaded weights is reported with it.
        path: for "confined", the path that the kernel kept it from writing.
    """
    document: dict[str, Any] = {"kind": kind, "message": " ".join(message.split()), "where": where}
    document |= {"path": path} if path else {}
    if seen.spec.weights == "meta" and isinstance(error, Exception) and not isinstance(error, _SCRIPT_ERRORS):
        document["weight_bytes"] = unloaded_bytes(error)
    write_whole(seen.folder / "failure.json", json.dumps(document), mode=0o600)
    _exit_at_once()


def exit_untrained(seen: Observations, error: BaseException | None) -> NoReturn:
    """End a capture whose script ended before training, or raised an error."""
    if seen.on_failure is not None:
        finish, seen.on_failure = seen.on_failure, None
        try:
            finish(error)
        except Exception as another:
            error = another
    if error is None:
        exit_failed(seen, "exited", f"the script ended {_progress_words(seen)}")
    where = place_in_script(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename and not where:
        where = f"{os.path.basename(error.filename)}:{error.lineno}"
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        said = f"exit code {code}" if isinstance(code, int) else f'"{_first_line(str(code))}"'
        exit_failed(
            seen, "exited", f"the script called sys.exit ({said}) {_progress_words(seen)}", where=where
        )
    said = f"{type(error).__name__}: {_first_line(str(error))}".rstrip(": ")
    if seen.path_denied is not None and (path := seen.path_denied(error)):
        exit_failed(seen, "confined", f"it would write to {path}: {said}", where=where, path=path)
    kind = "needs-values" if needs_values(seen, error) else "raised"
    exit_failed(seen, kind, said, where=where, error=error)


def mark_met_meta(error: BaseException) -> None:
    """Mark an error as raised in the call of a model without weights."""
    with contextlib.suppress(AttributeError):  # a class of errors may not allow attributes
        setattr(error, _MET_META, True)


def needs_values(seen: Observations, error: BaseException) -> bool:
    """Return True if something failed only because weights are not loaded."""
    if seen.spec.weights != "meta":
        return False
    return any(
        getattr(exception, _MET_META, False) or any(part in str(exception).lower() for part in _META_MESSAGES)
        for exception in chain_of(error)
    )


def _progress_words(seen: Observations) -> str:
    """Return how far the script came, as the end of a sentence."""
    if seen.trainers:
        return "before its Trainer started"
    if seen.models:
        return "before the model it prepared was trained"
    if seen.accelerators:
        return "before its Accelerator prepared a model"
    used = [name for name in ("accelerate", "transformers") if name in sys.modules]
    if used:
        return f"without creating an Accelerator or Trainer, though it imports {' and '.join(used)}"
    return "without importing accelerate or transformers"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def place_in_script(frames: types.TracebackType | types.FrameType | None) -> str:
    """Return file and line of the innermost frame in the user's code: "train.py:118"; "" if there is none.

    Args:
        frames: a traceback, or the frame to start from, outwards.
    """
    if frames is None:
        return ""
    if isinstance(frames, types.TracebackType):
        steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(frames)][::-1]
    else:
        steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(frames)]
    return next((f"{os.path.basename(name)}:{line}" for name, line in steps if is_own_code(name)), "")


def is_own_code(filename: str) -> bool:
    """Return True if a source file is the user's: not installed, not Python's, not zerofit's."""
    return not filename.startswith(("<", _ZEROFIT)) and not any(part in filename for part in _INSTALLED)


def _flush() -> None:
    """Flush the script's output; a replaced stream may have no flush()."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _exit_at_once() -> NoReturn:
    """Exit at once: no finally, no exit handlers, no saving of the script's runs."""
    _flush()
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(0)
