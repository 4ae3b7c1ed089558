"""The kernel's counts of processes that it killed for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.machine.cgroup import count_oom_kills

_VMSTAT = "proc/vmstat", "nr_free_pages 7\noom_kill 9\n"
_V1 = "sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
_V2 = "sys/fs/cgroup/job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((_VMSTAT,), 9),
        ((_VMSTAT, _V1), 1),  # somebody else's kills are not this job's
        ((_VMSTAT, _V2), 2),
        ((("proc/vmstat", "nr_free_pages 7\n"),), None),
        ((), None),
    ],
)
def test_kills_are_those_of_the_own_cgroup_where_it_counts_them(
    tmp_path: Path, files: tuple[tuple[str, str], ...], expected: int | None
) -> None:
    for name, text in (("proc/self/cgroup", "4:memory:/job\n0::/job\n"), *files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_oom_kills(root=tmp_path) == expected
