"""Counts the processes that the kernel has killed for want of host memory."""

from __future__ import annotations

from pathlib import Path


def count_oom_kills(*, root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed since it started; None where it does not say.

    The count of the whole machine, as a container's own kills count there too (proc_vmstat, `oom_kill`).

    Args:
        root: the file system to read.
    """
    try:
        lines = (root / "proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counts = dict(line.split() for line in lines)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None
