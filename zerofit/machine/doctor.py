"""The checks of `zerofit doctor`: one line each, ok or a warning with its reason and fix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from zerofit.core.rates import Unit
from zerofit.core.supported import SUPPORTED
from zerofit.core.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.facts import Machine, Versions
    from zerofit.core.rates import Calibration, Rate
    from zerofit.machine.toolchain import (
        BuildLock,
        DeepSpeedOp,
        Disk,
        EnvFile,
        Limits,
        Toolchain,
    )

_MIXABLE_MINORS = {10: range(3), 11: range(9), 12: (0, 1, 2, 3, 4, 5, 6, 8, 9)}
"""CUDA minor versions that DeepSpeed treats as compatible, by major version.

Source: deepspeed/ops/op_builder/builder.py, cuda_minor_mismatch_ok (0.19.8).
"""
_OP_USES = {
    "cpu_adam": "optimizer offload to CPU or NVMe uses it",
    "fused_adam": "an Adam or AdamW in the DeepSpeed JSON without offload uses it",
    "async_io": "NVMe offload needs it, and nothing else does",
}
_WHY_NEEDED = "DeepSpeed needs it to compile its ops at first use"
_LOW_MEMORY_BYTES = 4 * GIB
"""ASSUMPTION: one rank of a 1B model with optimizer offload does not start with less; the imports of a rank
alone take 0.6 GB."""
_LOW_MEMLOCK_BYTES = 10**9
"""One rank's NVMe buffers for parameters, by default: buffer_count 5 x buffer_size 1e8 in bf16.
Source: https://www.deepspeed.ai/docs/config-json/#parameter-offloading"""
_LOW_SHM_BYTES = 512 * MIB
"""The threshold of DeepSpeed's own report: deepspeed/env_report.py, get_shm_size."""
_LOW_DISK_BYTES = 20 * GIB
"""ASSUMPTION: enough for one checkpoint of a 1B model with its Adam states: 12 bytes per parameter in fp32,
14 with 16-bit weights (https://arxiv.org/abs/1910.02054, section 3.1)."""
_USES = {
    "torch": "everything needs it",
    "accelerate": "zerofit launch starts the ranks with it",
    "deepspeed": "it implements ZeRO and offload",
    "transformers": "it provides models and Trainer",
    "huggingface_hub": "it downloads models and datasets",
    "peft": "it provides LoRA adapters",
    "bitsandbytes": "it provides 8-bit optimizers",
}


class Status(StrEnum):
    """The result of one check."""

    OK = "ok"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckupLine:
    """One check with its result."""

    status: Status
    topic: str
    """What was checked, in a word or two."""
    found: str
    """The value found."""
    why: str | None = None
    """The reason for a warning; None if ok."""
    fix: str | None = None
    """The fix; None if there is nothing to do."""


def ok(topic: str, found: str) -> CheckupLine:
    """Return the line of a check that passed."""
    return CheckupLine(status=Status.OK, topic=topic, found=found)


def warning(topic: str, found: str, *, why: str, fix: str) -> CheckupLine:
    """Return the line of a check that found a problem for some runs."""
    return CheckupLine(status=Status.WARNING, topic=topic, found=found, why=why, fix=fix)


def check_up(
    machine: Machine, versions: Versions, toolchain: Toolchain, limits: Limits
) -> tuple[CheckupLine, ...]:
    """Return the results of all checks of this node."""
    return (
        *_check_packages(versions),
        *_check_gpus(machine, toolchain),
        # If torch is missing, the package's line is the warning.
        *((_check_torch_cuda(machine, toolchain),) if versions.torch is not None else ()),
        _check_nvcc(machine, toolchain),
        *_check_compilers(toolchain),
        *_check_ops(versions, toolchain),
        *(_check_lock(lock) for lock in toolchain.build_locks),
        *(() if toolchain.build_locks else (ok("build locks", "none"),)),
        ok("CPU cores", f"{machine.num_cpu_cores} physical"),
        *_check_memory(machine, limits),
        *(_check_disk(disk) for disk in limits.disks),
        _check_port(limits),
        *(_check_env_file(env_file) for env_file in limits.env_files),
        *(() if limits.env_files else (ok(".deepspeed_env", "none"),)),
    )


def are_cuda_versions_compatible(nvcc: tuple[int, int], torch: tuple[int, int]) -> bool:
    """Return True if DeepSpeed accepts this nvcc for CUDA ops of this torch.

    Source: deepspeed/ops/op_builder/builder.py, assert_no_cuda_mismatch (0.19.8).
    """
    mixable = _MIXABLE_MINORS.get(nvcc[0], ())
    return nvcc == torch or (nvcc[0] == torch[0] and nvcc[1] in mixable and torch[1] in mixable)


