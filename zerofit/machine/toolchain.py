"""Toolchain and Limits, the facts that `zerofit doctor` checks: CUDA, compilers, DeepSpeed's ops, limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver of this node."""

    version: str
    """The driver's own version, such as "580.65.06"."""
    cuda_version: tuple[int, int]
    """The newest CUDA version it supports, (major, minor)."""
    num_gpus: int
    """GPUs that it manages, including hidden ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch build."""

    cuda_version: tuple[int, int] | None
    """CUDA version it was compiled for, (major, minor); None for a build without CUDA."""
    cuda_error: str | None
    """torch's error if it can't initialize CUDA; None if it can, or was built without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvcc:
    """The CUDA compiler that torch and DeepSpeed would use."""

    path: str
    """Its path, inside CUDA_HOME."""
    version: tuple[int, int] | None
    """CUDA release, (major, minor); None if the program is missing or fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOp:
    """One native extension of DeepSpeed, compiled at first use."""

    name: str
    """DeepSpeed's name for it, such as "cpu_adam"."""
    is_in_wheel: bool
    """True if it was compiled when deepspeed was installed, so that loading needs nothing else."""
    is_compiled: bool
    """True if torch's extensions folder has it compiled; loading it still calls ninja and the compiler."""
    is_compatible: bool
    """The result of the op builder's is_compatible(), which does not look for ninja, headers or nvcc."""
    needs_nvcc: bool
    """True if it has CUDA sources on this platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLock:
    """A lock file in torch's extensions folder, created by a build and removed at its end."""

    path: str
    age_s: float
    """Seconds since its creation."""
    is_held: bool
    """True if a local process has it open, as a running build does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The compilers of this node, and the ops that they can compile."""

    driver: Driver | None
    """None without NVML."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES; None if unset."""
    torch_build: TorchBuild | None
    """None if torch can't be imported."""
    torch_error: str | None
    """Why torch can't be imported."""
    nvcc: Nvcc | None
    """None without a CUDA toolkit."""
    skips_cuda_check: bool
    """True if DS_SKIP_CUDA_CHECK=1 lets DeepSpeed build with another CUDA version than torch's."""
    cxx_name: str
    """The C++ compiler that torch calls: $CXX, else c++."""
    cxx: str | None
    """Its path; None if it is not in PATH."""
    ninja: str | None
    """Path of ninja in PATH."""
    ninja_off_path: str | None
    """Path of ninja beside this Python, if it is not in PATH."""
    python_header: str
    """Expected path of Python.h."""
    has_python_header: bool
    has_libaio: bool | None
    """True if a program with libaio compiles and links; None without a compiler."""
    ops: tuple[DeepSpeedOp, ...]
    """Empty if deepspeed can't be imported."""
    deepspeed_error: str | None
    """Why deepspeed can't be imported."""
    build_locks: tuple[BuildLock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Free space in one folder."""

    purpose: str
    """What the folder is for, such as "current folder"."""
    folder: str
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFile:
    """A .deepspeed_env file; DeepSpeed's multi-node launchers export it to every node."""

    path: str
    num_variables: int
    is_readable_by_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this node that a run may hit."""

    installed_memory_bytes: int
    """Host memory of the node, ignoring cgroup limits."""
    memlock_bytes: int | None
    """Maximum locked memory of this user; None if unlimited."""
    shm_bytes: int | None
    """Size of /dev/shm; None if missing."""
    disks: tuple[Disk, ...]
    port: int
    """accelerate's default port."""
    is_port_free: bool
    env_files: tuple[EnvFile, ...]
