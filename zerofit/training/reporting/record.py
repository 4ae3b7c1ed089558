"""The record that a rank writes when it ends: its exit, its error, its peaks."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from zerofit.core.atomic_file import write_whole
from zerofit.core.errors import message_of
from zerofit.core.rank_record import RankRecord, record_file
from zerofit.core.secrets import masked_text
from zerofit.machine.this_node import process_bytes
from zerofit.training.step.skipped_steps import of_this_process

if TYPE_CHECKING:
    from pathlib import Path

MESSAGE_CHARACTERS = 2000
"""Maximum length of an error's text: some contain whole tensors. ASSUMPTION: the start matters."""


def write_record(
    folder: Path,
    *,
    rank: int,
    exit_code: int,
    error: BaseException | None,
    changes: tuple[str, ...],
    saved_to: str | None = None,
    step_time_s: float | None = None,
) -> None:
    """Write this rank's record atomically."""
    allocated, reserved = gpu_peaks()
    steps = of_this_process()
    is_scaled = steps.num_steps > 0
    record = RankRecord(
        rank=rank,
        exit_code=exit_code,
        error_type=type(error).__name__ if error is not None else None,
        error_message=masked_text(message_of(error), most=MESSAGE_CHARACTERS) if error is not None else None,
        peak_host_bytes=process_bytes("VmHWM"),
        peak_gpu_allocated_bytes=allocated,
        peak_gpu_reserved_bytes=reserved,
        changes=changes,
        num_scaled_steps=steps.num_steps if is_scaled else None,
        num_skipped_steps=steps.num_skipped if is_scaled else None,
        ended_at=time.time(),
        saved_to=saved_to,
        step_time_s=step_time_s,
    )
    text = json.dumps(asdict(record), indent=2) + "\n"
    write_whole(record_file(folder, rank), text, mode=0o600)  # an error may contain values of arguments


def gpu_peaks() -> tuple[int | None, int | None]:
    """Return the maximum bytes that torch has allocated and reserved on this rank's GPU; None without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
