"""The toolchain that doctor reports: CUDA, compilers, DeepSpeed's ops, and limits that a run may hit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver of this node."""

    version: str
    """The driver's own version, such as "580.65.06"."""
    cuda_version: tuple[int, int]
    """The newest CUDA it can run, (major, minor)."""
    num_gpus: int
    """GPUs it drives, hidden ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The platform that the installed torch was built for."""

    cuda_version: tuple[int, int] | None
    """CUDA it was compiled against, (major, minor); None for a build without CUDA."""
    cuda_error: str | None
    """torch's error where it can't start CUDA; None where it can, or was built without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvcc:
    """The CUDA compiler that torch and DeepSpeed would take."""

    path: str
    """The program, inside CUDA_HOME."""
    version: tuple[int, int] | None
    """CUDA release, (major, minor); None where the program is missing or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOp:
    """One native extension of DeepSpeed's, compiled when it is first used."""

    name: str
    """DeepSpeed's name of it, such as "cpu_adam"."""
    is_in_wheel: bool
    """True if it was compiled when deepspeed was installed; nothing is needed to load it then."""
    is_compiled: bool
    """True if one lies in torch's extensions folder; loading it still goes through ninja and the compiler."""
    is_compatible: bool
    """The result of the op builder's own is_compatible(); it does not look for ninja, headers or nvcc."""
    needs_nvcc: bool
    """True if it has CUDA sources here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLock:
    """A lock file in torch's extensions folder, made by a build and removed at its end."""

    path: str
    age_s: float
    """Seconds since it was made."""
    is_held: bool
    """True if a process here has it open, as a running build does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Ops that can be compiled on this node, and the compilers."""

    driver: Driver | None
    """None where NVML finds none."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    torch_build: TorchBuild | None
    """None where torch can't be imported."""
    torch_error: str | None
    """Why it can't."""
    nvcc: Nvcc | None
    """None where no CUDA toolkit is found."""
    skips_cuda_check: bool
    """True if DS_SKIP_CUDA_CHECK=1 lets DeepSpeed build with another CUDA than torch's."""
    cxx_name: str
    """The C++ compiler that torch calls: $CXX, else c++."""
    cxx: str | None
    """Where it is; None where PATH does not lead to it."""
    ninja: str | None
    """ninja, as PATH finds it."""
    ninja_off_path: str | None
    """ninja beside this Python, where PATH does not lead."""
    python_header: str
    """Where Python.h belongs."""
    has_python_header: bool
    has_libaio: bool | None
    """True if a program with libaio compiles and links; None where there is no compiler to try."""
    ops: tuple[DeepSpeedOp, ...]
    """Empty where deepspeed can't be imported."""
    deepspeed_error: str | None
    """Why it can't."""
    build_locks: tuple[BuildLock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Room in one folder."""

    purpose: str
    """The purpose of the folder, such as "current folder"."""
    folder: str
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFile:
    """A .deepspeed_env file, which DeepSpeed's multi-node launchers export to every node."""

    path: str
    num_variables: int
    is_readable_by_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this node that a run may hit."""

    installed_memory_bytes: int
    """Host memory of the node, whatever the cgroup allows."""
    memlock_bytes: int | None
    """Memory that this user may lock; None for no limit."""
    shm_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    disks: tuple[Disk, ...]
    port: int
    """The port that accelerate takes where none is given."""
    is_port_free: bool
    env_files: tuple[EnvFile, ...]
