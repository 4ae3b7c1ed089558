"""Verdicts on GPUs, driver, and the three CUDA versions that have to agree: driver's, torch's and nvcc's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zerofit.core.rates import Unit
from zerofit.core.units import format_bytes
from zerofit.machine.doctor.verdict import CheckupLine, ok, warning

if TYPE_CHECKING:
    from zerofit.core.facts import GpuSpec, Machine, Versions
    from zerofit.core.rates import Calibration, Rate
    from zerofit.machine.toolchain import Nvcc, Toolchain

_MIXABLE_MINORS = {10: range(3), 11: range(9), 12: (0, 1, 2, 3, 4, 5, 6, 8, 9)}
"""CUDA minor versions that DeepSpeed takes for each other, by major version.

Source: deepspeed/ops/op_builder/builder.py, cuda_minor_mismatch_ok (0.19.8).
"""


def check_gpus(machine: Machine, versions: Versions, toolchain: Toolchain) -> tuple[CheckupLine, ...]:
    """Return the lines of the GPUs, the driver, torch's CUDA and nvcc."""
    return (
        *_check_gpus(machine, toolchain),
        _check_driver(toolchain),
        # Without torch, the line of the package is the warning.
        *((_check_torch_cuda(machine, toolchain),) if versions.torch is not None else ()),
        _check_nvcc(machine, toolchain),
    )


def are_cuda_versions_compatible(nvcc: tuple[int, int], torch: tuple[int, int]) -> bool:
    """Return whether DeepSpeed takes this nvcc to compile CUDA ops for this torch.

    Source: deepspeed/ops/op_builder/builder.py, assert_no_cuda_mismatch (0.19.8).
    """
    mixable = _MIXABLE_MINORS.get(nvcc[0], ())
    return nvcc == torch or (nvcc[0] == torch[0] and nvcc[1] in mixable and torch[1] in mixable)


def _check_gpus(machine: Machine, toolchain: Toolchain) -> tuple[CheckupLine, ...]:
    if not machine.gpus:
        return (_no_gpus(toolchain),)
    kinds = Counter(machine.gpus)
    lines = tuple(ok("GPUs", f"{count} x {_describe(gpu)}") for gpu, count in kinds.items())
    if len(kinds) == 1:
        return lines
    mixed = warning(
        "GPU mix",
        f"{len(kinds)} kinds of GPU",
        why="every rank gets the same share of the model and of the batch, so the smallest and slowest GPU "
        "sets the pace",
        fix="name GPUs of one kind with --gpu-ids, or accept it",
    )
    return (*lines, mixed)


def _no_gpus(toolchain: Toolchain) -> CheckupLine:
    num_gpus = toolchain.driver.num_gpus if toolchain.driver else 0
    if num_gpus and toolchain.visible_devices is not None:
        return warning(
            "GPUs",
            f"none visible: CUDA_VISIBLE_DEVICES={toolchain.visible_devices!r} hides all {num_gpus}",
            why="training runs on the CPU then",
            fix="unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi lists",
        )
    return warning(
        "GPUs",
        "none",
        why="training runs on the CPU, which rehearses a run and is too slow for more",
        fix="if the node has NVIDIA GPUs, make nvidia-smi list them: install the driver, or give them to the "
        "container (--gpus all)",
    )


def _check_driver(toolchain: Toolchain) -> CheckupLine:
    # Without a driver there is no GPU either, and the line of the GPUs says what to do.
    driver = toolchain.driver
    return ok("driver", f"{driver.version}, CUDA up to {_dotted(driver.cuda_version)}" if driver else "none")


def _check_torch_cuda(machine: Machine, toolchain: Toolchain) -> CheckupLine:
    topic, torch, driver = "torch CUDA", toolchain.torch_build, toolchain.driver
    if torch is None:
        return warning(
            topic,
            f"torch can't be imported: {toolchain.torch_error}",
            why="no run can start",
            fix="install torch anew: pip install --force-reinstall torch",
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
    found = _describe_nvcc(nvcc)
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
        return ok("nvcc", f"{found}; torch has CUDA {wanted}, let pass by DS_SKIP_CUDA_CHECK=1")
    return warning(
        "nvcc",
        f"{found}; torch has CUDA {wanted}",
        why="ops compiled with one CUDA may not build or load beside the other; DeepSpeed's install refuses",
        fix=f"install the CUDA toolkit {wanted} and set CUDA_HOME to it, or try DS_SKIP_CUDA_CHECK=1",
    )


def _describe(gpu: GpuSpec) -> str:
    formats = "bf16 and fp16" if gpu.has_bf16 else "fp16, no bf16"
    return f"{gpu.name}, {format_bytes(gpu.memory_bytes)} each, {formats}"


def _describe_nvcc(nvcc: Nvcc | None) -> str:
    if nvcc is None:
        return "none"
    return f"{_dotted(nvcc.version)} ({nvcc.path})" if nvcc.version else f"none at {nvcc.path}"


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
    """Return a line for each rate and one for each thing that was not measured."""
    measured = tuple(
        ok("measured", f"{rate.name}: {format_rate(rate)} ({rate.source})") for rate in calibration.rates
    )
    return (*measured, *(ok("not measured", what) for what in calibration.left_out))


def format_rate(rate: Rate) -> str:
    """Return a rate as a person reads it, such as "21.4 GB/s"."""
    scale, unit = _SCALES[rate.unit]
    return f"{rate.value / scale:.3g} {unit}"
