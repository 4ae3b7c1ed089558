"""This node: memory, cores, NVMe disks and limits, on fake trees of /proc and /sys and on this very one."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from zerofit.core.units import GIB, KIB
from zerofit.machine.cgroup import count_oom_kills, memory_limit_of_cgroups
from zerofit.machine.limits import find_env_files, may_lock_all_memory, probe_disk, probe_limits
from zerofit.machine.this_node import count_cpu_cores, nvme_free_bytes, probe_machine
from zerofit.machine.toolchain import EnvFile

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


_FREE = {"scratch": 3000, "": 500, "home": 800, "my disk": 40}


def _free_bytes(folder: Path) -> int:
    if folder.name not in _FREE:
        raise PermissionError(folder)
    return _FREE[folder.name]


def _mount(device: str, folder: str, options: str = "rw,noatime") -> str:
    return f"36 35 {device} / {folder} {options} shared:1 - ext4 /dev/some rw\n"


def _tree(root: Path, mounts: str) -> Path:
    """Lay two NVMe disks, the first with a partition, one of a network, a SATA disk, and two RAIDs."""
    for number, device, model in [
        ("259:0", "nvme0n1", "SAMSUNG"),
        ("259:2", "nvme1n1", "SAMSUNG"),
        ("259:3", "nvme2n1", "Amazon Elastic Block Store"),
        ("8:0", "sda", "Seagate"),
        ("9:0", "md0", ""),
        ("9:1", "md1", ""),
    ]:
        block = root / "sys/devices" / device
        (block / "device").mkdir(parents=True)
        (block / "device/model").write_text(f"{model}  \n")
        _link(root / "sys/dev/block" / number, block)
    partition = root / "sys/devices/nvme0n1/nvme0n1p1"
    partition.mkdir()
    (partition / "partition").write_text("1\n")
    _link(root / "sys/dev/block/259:1", partition)
    for raid, disks in {"md0": ("nvme0n1", "nvme1n1"), "md1": ("nvme0n1", "sda")}.items():
        for disk in disks:
            _link(root / "sys/devices" / raid / "slaves" / disk, root / "sys/devices" / disk)
    for name in ("scratch", "home", "my disk", "private"):
        (root / "mnt" / name).mkdir(parents=True)
    (root / "mnt/hosts").touch()
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize(
    ("mounts", "num_bytes"),
    [
        pytest.param("", 0, id="nothing mounted"),
        pytest.param(_mount("259:2", "/mnt/scratch"), 3000, id="a whole disk"),
        pytest.param(_mount("259:1", "/mnt/scratch"), 3000, id="a partition"),
        pytest.param(_mount("9:0", "/mnt/scratch"), 3000, id="a RAID of NVMe disks"),
        pytest.param(_mount("9:1", "/mnt/scratch"), 0, id="a RAID that is half SATA"),
        pytest.param(_mount("8:0", "/mnt/scratch"), 0, id="SATA"),
        pytest.param(_mount("259:3", "/mnt/scratch"), 0, id="a disk behind a network"),
        pytest.param(_mount("0:52", "/mnt/scratch"), 0, id="no block device: an overlay, tmpfs or NFS"),
        pytest.param(_mount("259:2", "/mnt/scratch", "ro,noatime"), 0, id="read-only"),
        pytest.param(_mount("259:2", "/mnt/hosts"), 0, id="a single file, as containers have"),
        pytest.param(_mount("259:2", "/mnt/private"), 0, id="a file system that can't be asked"),
        pytest.param(_mount("259:2", "/mnt/my\\040disk"), 40, id="a blank in the name"),
        pytest.param(
            _mount("259:1", "/mnt/home") + _mount("259:2", "/mnt/scratch"), 3000, id="two do not add up"
        ),
    ],
)
def test_free_space_is_that_of_the_largest_local_nvme_file_system(
    tmp_path: Path, mounts: str, num_bytes: int
) -> None:
    assert nvme_free_bytes(root=_tree(tmp_path, mounts), free_bytes=_free_bytes) == num_bytes


def test_the_machine_states_its_free_space(tmp_path: Path) -> None:
    root = _tree(tmp_path, _mount("259:2", "/mnt/scratch"))
    (root / "proc/meminfo").write_text("MemTotal: 64 kB\nMemAvailable: 60 kB\n")
    assert probe_machine(root=root, environ={}).nvme_bytes > 0


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


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job\n", **_v2("job", limit=16 * GIB, usage=0)}, 16),
        ({"proc/self/cgroup": "4:memory:/\n", **_v1("", limit=9223372036854771712, usage=0)}, None),
    ],
)
def test_a_cgroup_without_a_limit_has_none(tmp_path: Path, files: dict[str, str], gib: int | None) -> None:
    found = memory_limit_of_cgroups(root=_lay(tmp_path, _MEMINFO | files))
    assert found == (None if gib is None else gib * GIB)


_INITIAL_NAMESPACE = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "may"),
    [
        pytest.param("000001ffffffffff", _INITIAL_NAMESPACE, True, id="root"),
        pytest.param("0000000000000000", _INITIAL_NAMESPACE, False, id="user"),
        pytest.param("00000000a80425fb", _INITIAL_NAMESPACE, False, id="root in docker: no CAP_IPC_LOCK"),
        pytest.param("000001ffffffffff", "0 1000 1\n", False, id="root of a user namespace"),
    ],
)
def test_only_real_root_locks_memory_without_limit(
    tmp_path: Path, capabilities: str, uid_map: str, may: bool
) -> None:
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    (folder / "uid_map").write_text(uid_map)
    assert may_lock_all_memory(root=tmp_path) is may


def test_disk_of_a_folder_that_is_not_there_yet_is_that_of_the_nearest_above(tmp_path: Path) -> None:
    folder = tmp_path / "not/yet"
    disk = probe_disk("cache", folder)
    assert (disk.purpose, disk.folder, disk.is_writable) == ("cache", str(folder), True)
    assert disk.free_bytes > 0


def test_env_files_are_counted_but_not_read_out(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    for place, mode in ((home, 0o600), (folder, 0o644)):
        place.mkdir()
        (place / ".deepspeed_env").write_text("HF_TOKEN=hf_secret\nPATH=/bin\nPATH=/usr/bin\n")
        (place / ".deepspeed_env").chmod(mode)
    assert find_env_files(folder=folder, home=home, environ={}) == (
        EnvFile(path=f"{home}/.deepspeed_env", num_variables=2, is_readable_by_all=False),
        EnvFile(path=f"{folder}/.deepspeed_env", num_variables=2, is_readable_by_all=True),
    )
    assert find_env_files(folder=home, home=home, environ={"DS_ENV_FILE": "other"}) == ()


def test_limits_of_this_machine(tmp_path: Path) -> None:
    limits = probe_limits(folder=tmp_path, home=tmp_path, environ={})
    assert limits.installed_memory_bytes > 0
    assert limits.port == 29500
    assert [(disk.purpose, disk.folder) for disk in limits.disks] == [
        ("current folder", str(tmp_path)),
        ("Hugging Face cache", HF_HUB_CACHE),
    ]
    assert limits.env_files == ()
