"""Determines from the ranks' ends which one ended the run, the exit code and the cause."""

from __future__ import annotations

import enum
import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.rank_observation import Phase
from zerofit.core.units import GIB, KIB, MIB, format_bytes
from zerofit.launching.failures import GPU_IS_FULL, HOST_IS_FULL, shows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.rank_observation import RankObservation
    from zerofit.core.rank_record import RankRecord

_LOST_PEER_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Gloo",
    "NCCL",
    "TCPStore",
)
"""Messages of errors that a rank raises because another one is gone: never the cause."""
_LOST_PEER = 2
"""From here on a failure is a consequence: the rank lost its peers, or was ended by the launcher."""
EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h, for a run that can be resumed: schedulers restart it."""
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a rank failed, as observed by the launcher."""

    exit_code: int
    """Negative for a signal; 0 for a rank that had ended before others failed."""
    timestamp: int
    """When the launcher noticed it, in whole seconds since 1970."""
    by_launcher: bool | None = None
    """True if the launcher's own signal ended it, False if it ended before; None if unknown."""


class EndKind(enum.StrEnum):
    """Why a run failed."""

    GPU_OUT_OF_MEMORY = "gpu-out-of-memory"
    HOST_OUT_OF_MEMORY = "host-out-of-memory"
    HANG = "hang"
    SCRIPT_ERROR = "script-error"
    REFUSED = "refused"
    """zerofit itself refused inside a rank: a UserError."""
    LOST_NODE = "lost-node"
    """The ranks of this node only lost their peers on another one."""
    SIGNAL = "signal"
    """Someone stopped the run or killed a rank, or a rank crashed."""
    STOPPED = "stopped"
    """The scheduler reclaimed the nodes: the ranks saved a checkpoint together and ended."""
    LAUNCHER = "launcher"
    """The launch failed before the script began."""


GOES_ON_AFTER = (EndKind.STOPPED, EndKind.LOST_NODE)
"""Ends after which the scheduler should restart the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended."""

    exit_code: int
    """zerofit's exit code: the script's own, or 128 + the signal's number."""
    cause: str | None
    """One sentence; None on success."""
    kind: EndKind | None = None
    """None on success."""
    rank: int | None = None
    """The rank that ended the run; None if unknown, or not a single one."""
    phase: Phase | None = None
    """That rank's phase at its end; None if unknown."""
    missing_bytes: int | None = None
    """Out of GPU memory: requested minus free bytes of the failed allocation; None if unknown."""
    available_bytes: int | None = None
    """Out of GPU memory: what torch's tensors could use at most; None if unknown."""
    peak_bytes: int | None = None
    """Out of memory: the rank's allocated (GPU) or resident (host) memory, including the failed allocation. A
    lower bound for the phase; None if unknown."""
    observed: RankObservation | None = None
    """The last observation of that rank; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A run that zerofit ended because it made no progress."""

    rank: int | None
    """The rank that the others wait for; None if all have ended, and only their launcher has not."""
    phase: Phase | None
    """None if the rank has not begun."""
    sentence: str


