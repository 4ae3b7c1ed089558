"""A machine described by `--gpus 8xA100-80G --host-ram 1T` and similar flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from zerofit.core.errors import UserError
from zerofit.core.facts import AVAILABLE_SHARE, GpuSpec, Machine
from zerofit.core.rates import RateName
from zerofit.core.units import format_bytes, parse_bytes, parse_bytes_per_s
from zerofit.machine.gpu_catalog import RESERVED_BYTES, catalog_gpu, find_gpu
from zerofit.machine.rates import catalog_rates

if TYPE_CHECKING:
    from collections.abc import Callable

_HOST_BYTES_PER_GPU_BYTE = 1.5
"""Host memory per GPU memory, if not given.

ASSUMPTION: slightly below the smallest of the rented nodes with 8 GPUs: 1152 GiB for 8 x 80 GB
(p4de.24xlarge, 1.8), 768 GiB for 8 x 24 GB (g5.48xlarge, 4.0), 2048 GiB for 8 x 80 GB (p5.48xlarge, 3.2).
Source: https://aws.amazon.com/ec2/instance-types/accelerated-computing/
"""
_CORES_PER_GPU = 6
"""ASSUMPTION: the smallest of the nodes above, 96 hardware threads for 8 GPUs (p4d.24xlarge)."""
_NODE_BYTES_PER_S = 12.5e9
"""ASSUMPTION: one 100 Gb/s card, the slowest of the nodes above (g5.48xlarge)."""

_MAX_GPUS = 576
"""Maximum GPUs per node: the size of the largest NVLink domain.

Source: https://www.nvidia.com/en-us/data-center/nvlink/
"""
_FORMS = (
    # 8xA100-80G, 8 x A100-80G, 8*A100-80G
    re.compile(r"(?P<count>\d+)\s*[x*]\s*(?P<name>\S.*)", re.IGNORECASE),
    # Slurm's gpu:a100:8, and A100-80G:8
    re.compile(r"(?:gpu\s*:\s*)?(?P<name>[^\s:][^:]*?)\s*:\s*(?P<count>\d+)", re.IGNORECASE),
    # 8 A100-80G; in "3090 Ti" the number, of four digits, is the card's.
    re.compile(r"(?P<count>\d{1,3})\s+(?P<name>[a-z0-9].*)", re.IGNORECASE),
)
_BARE_SIZE = re.compile(r"\d+(?:\.\d+)?\s*[GT](?:i?B)?", re.IGNORECASE)
_SEVERAL = re.compile(r"[,;+&]")
_NEGATIVE = re.compile(r"-\s*\d.*")
_MAX_CPU_CORES = 100_000
"""ASSUMPTION: far more than any node has."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecifiedMachine:
    """A machine described on the command line, and the assumptions made about it."""

    machine: Machine
    """One node; its available host memory excludes an allowance for the operating system."""
    assumptions: tuple[str, ...]
    """One sentence for each value that was not given, with the flag that sets it; shown to the user."""


def machine_of_spec(
    gpus: str,
    *,
    num_nodes: int = 1,
    host_ram: str | None = None,
    nvme: str | None = None,
    cpu_cores: int | None = None,
    network: str | None = None,
    host_bandwidth: str | None = None,
) -> SpecifiedMachine:
    """Return one node of a machine described by flags.

    Args:
        gpus: number and model of one node's GPUs, such as "8xA100-80G", "RTX4090", or "4x24G" for GPUs of
            which only the memory is known.
        num_nodes: the nodes of the run.
        host_ram: host memory of one node, such as "1T" (TiB) or "512GB" (10^9).
        nvme: free space on the NVMe disks of one node; None and "0" mean none.
        cpu_cores: physical cores of one node; they affect OMP_NUM_THREADS but no estimate.
        network: rate between nodes, one direction, such as "400Gb/s".
        host_bandwidth: of the host memory of one node, such as "300GB/s".

    Raises:
        UserError: a value can't be parsed, is zero, or names an unknown GPU.
    """
    specs = parse_gpus(gpus)
    assumptions = []
    found = catalog_gpu(specs[0].name, specs[0].memory_bytes)
    is_shared = found is not None and found.shares_host_memory
    if is_shared and host_ram is not None:
        specs = _beside_host(specs, _positive(host_ram, "--host-ram", parse_bytes), host_ram)
    if host_ram is None and is_shared:
        memory_bytes = sum(spec.reserved_bytes for spec in specs)
        assumptions.append(
            f"{format_bytes(memory_bytes)} of host memory on each node, of the memory that it shares with "
            "the GPU: set --host-ram"
        )
    elif host_ram is None:
        memory_bytes = int(_HOST_BYTES_PER_GPU_BYTE * sum(spec.memory_bytes for spec in specs))
        assumptions.append(
            f"{format_bytes(memory_bytes)} of host memory on each node, "
            f"{_HOST_BYTES_PER_GPU_BYTE} times that of its GPUs: set --host-ram"
        )
    else:
        memory_bytes = _positive(host_ram, "--host-ram", parse_bytes)
    if cpu_cores is None:
        cpu_cores = _CORES_PER_GPU * len(specs)
        assumptions.append(f"{cpu_cores} CPU cores on each node, {_CORES_PER_GPU} per GPU: set --cpu-cores")
    elif not 1 <= cpu_cores <= _MAX_CPU_CORES:
        raise _unreadable("--cpu-cores", str(cpu_cores), f"a node has 1 to {_MAX_CPU_CORES} cores")
    if host_bandwidth is None:
        # A GPU's model does not determine the host memory: the same one is in desktops and servers.
        host_bytes_per_s = catalog_rates().of(RateName.HOST_MEMORY).value
        assumptions.append(
            f"{host_bytes_per_s / 1e9:g} GB/s of host memory bandwidth on each node: set --host-bandwidth"
        )
    else:
        host_bytes_per_s = _positive(host_bandwidth, "--host-bandwidth", parse_bytes_per_s)
    if nvme is None:
        assumptions.append("no NVMe disks: set --nvme")
    if network is None and num_nodes > 1:
        assumptions.append("100 Gb/s between the nodes: set --network")
    return SpecifiedMachine(
        machine=Machine(
            gpus=specs,
            num_cpu_cores=cpu_cores,
            host_memory_bytes=memory_bytes,
            host_memory_available_bytes=int(AVAILABLE_SHARE * memory_bytes),
            host_memory_bytes_per_s=host_bytes_per_s,
            nvme_bytes=0 if nvme is None or nvme.strip() == "0" else _positive(nvme, "--nvme", parse_bytes),
            node_bytes_per_s=_network(network, num_nodes),
        ),
        assumptions=tuple(assumptions),
    )


