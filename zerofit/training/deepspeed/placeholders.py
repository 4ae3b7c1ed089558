"""Names ZeRO-3's placeholders as the cause of a script's error: torch's message blames their shapes."""

from __future__ import annotations

from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from types import FrameType

_KINDS = (RuntimeError, IndexError, ValueError, ZeroDivisionError)


def sharded_weight_error(failure: BaseException) -> UserError | None:
    """Return the error for a failure in code that works with a weight that ZeRO-3 holds in shards.

    Returns:
        None if no such weight is among the variables of the failing code.
    """
    if not isinstance(failure, _KINDS):
        return None
    frames = [frame for frame, _ in walk_tb(failure.__traceback__)]
    for frame in reversed(frames):
        name = next((name for name, value in frame.f_locals.items() if _is_placeholder(value)), None)
        if name is not None:
            return _sharded(name, failure, _script_frame(frames))
    return None


def _is_placeholder(value: Any) -> bool:
    status = getattr(value, "ds_status", None)
    return status is not None and getattr(status, "name", "") != "AVAILABLE" and value.numel() == 0


def _script_frame(frames: list[FrameType]) -> FrameType:
    own = [frame for frame in frames if "/site-packages/" not in frame.f_code.co_filename]
    return (own or frames)[-1]


def _sharded(name: str, failure: BaseException, frame: FrameType) -> UserError:
    return UserError(
        "weight-sharded-by-zero3",
        "the script works with a weight that ZeRO-3 holds in shards",
        found=f"{name} in {frame.f_code.co_filename}:{frame.f_lineno}: {type(failure).__name__}: "
        f"{str(failure).partition(chr(10))[0]}",
        why="outside of the module's own pass no rank holds the whole weight: its tensor is empty, with "
        "size 0",
        fix="read weights inside deepspeed.zero.GatheredParameters, or train without ZeRO-3: --zero-stage "
        "2, or "
        "--engine native",
        see="https://deepspeed.readthedocs.io/en/latest/zero3.html#gathering-parameters",
        exit_code=1,
    )