def judge(
    *,
    launcher_code: int,
    stopped_by: signal.Signals | None,
    failures: Mapping[int, RankFailure],
    records: Mapping[int, RankRecord],
    oom_kills: int | None,
    observations: Mapping[int, RankObservation],
    num_ranks: int,
    host_limit_bytes: int | None = None,
    is_one_of_nodes: bool = False,
    hang: Hang | None = None,
) -> RunEnd:
    """Return the run's exit code and cause.

    Args:
        launcher_code: exit code of the launch command, negative for a signal.
        failures: as observed by the launcher; empty if it was killed before it could report.
        oom_kills: processes killed by the OOM killer meanwhile; None if unknown.
        observations: each rank's last state.
        num_ranks: ranks of this node.
        host_limit_bytes: the cgroup's limit on host memory; None if there is none.
        is_one_of_nodes: True if other nodes take part, whose ranks are not observed here.
    """
    if hang is not None and hang.rank is None and len(records) == num_ranks:
        failures, launcher_code = {}, launcher_code or 1  # it reports no more than the signal that ended it
    elif hang is not None:
        return RunEnd(exit_code=1, cause=hang.sentence, kind=EndKind.HANG, rank=hang.rank, phase=hang.phase)
    if stopped_by is not None:
        cause = f"stopped by {stopped_by.name}"
        return RunEnd(exit_code=128 + stopped_by, cause=cause, kind=EndKind.SIGNAL)
    if launcher_code == 0:
        return _succeeded(records)
    failed = {rank: failure for rank, failure in failures.items() if failure.exit_code} or {
        rank: RankFailure(exit_code=record.exit_code, timestamp=0)
        for rank, record in records.items()
        if record.exit_code
    }
    if not failed and len(records) == num_ranks:  # each recorded success: that counts
        return _succeeded(records)
    if not failed:
        return _launcher_failed(launcher_code, oom_kills, host_limit_bytes, has_begun=bool(observations))

    def cause_first(rank: int) -> tuple[int, float, int]:
        record = records.get(rank)
        return _likely_consequence(failed[rank], record), _ended_at(failed[rank], record), rank

    rank = min(failed, key=cause_first)
    code, record = failed[rank].exit_code, records.get(rank)
    end = _end_of(rank, code, record, observations.get(rank), oom_kills, host_limit_bytes)
    if _likely_consequence(failed[rank], record) < _LOST_PEER:
        return end
    if unrecorded := sorted(rank for rank in failures.keys() - failed.keys() if rank not in records):
        return _left_early(unrecorded[0], end, observations, how=" without a record, as by os._exit(0)")
    left = [ended for ended in records.values() if ended.exit_code == 0]
    if left:
        return _left_early(min(left, key=lambda ended: ended.ended_at or 0).rank, end, observations)
    if is_one_of_nodes:
        cause = f"{end.cause}: the ranks of this node lost their peers, so the cause is on another node"
        return replace(end, cause=cause, kind=EndKind.LOST_NODE)
    return end


def _succeeded(records: Mapping[int, RankRecord]) -> RunEnd:
    saved = next((record.saved_to for record in records.values() if record.saved_to is not None), None)
    if saved is None:
        return RunEnd(exit_code=0, cause=None)
    cause = f"stopped before its end, and saved to {saved}"
    return RunEnd(exit_code=EXIT_STOPPED, cause=cause, kind=EndKind.STOPPED)


def _ended_at(failure: RankFailure, record: RankRecord | None) -> float:
    """Return when a rank failed: as it recorded, else the end of the second in which it was noticed."""
    return record.ended_at if record is not None and record.ended_at else failure.timestamp + 1.0


def _likely_consequence(failure: RankFailure, record: RankRecord | None) -> int:
    """Return how likely a failure is the consequence of another one: 0 is an independent cause."""
    code = failure.exit_code
    if failure.by_launcher or (failure.by_launcher is None and code == -signal.SIGTERM):
        return _LOST_PEER + 1
    text = (record.error_message if record is not None else None) or ""
    if any(message in text for message in _LOST_PEER_MESSAGES) and not shows(GPU_IS_FULL, text):
        return _LOST_PEER
    # NCCL's watchdog aborts a rank whose peer is gone (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
    return 0 if (code < 0 and code != -signal.SIGABRT) or record is not None else 1


