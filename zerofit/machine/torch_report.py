"""Run as a program: prints facts of torch and DeepSpeed as one line of JSON.

It runs in a process of its own, because importing the two takes seconds, prints to stdout and may crash in
native code, and CUDA can't be shut down once started.
"""

from __future__ import annotations

import json
import os
from typing import Any

OPS = {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "async_io": "AsyncIOBuilder"}
"""The ops that a ZeRO run may need, with DeepSpeed's builder names."""


def main() -> None:
    """Print the report on stdout; output of torch and DeepSpeed goes to stderr."""
    report_to = os.dup(1)
    os.dup2(2, 1)
    report = {"torch": _ask(_torch), "deepspeed": _ask(_deepspeed)}
    os.write(report_to, (json.dumps(report) + "\n").encode())


def _ask(question: Any) -> dict[str, Any]:
    try:
        return {"answer": question(), "error": None}
    # Any exception of a broken installation is the finding.
    except Exception as error:
        return {"answer": None, "error": f"{type(error).__name__}: {_first_line(error)}"}


def _torch() -> dict[str, Any]:
    import torch

    cuda_error = None
    if torch.version.cuda:
        try:
            torch.cuda.init()
        except Exception as error:
            cuda_error = _first_line(error)
    return {"cuda": torch.version.cuda, "cuda_error": cuda_error}


def _deepspeed() -> list[dict[str, Any]]:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    accelerator = get_accelerator()
    ops = []
    for name, class_name in OPS.items():
        builder = accelerator.create_op_builder(class_name)
        ops.append(
            {
                "name": name,
                # An op compiled into the wheel is used only for the accelerator it was compiled for.
                "is_in_wheel": bool(installed_ops.get(name)) and accelerator_name == accelerator._name,
                "is_compatible": _is_compatible(builder),
                "needs_nvcc": isinstance(builder, CUDAOpBuilder) and torch.cuda.is_available(),
            }
        )
    return ops


def _is_compatible(builder: Any) -> bool:
    try:
        return builder is not None and bool(builder.is_compatible())
    # Same as DeepSpeed's probe_is_compatible, which older versions lack.
    except Exception:
        return False


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


if __name__ == "__main__":
    main()
