"""Verdicts on what compiles DeepSpeed's ops, on the ops, and on builds that left a lock."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from zerofit.core.supported import SUPPORTED
from zerofit.machine.doctor.verdict import CheckupLine, ok, warning

if TYPE_CHECKING:
    from zerofit.core.facts import Versions
    from zerofit.machine.toolchain import BuildLock, DeepSpeedOp, Toolchain

_OP_USES = {
    "cpu_adam": "offload of the optimizer to CPU or NVMe steps with it",
    "fused_adam": "an Adam or AdamW in the DeepSpeed JSON without offload steps with it",
    "async_io": "offload to NVMe reads and writes with it, and nothing else does",
}
_WHY_NEEDED = "DeepSpeed compiles its ops at first use, and this takes part"


def check_builds(versions: Versions, toolchain: Toolchain) -> tuple[CheckupLine, ...]:
    """Return the lines of compiler, headers, ninja, libaio, DeepSpeed's ops and build locks."""
    return (
        _check_cxx(toolchain),
        _check_python_header(toolchain),
        _check_ninja(toolchain),
        _check_libaio(toolchain),
        *_check_ops(versions, toolchain),
        *_check_locks(toolchain.build_locks),
    )


def _check_cxx(toolchain: Toolchain) -> CheckupLine:
    if toolchain.cxx is not None:
        return ok("C++ compiler", toolchain.cxx)
    return warning(
        "C++ compiler",
        f"no {toolchain.cxx_name} on PATH",
        why=_WHY_NEEDED,
        fix="apt-get install g++ (RPM systems: gcc-c++), or set CXX to one that is there",
    )


def _check_python_header(toolchain: Toolchain) -> CheckupLine:
    if toolchain.has_python_header:
        return ok("Python headers", toolchain.python_header)
    return warning(
        "Python headers",
        f"no {toolchain.python_header}",
        why=_WHY_NEEDED,
        fix="apt-get install python3-dev (RPM systems: python3-devel)",
    )


def _check_ninja(toolchain: Toolchain) -> CheckupLine:
    if toolchain.ninja is not None:
        return ok("ninja", toolchain.ninja)
    if toolchain.ninja_off_path is not None:
        folder = PurePosixPath(toolchain.ninja_off_path).parent
        return warning(
            "ninja",
            f"{toolchain.ninja_off_path}, where PATH does not lead",
            why="torch calls it by its bare name when it compiles DeepSpeed's ops",
            fix=f'activate the environment, or: export PATH="{folder}:$PATH"',
        )
    return warning("ninja", "none", why=_WHY_NEEDED, fix="pip install ninja")


def _check_libaio(toolchain: Toolchain) -> CheckupLine:
    if toolchain.has_libaio:
        return ok("libaio", "compiles and links")
    if toolchain.has_libaio is None:
        # The line of the compiler is the warning.
        return ok("libaio", "not tried without a C++ compiler")
    return warning(
        "libaio",
        "header or library missing",
        why="DeepSpeed's async_io, which offload to NVMe needs, is made of it",
        fix="apt-get install libaio-dev (RPM systems: libaio-devel); not needed without NVMe offload",
    )


def _check_ops(versions: Versions, toolchain: Toolchain) -> tuple[CheckupLine, ...]:
    if versions.deepspeed is None or toolchain.torch_build is None:
        # The line of the package is the warning.
        return ()
    if toolchain.deepspeed_error is not None:
        broken = warning(
            "DeepSpeed ops",
            f"deepspeed can't be imported: {toolchain.deepspeed_error}",
            why="no run under DeepSpeed can start",
            fix="install deepspeed anew: DS_BUILD_OPS=0 pip install --force-reinstall --no-deps deepspeed",
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
    """Return the topics of what the op lacks, in the order of their lines."""
    has_nvcc = toolchain.nvcc is not None and toolchain.nvcc.version is not None
    needs = {
        "nvcc": has_nvcc or not op.needs_nvcc,
        "C++ compiler": toolchain.cxx is not None,
        "Python headers": toolchain.has_python_header,
        "ninja": toolchain.ninja is not None,
        "libaio": toolchain.has_libaio is not False or op.name != "async_io",
    }
    return tuple(topic for topic, is_there in needs.items() if not is_there)


def _check_locks(locks: tuple[BuildLock, ...]) -> tuple[CheckupLine, ...]:
    if not locks:
        return (ok("build locks", "none"),)
    return tuple(_check_lock(lock) for lock in locks)


def _check_lock(lock: BuildLock) -> CheckupLine:
    found = f"{lock.path}, {_age(lock.age_s)} old"
    if lock.is_held:
        return ok("build locks", f"{found}; its build is running")
    return warning(
        "build locks",
        found,
        why="no process here holds it, as after a build that was killed; the next use of this op waits for "
        "it for ever, without a word",
        fix=f"rm {lock.path} (unless another node that shares the folder is building)",
    )


def _age(age_s: float) -> str:
    for name, seconds in (("days", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {name}"
    return f"{age_s:.0f} s"


_USES = {
    "torch": "everything runs on it",
    "accelerate": "zerofit launch starts the ranks through it",
    "deepspeed": "ZeRO and offload are its work",
    "transformers": "models and Trainer come from it",
    "huggingface_hub": "models and datasets are fetched with it",
    "peft": "LoRA adapters come from it",
    "bitsandbytes": "8-bit optimizers come from it",
}


def check_packages(versions: Versions) -> tuple[CheckupLine, ...]:
    """Return a line for Python, zerofit and each package a run is made of."""
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
        return warning(name, found, why="zerofit does not run on it", fix=f"pip install {wanted}")
    if supported.is_untested(version):
        why = f"zerofit was tested with {supported.tested} and older ones only"
        return warning(name, found, why=why, fix=f"pip install '{name}<={supported.tested}' if it fails")
    return ok(name, found)