def _end_of(
    rank: int,
    code: int,
    record: RankRecord | None,
    observed: RankObservation | None,
    oom_kills: int | None,
    host_limit_bytes: int | None,
) -> RunEnd:
    """Return the end of a run that one rank ended."""
    phase = None if observed is None else observed.phase
    if code < 0:
        is_full = code == -signal.SIGKILL and bool(oom_kills)
        cause = f"rank {rank} was killed by {_signal_name(-code)}"
        if is_full:
            cause = _host_oom_words(f"rank {rank}", observed, host_limit_bytes)
        elif code == -signal.SIGKILL and oom_kills is not None:
            cause += "; the kernel's out-of-memory counter has not moved, so someone else sent it"
        return RunEnd(
            exit_code=128 - code,
            cause=cause,
            kind=EndKind.HOST_OUT_OF_MEMORY if is_full else EndKind.SIGNAL,
            rank=rank,
            phase=phase,
            peak_bytes=observed.host_bytes or None if is_full and observed is not None else None,
            observed=observed,
        )
    kind = _kind_of(record)
    cause, full, peak = f"rank {rank} exited with {code}{_error_words(record)}", FullGpu(), None
    if kind is EndKind.GPU_OUT_OF_MEMORY and record is not None:
        full = full_gpu(record.error_message or "")
        peak = full.peak_bytes or record.peak_gpu_allocated_bytes
        cause = (
            f"rank {rank} ran out of GPU memory{_phase_words(observed)}"
            f"{_size_words(full.missing_bytes, peak)}{_other_users_words(full)}"
        )
    elif kind is EndKind.HOST_OUT_OF_MEMORY and record is not None:
        peak = record.peak_host_bytes
        cause = f"rank {rank} ran out of host memory{_phase_words(observed)}{_size_words(None, peak)}"
    return RunEnd(
        exit_code=code,
        cause=cause,
        kind=kind,
        rank=rank,
        phase=phase,
        missing_bytes=full.missing_bytes,
        available_bytes=full.available_bytes,
        peak_bytes=peak,
        observed=observed,
    )


def _kind_of(record: RankRecord | None) -> EndKind:
    """Return why a rank failed with an exception; the catalog of failures recognizes out of memory."""
    if record is None:
        return EndKind.SCRIPT_ERROR
    if record.error_type == UserError.__name__:
        return EndKind.REFUSED
    text = f"{record.error_type}: {record.error_message or ''}"
    if shows(GPU_IS_FULL, text):
        return EndKind.GPU_OUT_OF_MEMORY
    return EndKind.HOST_OUT_OF_MEMORY if shows(HOST_IS_FULL, text) else EndKind.SCRIPT_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class FullGpu:
    """A failed allocation as torch's message describes it; None for what it does not say."""

    missing_bytes: int | None = None
    """Requested minus free bytes."""
    peak_bytes: int | None = None
    """The total that torch's tensors would have reached."""
    available_bytes: int | None = None
    """What they could use at most, after other processes and CUDA's own memory."""
    allowed_bytes: int | None = None
    """The process's own limit, by torch.cuda.set_per_process_memory_fraction()."""
    others_bytes: int = 0
    """Memory of other processes on the GPU."""


def full_gpu(text: str) -> FullGpu:
    """Parse torch's message on a failed allocation.

    The message is that of c10/cuda/CUDACachingAllocator.cpp: "Tried to allocate 2.00 GiB. GPU 0 has a total
    capacity of 79.10 GiB of which 512.00 MiB is free. Process 7 has 8.00 GiB memory in use. Including
    non-PyTorch memory, this process has 70.59 GiB memory in use. 40.00 GiB allowed; Of the allocated memory
    70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    """

    def sizes(pattern: str) -> list[int]:
        found = re.findall(pattern.replace("SIZE", r"([\d.]+) (bytes|KiB|MiB|GiB)"), text)
        return [round(float(number) * _UNITS[unit]) for number, unit in found]

    def size(pattern: str) -> int | None:
        return next(iter(sizes(pattern)), None)

    asked, free = size("Tried to allocate SIZE"), size("of which SIZE is free")
    allowed, allocated = size("SIZE allowed;"), size("Of the allocated memory SIZE is allocated by PyTorch")
    reserved = (allocated or 0) + (size("SIZE is reserved by PyTorch but unallocated") or 0)
    if allowed is not None and allocated is not None:
        free = min(max(0, allowed - reserved), allowed if free is None else free)
    has_others = "this process has" in text  # in a container, it may be shown as one of them
    return FullGpu(
        missing_bytes=None if asked is None or free is None else max(0, asked - free),
        peak_bytes=None if asked is None or allocated is None else allocated + asked,
        available_bytes=None if free is None or allocated is None else reserved + free,
        allowed_bytes=allowed,
        others_bytes=sum(sizes(r"Process \d+ has SIZE memory in use")) if has_others else 0,
    )


