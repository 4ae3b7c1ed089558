"""probe_machine against fake trees of /proc and /sys, and on this very machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.core.units import GIB, KIB
from zerofit.machine.this_node import count_cpu_cores, probe_machine

_MEMINFO = {"proc/meminfo": f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable: {60 * GIB // KIB} kB\n"}


def _lay(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def _v2(folder: str, *, limit: int | str, usage: int, cache: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{usage}\n",
        f"{place}/memory.stat": f"anon 1\ninactive_file {cache // 2}\nactive_file {cache // 2}\n",
    }


def _v1(folder: str, *, limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{usage}\n",
        f"{place}/memory.stat": f"inactive_file 0\ntotal_inactive_file {cache}\ntotal_active_file 0\n",
    }


@pytest.mark.parametrize(
    ("files", "memory_gib", "available_gib"),
    [
        pytest.param({}, 64, 60, id="no cgroup: what is installed"),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", **_v2("", limit=16 * GIB, usage=6 * GIB, cache=4 * GIB)},
            16,
            14,
            id="page cache counts as free",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                **_v2("job", limit=8 * GIB, usage=6 * GIB),
                **_v2("job/step", limit=32 * GIB, usage=GIB),
            },
            8,
            2,
            id="the tightest level of a v2 path holds",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/../other\n", **_v2("", limit=16 * GIB, usage=0)},
            16,
            16,
            id="a path out of the namespace: the mount point holds",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/slurm/job\n0::/\n",
                **_v1("", limit=2**63 - 4096, usage=9 * GIB),
                **_v1("slurm", limit=40 * GIB, usage=35 * GIB),
                **_v1("slurm/job", limit=12 * GIB, usage=3 * GIB, cache=GIB),
            },
            12,
            5,
            id="v1 path; no limit is a huge number",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:cpu,memory:/docker/abc\n", **_v1("", limit=4 * GIB, usage=GIB)},
            4,
            3,
            id="v1 container whose path is not mounted",
        ),
    ],
)
def test_host_memory_is_the_least_of_machine_and_cgroups(
    tmp_path: Path, files: dict[str, str], memory_gib: int, available_gib: int
) -> None:
    machine = probe_machine(root=_lay(tmp_path, _MEMINFO | files), environ={})
    assert machine.host_memory_bytes == memory_gib * GIB
    assert machine.host_memory_available_bytes == available_gib * GIB


def _siblings(*pairs: str) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{pair}\n"
        for pair in pairs
        for cpu in pair.split(",")
    }


@pytest.mark.parametrize(
    ("files", "cpus", "num_cores"),
    [
        pytest.param({}, {0, 1, 2, 3}, 4, id="no topology: each CPU is a core"),
        pytest.param(_siblings("0,2", "1,3"), {0, 1, 2, 3}, 2, id="two threads a core"),
        pytest.param(_siblings("0,2", "1,3"), {0, 2}, 1, id="both threads of one core"),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"},
            set(range(8)),
            2,
            id="v2 quota of 2.5 CPUs on the level above",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
            {0, 1},
            1,
            id="half a CPU is one core still",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            set(range(8)),
            3,
            id="v1 quota",
        ),
    ],
)
def test_cpu_cores_are_physical_and_within_affinity_and_quota(
    tmp_path: Path, files: dict[str, str], cpus: set[int], num_cores: int
) -> None:
    assert count_cpu_cores(cpus, root=_lay(tmp_path, files)) == num_cores


def test_this_machine_has_cores_and_memory() -> None:
    machine = probe_machine()
    assert machine.num_cpu_cores >= 1
    assert 0 < machine.host_memory_available_bytes <= machine.host_memory_bytes


def test_probing_the_machine_imports_nothing_heavy() -> None:
    program = (
        "import sys; from zerofit.machine.this_node import probe_machine; probe_machine();"
        "print(sorted({'torch', 'accelerate', 'deepspeed', 'transformers', 'pydantic'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
