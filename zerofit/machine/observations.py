"""Observations: memory and time of past launches on this machine, one file each in the cache folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.atomic_file import write_whole
from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.cache_folder import cache_folder
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.rank_observation import Phase
from zerofit.core.strategy import Strategy
from zerofit.core.validation import parse_strictly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.capture import Capture
    from zerofit.core.facts import Workload

MOST_OBSERVATIONS = 200
"""Files kept; the oldest are deleted first. ASSUMPTION: more are of no use; about 2 kB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPeak:
    """Peak GPU memory over all ranks at the end of one phase, if that phase raised the run's peak."""

    phase: Phase
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One launched run: predicted and measured values."""

    at: str
    """End of the run: ISO 8601, UTC."""
    script: str
    """The script or module, without its arguments."""
    subject: str
    """Digest of what was trained; empty if the script was not captured."""
    strategy: Strategy
    topology: Topology
    gpus: tuple[str, ...]
    """Names of the GPUs of one node."""
    versions: Versions
    num_steps: int
    """Optimizer steps done."""
    is_out_of_memory: bool
    """True if the run ended out of GPU memory: its peaks are then lower bounds."""
    peaks: tuple[ObservedPeak, ...]
    """Empty without a GPU."""
    host_bytes: int
    """Peak resident memory of any rank."""
    step_time_s: float | None
    """Median time of an optimizer step; None if too few steps ran."""
    predicted_bytes: int | None = None
    """Predicted GPU memory per rank; None without an estimate."""
    predicted_step_time_s: float | None = None
    expandable_segments: bool = False
    """True if PyTorch's allocator used expandable segments, which change the reserved memory."""

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Peak memory reserved by PyTorch's allocator on a GPU; None without one."""
        return max((peak.reserved_bytes for peak in self.peaks), default=None)


def subject_of(capture: Capture | None, workload: Workload) -> str:
    """Return a digest of the training: model, trainable parameters, optimizer, batch shapes.

    Args:
        capture: of the script; without one the digest is empty.
        workload: its sequence length is included.
    """
    if capture is None:
        return ""
    model = capture.model
    told = (
        model.class_path,
        model.facts,
        [(module.name, module.num_trainable_parameters) for module in model.modules],
        (model.weight_dtype, model.adapters, model.is_quantized, model.checkpoints, model.attention),
        [
            (optimizer.class_path, [(group.num_tensors, group.num_parameters) for group in optimizer.groups])
            for optimizer in capture.optimizers
        ],
        [
            (tensor.name, tensor.shape, tensor.dtype)
            for batch in capture.batches[:1]
            for tensor in batch.tensors
        ],
        (capture.route, capture.mixed_precision, capture.micro_batch_size, capture.other_weight_bytes),
        workload,
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def write_observation(observation: Observation, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Store an observation, delete the oldest above MOST_OBSERVATIONS, and return its file.

    Raises:
        OSError: it can't be written.
    """
    folder = _folder(environ)
    name = f"{observation.at.replace(':', '')}-{secrets.token_hex(4)}.json"
    document = {**dataclasses.asdict(observation), "peaks": [_plain(peak) for peak in observation.peaks]}
    write_whole(folder / name, json.dumps(document) + "\n", mode=0o600)
    for old in sorted(folder.glob("*.json"))[:-MOST_OBSERVATIONS]:
        with contextlib.suppress(OSError):  # another run may have removed it
            old.unlink()
    return folder / name


_LARGEST = 16 * 1024 * 1024
"""Bytes of an observation. ASSUMPTION."""


def read_observations(*, environ: Mapping[str, str] = os.environ) -> tuple[Observation, ...]:
    """Return the observations of this machine, newest first; unreadable files are skipped."""
    found = []
    for file in sorted(_folder(environ).glob("*.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError):  # includes pydantic's errors
            found.append(parse_strictly(Observation, read_bounded_text(file, most_bytes=_LARGEST)))
    return tuple(found)


def _plain(peak: ObservedPeak) -> dict[str, object]:
    return {**dataclasses.asdict(peak), "phase": peak.phase.value}


def _folder(environ: Mapping[str, str]) -> Path:
    return cache_folder(environ, Path(os.path.expanduser("~"))) / "observations"
