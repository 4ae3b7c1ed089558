"""RankRecord: how a rank ended, written by itself into the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.validation import parse_known

_MOST_BYTES = 16 * 1024 * 1024
"""An error's message may be long. ASSUMPTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The end of one rank."""

    rank: int
    exit_code: int
    """The script's exit code; a rank killed by a signal leaves no record."""
    error_type: str | None
    """Class of the exception that ended the script."""
    error_message: str | None
    peak_host_bytes: int
    """Peak resident memory of this process."""
    peak_gpu_allocated_bytes: int | None
    """Peak of live tensors on the GPU; None without one."""
    peak_gpu_reserved_bytes: int | None
    """Peak memory reserved by PyTorch's allocator on the GPU; None without one."""
    changes: tuple[str, ...]
    """Changes to the script's settings, one sentence each."""
    num_scaled_steps: int | None = None
    """Optimizer steps with fp16 loss scaling, including skipped ones; None without loss scaling."""
    num_skipped_steps: int | None = None
    """Steps of these that were skipped because gradients were not finite; None without loss scaling."""
    ended_at: float | None = None
    """When the script ended, in seconds since 1970."""
    saved_to: str | None = None
    """The checkpoint that it saved when told to stop; None if it ran to the end."""
    step_time_s: float | None = None
    """In a trial of `zerofit tune`: median time of an optimizer step after the warm-up."""


def record_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's record."""
    return folder / f"rank{rank}.json"


def read_record(folder: Path, rank: int) -> RankRecord | None:
    """Return a rank's record, or None if it left none."""
    try:
        return parse_known(RankRecord, read_bounded_text(record_file(folder, rank), most_bytes=_MOST_BYTES))
    except (OSError, ValueError):
        return None
