"""Memory and CPU limits of this process's cgroups, v1 and v2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_KILLS = {1: "memory.oom_control", 2: "memory.events"}
"""Files with the count of killed processes, by cgroup version."""
_UNLIMITED = 1 << 62
"""Limits of cgroup v1 from here on are none: the default is the largest number of whole pages in 63 bits."""
_V2 = ""
"""The name of cgroup v2's hierarchy in /proc/self/cgroup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The limit of one cgroup level; limits of its parents apply as well."""

    limit_bytes: int
    """The limit on all processes at and below this level together."""
    used_bytes: int
    """Their current usage, without reclaimable page cache."""


def memory_limits(*, root: Path) -> tuple[MemoryLimit, ...]:
    """Return the memory limits from this process's cgroup up to the root; levels without one are left out.

    Args:
        root: the file-system root.
    """
    return tuple(
        limit
        for version, level in _levels("memory", root)
        if (limit := _memory_limit(version, level)) is not None
    )


def memory_limit_of_cgroups(*, root: Path = Path("/")) -> int | None:
    """Return the smallest memory limit of this process's cgroups; None if there is none.

    Args:
        root: the file-system root.
    """
    limits = [level.limit_bytes for level in memory_limits(root=root)]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def cpu_quota(*, root: Path) -> float | None:
    """Return the number of CPUs that this process's quota allows, or None without a quota.

    Args:
        root: the file-system root.
    """
    quotas = [
        quota for version, level in _levels("cpu", root) if (quota := _quota(version, level)) is not None
    ]
    return min(quotas, default=None)


def _levels(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (cgroup version, folder) from this process's own cgroup up to the mount point."""
    groups = _own_groups(root)
    mount = root / "sys/fs/cgroup"
    for version, name, top in ((2, _V2, mount), (1, controller, mount / controller)):
        parts = [part for part in groups.get(name, "").split("/") if part]
        # A path with ".." points out of the cgroup namespace; only the mount point is ours to read then. A
        # path that is not below the mount, as in a container without a namespace, has no files: its levels
        # are skipped, and the mount point, which is the container's own cgroup, remains.
        depth = 0 if ".." in parts else len(parts)
        for length in range(depth, -1, -1):
            yield version, top.joinpath(*parts[:length])


def _own_groups(root: Path) -> dict[str, str]:
    """Return this process's path in each hierarchy, by controller."""
    groups = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _memory_limit(version: int, level: Path) -> MemoryLimit | None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    limit, usage = (_read(level / name) for name in names[version])
    if limit is None or usage is None or limit == "max":
        return None
    # v1 has the sums over child levels only under the names with "total_".
    prefix = "total_" if version == 1 else ""
    stat = dict(line.split() for line in (_read(level / "memory.stat") or "").splitlines())
    cache = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return MemoryLimit(limit_bytes=int(limit), used_bytes=max(0, int(usage) - cache))


def _quota(version: int, level: Path) -> float | None:
    if version == 2:
        quota, _, period = (_read(level / "cpu.max") or "max").partition(" ")
    else:
        quota = _read(level / "cpu.cfs_quota_us") or "-1"
        period = _read(level / "cpu.cfs_period_us") or ""
    if quota in ("max", "-1") or not period:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def count_oom_kills(*, root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel's OOM killer has ended; None if unknown.

    Counts this process's own cgroup, whichever limit was reached (`oom_kill` in cgroup v2's memory.events and
    v1's memory.oom_control); if neither can be read, the whole machine (/proc/vmstat).

    Args:
        root: the file-system root.
    """
    files = [level / _KILLS[version] for version, level in _levels("memory", root)]
    for file in (*files, root / "proc/vmstat"):
        for line in (_read(file) or "").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
