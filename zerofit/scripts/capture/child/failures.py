"""Why a script did not come to its training: the kinds of failure, and how each is told from the others."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from zerofit.scripts.capture.child.exit import leave_failed, place_in_script
from zerofit.scripts.capture.child.meta_weights import chain_of

if TYPE_CHECKING:
    from zerofit.scripts.capture.child.observations import Seen

_MET_META = "_zerofit_met_meta"
_META = (
    "meta tensor",
    "meta device",
    "device meta",
    "device='meta'",
    "'meta' device",
    "meta is not on the expected",
    "meta and cpu",
    "meta, cpu",
    "cpu, meta",
    "device type of meta",
    "meta backend",
    "'aten::_local_scalar_dense'",
    "aten::equal",
)
"""What PyTorch says where the value of a tensor without values is needed, or two devices meet."""


def leave_for(seen: Seen, error: BaseException | None) -> NoReturn:
    """End a capture whose script ended, or raised, before training.

    Args:
        seen: the capture.
        error: what the script raised; None where it came to its end.
    """
    if seen.on_failure is not None:
        finish, seen.on_failure = seen.on_failure, None
        try:
            finish(error)
        except Exception as another:
            error = another
    if error is None:
        leave_failed(seen, "exited", f"the script ended {_how_far(seen)}")
    where = place_in_script(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename and not where:
        where = f"{os.path.basename(error.filename)}:{error.lineno}"
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        said = f"exit code {code}" if isinstance(code, int) else f'"{_first_line(str(code))}"'
        leave_failed(seen, "exited", f"the script called sys.exit ({said}) {_how_far(seen)}", where=where)
    said = f"{type(error).__name__}: {_first_line(str(error))}".rstrip(": ")
    kind = "needs-values" if needs_values(seen, error) else "raised"
    leave_failed(seen, kind, said, where=where, error=error)


def mark_met_meta(error: BaseException) -> None:
    """Note that an error came out of the call of a model without weights."""
    with contextlib.suppress(AttributeError):  # a class of errors may allow no more attributes
        setattr(error, _MET_META, True)


def needs_values(seen: Seen, error: BaseException) -> bool:
    """Return whether something failed only because weights are not loaded."""
    if seen.spec.weights != "meta":
        return False
    return any(
        getattr(one, _MET_META, False) or any(part in str(one).lower() for part in _META)
        for one in chain_of(error)
    )


def _how_far(seen: Seen) -> str:
    """Return in words how near to training the script came."""
    if seen.trainers:
        return "before its Trainer trained"
    if seen.models:
        return "before the model it prepared was trained"
    if seen.accelerators:
        return "before its Accelerator prepared a model"
    used = [name for name in ("accelerate", "transformers") if name in sys.modules]
    if used:
        return f"without making an Accelerator or a Trainer, though it imports {' and '.join(used)}"
    return "without importing accelerate or transformers"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