def _check_gpus(machine: Machine, toolchain: Toolchain) -> Iterator[CheckupLine]:
    kinds = Counter(machine.gpus)
    if not kinds:
        yield _no_gpus(toolchain)
    for gpu, count in kinds.items():
        formats = "bf16 and fp16" if gpu.has_bf16 else "fp16, no bf16"
        yield ok("GPUs", f"{count} x {gpu.name}, {format_bytes(gpu.memory_bytes)} each, {formats}")
    if len(kinds) > 1:
        yield warning(
            "GPU mix",
            f"{len(kinds)} kinds of GPU",
            why="every rank gets the same share of the model and of the batch, so the smallest and slowest "
            "GPU sets the pace",
            fix="name GPUs of one kind with --gpu-ids, or accept it",
        )
    # Without a driver there is no GPU either; the GPUs' line has the fix.
    driver = toolchain.driver
    yield ok("driver", f"{driver.version}, CUDA up to {_dotted(driver.cuda_version)}" if driver else "none")


def _no_gpus(toolchain: Toolchain) -> CheckupLine:
    num_gpus = toolchain.driver.num_gpus if toolchain.driver else 0
    if num_gpus and toolchain.visible_devices is not None:
        return warning(
            "GPUs",
            f"none visible: CUDA_VISIBLE_DEVICES={toolchain.visible_devices!r} hides all {num_gpus}",
            why="then `zerofit launch` only works with --cpu",
            fix="unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi lists",
        )
    return warning(
        "GPUs",
        "none",
        why="`zerofit launch` only works with --cpu, for tests of a run",
        fix="if the node has NVIDIA GPUs, make nvidia-smi list them: install the driver, or give them to the "
        "container (--gpus all)",
    )


def _check_torch_cuda(machine: Machine, toolchain: Toolchain) -> CheckupLine:
    topic, torch, driver = "torch CUDA", toolchain.torch_build, toolchain.driver
    if torch is None:
        return warning(
            topic,
            f"torch can't be imported: {toolchain.torch_error}",
            why="no run can start",
            fix="reinstall torch: pip install --force-reinstall torch",
        )
    built_for = (
        f"built for CUDA {_dotted(torch.cuda_version)}" if torch.cuda_version else "built without CUDA"
    )
    if not machine.gpus:
        return ok(topic, built_for)
    if torch.cuda_version is None:
        return warning(
            topic,
            built_for,
            why="this torch can't use the GPUs",
            fix="install a build with CUDA: https://pytorch.org/get-started/locally/",
        )
    if torch.cuda_error is None:
        return ok(topic, built_for)
    is_driver_old = driver is not None and driver.cuda_version[0] < torch.cuda_version[0]
    return warning(
        topic,
        f"{built_for}, and can't start it",
        why=torch.cuda_error,
        fix=f"update the driver, or install a torch built for CUDA {driver.cuda_version[0]}"
        if driver is not None and is_driver_old
        else "make nvidia-smi work for this user, then reboot or restart the container",
    )


