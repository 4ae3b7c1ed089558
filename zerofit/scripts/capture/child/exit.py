"""How a capture ends: a file for the parent, and the process is gone before the script notices."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import traceback
import types
from typing import TYPE_CHECKING, Any, NoReturn

from zerofit.core.capture import capture_to_json
from zerofit.scripts.capture.child.meta_weights import unloaded_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.scripts.capture.child.observations import Live, Seen


def leave_captured(seen: Seen, live: Live) -> NoReturn:
    """Write capture.json, answer the parent's requests for traces where it has any, and end."""
    _write(seen.folder / "capture.json", capture_to_json(live.capture))
    if seen.spec.serve is not None:
        from zerofit.scripts.capture.child.serve import serve

        _flush()
        reader, writer = seen.spec.serve
        with os.fdopen(reader, encoding="utf-8") as asked, os.fdopen(writer, "w", encoding="utf-8") as told:
            serve(live, live.capture, asked, told)
    _leave()


def leave_failed(
    seen: Seen,
    kind: str,
    message: str,
    *,
    where: str = "",
    error: BaseException | None = None,
) -> NoReturn:
    """Write failure.json and end.

    Args:
        seen: the capture.
        kind: "exited", "raised", "stdin", "needs-values" or "unsupported".
        message: what happened, in one line.
        where: file and line of the script.
        error: what was raised; "needs-values" tells by it how much the weights take.
    """
    detail = "".join(traceback.format_exception(error)) if error is not None else ""
    document: dict[str, Any] = {
        "kind": kind,
        "message": " ".join(message.split()),
        "where": where,
        "detail": detail,
    }
    if kind == "needs-values" and error is not None:
        document["weight_bytes"] = unloaded_bytes(error)
    _write(seen.folder / "failure.json", json.dumps(document, indent=1) + "\n")
    _leave()


def place_in_script(frames: types.TracebackType | types.FrameType | None) -> str:
    """Return file and line of the innermost frame that is code of the user's: "train.py:118"; "" without one.

    Args:
        frames: a traceback, or the frame to look from outwards.
    """
    if frames is None:
        return ""
    if isinstance(frames, types.TracebackType):
        steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(frames)][::-1]
    else:
        steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(frames)]
    return next((f"{os.path.basename(name)}:{line}" for name, line in steps if is_own_code(name)), "")


_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))


def is_own_code(filename: str) -> bool:
    """Return whether a file of code is the user's: neither installed, nor Python's, nor zerofit's."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if filename.startswith(("<", package + os.sep)):
        return False
    return not any(part in filename for part in _INSTALLED)


def _write(path: Path, text: str) -> None:
    """Write a file whole: the parent sees all of it or nothing."""
    unfinished = path.with_suffix(".tmp")
    unfinished.touch(mode=0o600)
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _flush() -> None:
    """Write out what the script printed; what it put in a stream's place may know of no flush()."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _leave() -> NoReturn:
    """End at once: no finally, no exit handler, no saving of the script's runs."""
    _flush()
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(0)