def _beside_host(specs: tuple[GpuSpec, ...], host_bytes: int, said: str) -> tuple[GpuSpec, ...]:
    """Return GPUs that share the host's memory, without what the host keeps of it."""
    total = sum(spec.memory_bytes for spec in specs)
    if host_bytes >= total:
        raise _unreadable("--host-ram", said, f"GPU and host share {format_bytes(total)}")
    return tuple(replace(spec, reserved_bytes=host_bytes // len(specs)) for spec in specs)


def parse_gpus(text: str) -> tuple[GpuSpec, ...]:
    """Return the GPUs of one node from "8xA100-80G", "8 a100-80g", "A100-80G:8", "A100-80G" (one) or "4x24G".

    A bare size is a GPU without further facts: no rates, no compute capability.

    Raises:
        UserError: no GPUs, more than fit in a node, several models; or an unknown or ambiguous name.
    """
    said = text.strip()
    if _SEVERAL.search(said):
        raise _mixed(said)
    count, name = _count_and_name(said)
    if not said or _NEGATIVE.fullmatch(said) or not count.strip("0"):
        raise _no_gpus(text)
    if len(count) > len(str(_MAX_GPUS)) or int(count) > _MAX_GPUS:
        raise _unreadable("--gpus", _shortened(said), f"a node has {_MAX_GPUS} GPUs at most")
    spec = _sized(name) if _BARE_SIZE.fullmatch(name) else find_gpu(name, said=said)
    return (spec,) * int(count)


def _count_and_name(said: str) -> tuple[str, str]:
    if not _BARE_SIZE.fullmatch(said):
        for form in _FORMS:
            match = form.fullmatch(said)
            if match is not None:
                return match["count"], match["name"]
    return "1", said


def _mixed(said: str) -> UserError:
    return UserError(
        "gpus-mixed",
        "all GPUs of a plan must be of one kind",
        found=f"--gpus {said}",
        why="every rank gets the same share, so the slowest GPU would set the pace",
        fix="name one kind, such as --gpus 8xA100-80G; for a mix, the smallest with the total number",
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sized(size: str) -> GpuSpec:
    try:
        memory_bytes = parse_bytes(size)
    except ValueError as error:
        raise _unreadable("--gpus", size, str(error)) from None
    if memory_bytes <= RESERVED_BYTES:
        raise _unreadable(
            "--gpus", size, f"the driver alone reserves {format_bytes(RESERVED_BYTES)} of a GPU"
        )
    return GpuSpec(name=f"GPU of {size}", memory_bytes=memory_bytes, reserved_bytes=RESERVED_BYTES)


def _network(network: str | None, num_nodes: int) -> float | None:
    if network is not None:
        return _positive(network, "--network", parse_bytes_per_s)
    return _NODE_BYTES_PER_S if num_nodes > 1 else None


def _positive(text: str, flag: str, parse: Callable[[str], _Number]) -> _Number:
    try:
        number = parse(text)
    except ValueError as error:
        raise _unreadable(flag, text, str(error)) from None
    if number <= 0:
        raise _unreadable(flag, text, "it must be above zero")
    return number


def _unreadable(flag: str, text: str, why: str) -> UserError:
    examples = {
        "--gpus": "4x24G",
        "--host-ram": "512G",
        "--nvme": "7T",
        "--cpu-cores": "32",
        "--network": "400Gb/s",
        "--host-bandwidth": "300GB/s",
    }
    return UserError(
        "machine-unreadable",
        f"the value of {flag} can't be used",
        found=f"{flag} {_shortened(text)}",
        why=why,
        fix=f"write it as in {flag} {examples[flag]}, or leave {flag} out",
    )


def _no_gpus(text: str) -> UserError:
    return UserError(
        "zero-gpus",
        "a plan needs at least one GPU",
        found=f"--gpus {text!r}" if not text.strip() else f"--gpus {text.strip()}",
        why="the planner computes the memory and the time of GPUs",
        fix="give their number and model, such as --gpus 8xA100-80G; on a machine without GPUs test with "
        "`zerofit launch --cpu`",
    )