def _other_users_words(full: FullGpu) -> str:
    """Return what limits torch to less than the whole GPU, in words."""
    allowed = full.allowed_bytes
    own = "" if allowed is None else f"; the script allows itself {format_bytes(allowed)}"
    others = full.others_bytes and f"; other processes use {format_bytes(full.others_bytes)} of the GPU"
    return f"{own}{others or ''}"


def _phase_words(observed: RankObservation | None) -> str:
    return "" if observed is None else f", in {describe(observed)}"


def describe(observed: RankObservation) -> str:
    """Return a rank's phase and step in a few words."""
    if observed.phase in (Phase.LOADING, Phase.PREPARING):
        return f"{observed.phase.value}, before the first step"
    if observed.phase is Phase.ENDED:
        return "shutdown"
    return f"{observed.phase.value} of step {observed.step + 1}"


def _size_words(missing: int | None, peak: int | None) -> str:
    words = []
    if missing:
        words.append(f"{format_bytes(missing)} more than free")
    if peak:
        words.append(f"{format_bytes(peak)} in total")
    return f": {', '.join(words)}" if words else ""


def _left_early(
    left: int, end: RunEnd, observations: Mapping[int, RankObservation], *, how: str = ""
) -> RunEnd:
    """Return the end of a run in which one rank finished before the others."""
    observed = observations.get(left)
    after = "" if observed is None else f" after {observed.step} steps"
    return replace(
        end,
        cause=f"rank {left} ended with exit code 0{after}{how}, and rank {end.rank}, still training, lost "
        "its connection to it",
        kind=EndKind.SCRIPT_ERROR,
        rank=left,
        phase=None if observed is None else observed.phase,
    )


def _error_words(record: RankRecord | None) -> str:
    """Return a rank's error in a few words: the summary of zerofit's own errors, the type of others."""
    if record is None or record.error_type in (None, "SystemExit"):
        return ""
    if record.error_type == UserError.__name__ and record.error_message:
        return f": {record.error_message.splitlines()[0]}"
    return f": {record.error_type}"


def _host_oom_words(who: str, observed: RankObservation | None, limit_bytes: int | None) -> str:
    """Return the cause of a kill that the kernel's counter of out-of-memory kills confirms."""
    limit = "" if limit_bytes is None else f"; the limit of its cgroup is {format_bytes(limit_bytes)}"
    return f"{who} ran out of host memory{_phase_words(observed)}, and the kernel killed it{limit}"


def _launcher_failed(
    code: int, oom_kills: int | None, host_limit_bytes: int | None, *, has_begun: bool
) -> RunEnd:
    if code < 0:
        is_full = code == -signal.SIGKILL and bool(oom_kills)
        cause = f"accelerate launch was killed by {_signal_name(-code)}"
        return RunEnd(
            exit_code=128 - code,
            cause=_host_oom_words("accelerate launch", None, host_limit_bytes) if is_full else cause,
            kind=EndKind.HOST_OUT_OF_MEMORY if is_full else EndKind.SIGNAL,
        )
    cause = "accelerate launch failed before it started the script"
    if has_begun:
        cause = "accelerate launch failed during training, without reporting how the ranks ended"
    return RunEnd(exit_code=code, cause=cause, kind=EndKind.LAUNCHER)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