def _check_nvcc(machine: Machine, toolchain: Toolchain) -> CheckupLine:
    nvcc, torch = toolchain.nvcc, toolchain.torch_build
    found = "none" if nvcc is None else f"none at {nvcc.path}"
    if nvcc is not None and nvcc.version is not None:
        found = f"{_dotted(nvcc.version)} ({nvcc.path})"
    if not machine.gpus or torch is None or torch.cuda_version is None:
        return ok("nvcc", f"{found}; not needed without GPUs" if not machine.gpus else found)
    wanted = _dotted(torch.cuda_version)
    if nvcc is None or nvcc.version is None:
        return warning(
            "nvcc",
            found,
            why="DeepSpeed compiles fused_adam and async_io with it",
            fix=f"install the CUDA toolkit {wanted} and set CUDA_HOME to it; not needed for other ops",
        )
    if are_cuda_versions_compatible(nvcc.version, torch.cuda_version):
        return ok("nvcc", found)
    if toolchain.skips_cuda_check:
        return ok("nvcc", f"{found}; torch has CUDA {wanted}, allowed by DS_SKIP_CUDA_CHECK=1")
    return warning(
        "nvcc",
        f"{found}; torch has CUDA {wanted}",
        why="ops compiled with another CUDA version may fail to build or load; DeepSpeed refuses to "
        "compile them",
        fix=f"install the CUDA toolkit {wanted} and set CUDA_HOME to it, or try DS_SKIP_CUDA_CHECK=1",
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


_SCALES = {
    Unit.FLOPS_PER_S: (1e12, "TFLOPS"),
    Unit.BYTES_PER_S: (1e9, "GB/s"),
    Unit.ELEMENTS_PER_S: (1e9, "billion parameters/s"),
    Unit.SECONDS: (1e-6, "us"),
    Unit.FRACTION: (1.0, "of the peak"),
}


def calibration_lines(calibration: Calibration) -> tuple[CheckupLine, ...]:
    """Return one line per measured rate, and one per rate that could not be measured."""
    measured = tuple(
        ok("measured", f"{rate.name}: {format_rate(rate)} ({rate.source})") for rate in calibration.rates
    )
    return (*measured, *(ok("not measured", what) for what in calibration.left_out))


def format_rate(rate: Rate) -> str:
    """Return a rate as text, such as "21.4 GB/s"."""
    scale, unit = _SCALES[rate.unit]
    return f"{rate.value / scale:.3g} {unit}"


def _check_compilers(toolchain: Toolchain) -> Iterator[CheckupLine]:
    """Yield the lines of the compilers that DeepSpeed builds its ops with."""
    if toolchain.cxx is not None:
        yield ok("C++ compiler", toolchain.cxx)
    else:
        yield warning(
            "C++ compiler",
            f"no {toolchain.cxx_name} on PATH",
            why=_WHY_NEEDED,
            fix="apt-get install g++ (RPM systems: gcc-c++), or set CXX to an installed one",
        )
    if toolchain.has_python_header:
        yield ok("Python headers", toolchain.python_header)
    else:
        yield warning(
            "Python headers",
            f"no {toolchain.python_header}",
            why=_WHY_NEEDED,
            fix="apt-get install python3-dev (RPM systems: python3-devel)",
        )
    if toolchain.ninja is not None:
        yield ok("ninja", toolchain.ninja)
    elif toolchain.ninja_off_path is not None:
        folder = PurePosixPath(toolchain.ninja_off_path).parent
        yield warning(
            "ninja",
            f"{toolchain.ninja_off_path}, which is not in PATH",
            why="torch calls it by its bare name when it compiles DeepSpeed's ops",
            fix=f'activate the environment, or: export PATH="{folder}:$PATH"',
        )
    else:
        yield warning("ninja", "none", why=_WHY_NEEDED, fix="pip install ninja")
    if toolchain.has_libaio is None:  # the compiler's line is the warning
        yield ok("libaio", "not tried without a C++ compiler")
    elif toolchain.has_libaio:
        yield ok("libaio", "compiles and links")
    else:
        yield warning(
            "libaio",
            "header or library missing",
            why="DeepSpeed's async_io, which NVMe offload needs, is built with it",
            fix="apt-get install libaio-dev (RPM systems: libaio-devel); not needed without NVMe offload",
        )


def _check_ops(versions: Versions, toolchain: Toolchain) -> tuple[CheckupLine, ...]:
    if versions.deepspeed is None or toolchain.torch_build is None:
        # The package's line is the warning.
        return ()
    if toolchain.deepspeed_error is not None:
        broken = warning(
            "DeepSpeed ops",
            f"deepspeed can't be imported: {toolchain.deepspeed_error}",
            why="no run with DeepSpeed can start",
            fix="reinstall deepspeed: DS_BUILD_OPS=0 pip install --force-reinstall --no-deps deepspeed",
        )
        return (broken,)
    return tuple(_check_op(op, toolchain) for op in toolchain.ops)


def _check_op(op: DeepSpeedOp, toolchain: Toolchain) -> CheckupLine:
    topic = f"op {op.name}"
    if op.is_in_wheel:
        return ok(topic, "compiled into the installed deepspeed")
    if missing := _missing(op, toolchain):
        return warning(
            topic, "can't be compiled", why=_OP_USES[op.name], fix=f"see above: {', '.join(missing)}"
        )
    if not op.is_compatible:
        return warning(
            topic, "DeepSpeed says it can't be compiled", why=_OP_USES[op.name], fix="ds_report says more"
        )
    return ok(topic, "compiled" if op.is_compiled else "not compiled yet; the first use compiles it")


def _missing(op: DeepSpeedOp, toolchain: Toolchain) -> tuple[str, ...]:
    """Return the topics of an op's missing requirements, in the order of their lines."""
    has_nvcc = toolchain.nvcc is not None and toolchain.nvcc.version is not None
    needs = {
        "nvcc": has_nvcc or not op.needs_nvcc,
        "C++ compiler": toolchain.cxx is not None,
        "Python headers": toolchain.has_python_header,
        "ninja": toolchain.ninja is not None,
        "libaio": toolchain.has_libaio is not False or op.name != "async_io",
    }
    return tuple(topic for topic, is_there in needs.items() if not is_there)


def _check_lock(lock: BuildLock) -> CheckupLine:
    found = f"{lock.path}, {_age(lock.age_s)} old"
    if lock.is_held:
        return ok("build locks", f"{found}; its build is running")
    return warning(
        "build locks",
        found,
        why="no process here holds it, as after a build that was killed; the next use of this op waits "
        "for it forever, without a message",
        fix=f"rm {lock.path} (unless another node that shares the folder is building)",
    )


def _age(age_s: float) -> str:
    for name, seconds in (("days", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {name}"
    return f"{age_s:.0f} s"


def _check_packages(versions: Versions) -> tuple[CheckupLine, ...]:
    return (
        ok("python", versions.python),
        ok("zerofit", versions.zerofit),
        *(_check_package(name, getattr(versions, name), use) for name, use in _USES.items()),
    )


def _check_package(name: str, version: str | None, use: str) -> CheckupLine:
    supported = SUPPORTED[name]
    wanted = f"'{name}{supported.specifier}'"
    if version is None:
        return warning(name, "not installed", why=use, fix=f"pip install {wanted}")
    found = f"{version} (supported: {supported.specifier})"
    if not supported.has(version):
        return warning(name, found, why="zerofit does not support it", fix=f"pip install {wanted}")
    if supported.is_untested(version):
        why = f"zerofit was tested with {supported.tested} and older ones only"
        return warning(name, found, why=why, fix=f"pip install '{name}<={supported.tested}' if it fails")
    return ok(name, found)


def _check_memory(machine: Machine, limits: Limits) -> Iterator[CheckupLine]:
    """Yield the lines of host memory, locked memory and shared memory."""
    found = (
        f"{format_bytes(machine.host_memory_bytes)}, {format_bytes(machine.host_memory_available_bytes)} free"
    )
    is_limited = machine.host_memory_bytes < limits.installed_memory_bytes
    if is_limited:
        found += f"; limited by the cgroup, {format_bytes(limits.installed_memory_bytes)} installed"
    if machine.host_memory_available_bytes >= _LOW_MEMORY_BYTES:
        yield ok("host memory", found)
    else:
        yield warning(
            "host memory",
            found,
            why="ranks that load a model or offload to CPU are killed (exit -9) when it runs out",
            fix="raise the memory of the container or job" if is_limited else "end other processes",
        )
    locked, shared = limits.memlock_bytes, limits.shm_bytes
    if locked is None or locked >= _LOW_MEMLOCK_BYTES:
        yield ok("memlock", "no limit" if locked is None else format_bytes(locked))
    else:
        yield warning(
            "memlock",
            format_bytes(locked),
            why="NVMe offload's buffers, and pinned ones with DS_PIN_MEMORY_BACKEND=native, are locked in "
            "memory",
            fix="ulimit -l unlimited (containers: --ulimit memlock=-1), or offload with pin_memory false",
        )
    if shared is not None and shared >= _LOW_SHM_BYTES:
        yield ok("/dev/shm", format_bytes(shared))
    else:
        yield warning(
            "/dev/shm",
            "none" if shared is None else format_bytes(shared),
            why="NCCL and DataLoader workers pass data through it, and crash with bus errors when it is full",
            fix="start the container with --shm-size=8g or --ipc=host (Kubernetes: a Memory emptyDir there)",
        )


def _check_disk(disk: Disk) -> CheckupLine:
    found = f"{format_bytes(disk.free_bytes)} free in {disk.folder}"
    if not disk.is_writable:
        return warning(
            disk.purpose,
            f"{disk.folder} is not writable",
            why="checkpoints, run folders and downloads can't be written",
            fix=f"chmod u+w {disk.folder}, or use another folder (HF_HOME moves the cache)",
        )
    if disk.free_bytes >= _LOW_DISK_BYTES:
        return ok(disk.purpose, found)
    return warning(
        disk.purpose,
        found,
        why="a checkpoint with optimizer states takes 12 to 14 bytes per parameter, twice that while an "
        "old one is kept",
        fix="free some, or use a folder on another disk (HF_HOME moves the cache)",
    )


def _check_port(limits: Limits) -> CheckupLine:
    topic = f"port {limits.port}"
    if limits.is_port_free:
        return ok(topic, "free")
    return warning(
        topic,
        "taken",
        why="another run may use it; plain accelerate launch then fails on its default port",
        fix="none needed for zerofit launch, which finds a free one; else pass --main_process_port",
    )


def _check_env_file(env_file: EnvFile) -> CheckupLine:
    readers = ", readable by all users" if env_file.is_readable_by_all else ""
    return warning(
        ".deepspeed_env",
        f"{env_file.path}, {env_file.num_variables} variables{readers}",
        why="a multi-node launch saves the environment there, including tokens, and the next one exports "
        "it to every node",
        fix=f"rm {env_file.path}, unless you wrote it",
    )
