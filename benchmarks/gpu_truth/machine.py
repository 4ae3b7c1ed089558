"""The measured machine, also where only torch knows its GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from measuring.ladder import CPU

from gpu_truth.results import MachineRecord
from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine
from zerofit.machine.gpu_catalog import with_catalog_rates
from zerofit.machine.gpus import probe_driver
from zerofit.machine.programs import output_of
from zerofit.machine.rates import cpu_name
from zerofit.machine.this_node import probe_machine

_LIMIT_S = 120
"""ASSUMPTION: torch imports and finds the GPU within that, from a cold disk too."""
_ASK_TORCH = """
import json, torch
found = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps(found and [found.name, found.total_memory, found.major, found.minor]))
"""


def find_machine(*, on_cpu: bool) -> Machine:
    """Return this machine with the one GPU that is measured, the first that CUDA leaves visible.

    Args:
        on_cpu: whether the CPU is measured though there may be a GPU.

    Raises:
        UserError: there is no GPU, and on_cpu does not say that none is wanted.
    """
    machine = probe_machine(may_be_unreadable=True)
    if on_cpu:
        return replace(machine, gpus=())
    gpus = machine.gpus[:1] or _gpus_of_torch()
    if not gpus:
        raise UserError(
            "no-gpu-to-measure",
            "there is no GPU to measure",
            found="neither the driver's library nor torch lists one",
            why="the measurements are of a GPU",
            fix="run it where nvidia-smi lists a GPU, or say --cpu for small models on the CPU",
        )
    return replace(machine, gpus=gpus)


def record_of(machine: Machine) -> MachineRecord:
    """Return what is kept of a machine beside its measurements."""
    gpu = machine.gpus[0] if machine.gpus else None
    return MachineRecord(
        device=gpu.name if gpu else CPU,
        memory_bytes=gpu.usable_bytes if gpu else machine.host_memory_bytes,
        compute_capability=gpu.compute_capability if gpu else None,
        driver=_driver() if gpu else None,
        num_cpu_cores=machine.num_cpu_cores,
        cpu=cpu_name(),
        host_memory_bytes=machine.host_memory_bytes,
    )


def gpu_of(record: MachineRecord) -> GpuSpec | None:
    """Return the GPU of a record, with the rates of today's catalog; None for a CPU."""
    if record.device == CPU:
        return None
    return with_catalog_rates(
        GpuSpec(
            name=record.device,
            memory_bytes=record.memory_bytes,
            compute_capability=record.compute_capability,
        )
    )


def _gpus_of_torch() -> tuple[GpuSpec, ...]:
    """Return the first GPU as torch sees it, asked in another process: CUDA, once started, holds memory."""
    output, why = output_of((sys.executable, "-c", _ASK_TORCH), limit_s=_LIMIT_S, environ=os.environ)
    found = None if why else json.loads(output)
    if found is None:
        return ()
    name, memory_bytes, major, minor = found
    # torch's total leaves out what the driver keeps, so there is nothing more to take off.
    return (
        with_catalog_rates(GpuSpec(name=name, memory_bytes=memory_bytes, compute_capability=(major, minor))),
    )


def _driver() -> str | None:
    """Return the driver's version, by its library or else by nvidia-smi."""
    driver = probe_driver()
    if driver is not None:
        return driver.version
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0] if lines else None
