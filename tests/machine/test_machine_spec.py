"""Machines described by flags: what is assumed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from refusals import refusal

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec
from zerofit.core.rates import RateName
from zerofit.core.units import GIB, MIB, TIB
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.machine.machine_spec import machine_of_spec, parse_gpus
from zerofit.machine.rates import catalog_rates

_A100 = find_gpu("A100-80G")


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("8xA100-80G", (_A100,) * 8),
        ("8 x a100-80g", (_A100,) * 8),
        ("A100-80G", (_A100,)),
        (" 1xA100-80G ", (_A100,)),
        ("4x4090", (find_gpu("RTX4090"),) * 4),
        ("2x RTX 3090 Ti", (find_gpu("RTX3090Ti"),) * 2),
        ("3090 Ti", (find_gpu("RTX3090Ti"),)),
        ("8 A100-80G", (_A100,) * 8),
        ("A100-80G:8", (_A100,) * 8),
        ("gpu:a100-80g:8", (_A100,) * 8),
    ],
)
def test_gpus_are_a_count_and_a_name(text: str, gpus: tuple[GpuSpec, ...]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    ("text", "num_gpus", "memory_bytes"),
    [
        ("4x24G", 4, 24 * GIB),
        ("24GiB", 1, 24 * GIB),
        ("2 x 24GB", 2, 24 * 10**9),
        ("1.5T", 1, 1536 * GIB),
    ],
)
def test_a_bare_size_is_a_gpu_of_which_nothing_else_is_known(
    text: str, num_gpus: int, memory_bytes: int
) -> None:
    gpus = parse_gpus(text)
    assert len(gpus) == num_gpus
    (gpu,) = set(gpus)
    assert gpu == GpuSpec(name=gpu.name, memory_bytes=memory_bytes, reserved_bytes=512 * MIB)


def test_all_that_is_said_holds_and_nothing_is_assumed() -> None:
    said = machine_of_spec(
        "8xA100-80G",
        num_nodes=2,
        host_ram="1T",
        nvme="7TB",
        cpu_cores=96,
        network="400Gb/s",
        host_bandwidth="300GB/s",
    )
    assert said.assumptions == ()
    machine = said.machine
    assert machine.gpus == (_A100,) * 8
    assert machine.host_memory_bytes == TIB
    assert machine.host_memory_available_bytes == int(0.95 * TIB)
    assert (machine.num_cpu_cores, machine.nvme_bytes, machine.node_bytes_per_s) == (96, 7 * 10**12, 50e9)
    assert machine.host_memory_bytes_per_s == 300e9


def test_what_is_not_said_is_assumed_aloud() -> None:
    said = machine_of_spec("8xA100-80G", num_nodes=2)
    assert said.assumptions == (
        "960.0 GiB of host memory on each node, 1.5 times that of its GPUs: set --host-ram",
        "48 CPU cores on each node, 6 per GPU: set --cpu-cores",
        "100 GB/s of host memory bandwidth on each node: set --host-bandwidth",
        "no NVMe disks: set --nvme",
        "100 Gb/s between the nodes: set --network",
    )
    machine = said.machine
    assert (machine.host_memory_bytes, machine.num_cpu_cores) == (960 * GIB, 48)
    assert (machine.nvme_bytes, machine.node_bytes_per_s) == (0, 12.5e9)
    # What the time model takes where nothing is said.
    assert machine.host_memory_bytes_per_s == catalog_rates().of(RateName.HOST_MEMORY).value


def test_a_gpu_that_shares_the_host_s_memory_leaves_the_host_a_part_of_it() -> None:
    plain = machine_of_spec("GB10")
    (gpu,) = plain.machine.gpus
    assert gpu.usable_bytes == 112 * GIB
    assert plain.machine.host_memory_bytes == gpu.reserved_bytes
    assert plain.assumptions[0] == (
        "7.6 GiB of host memory on each node, of the memory that it shares with the GPU: set --host-ram"
    )
    said = machine_of_spec("GB10", host_ram="32G").machine
    assert said.host_memory_bytes == 32 * GIB
    assert said.gpus[0].usable_bytes == gpu.memory_bytes - 32 * GIB
    with pytest.raises(UserError) as caught:
        machine_of_spec("GB10", host_ram="128G")
    assert "GPU and host share 119.6 GiB" in str(caught.value)


def test_one_node_needs_no_network() -> None:
    said = machine_of_spec("A100-80G", host_ram="256GiB", cpu_cores=8, nvme="0", host_bandwidth="50GB/s")
    assert said.assumptions == ()
    assert said.machine.nvme_bytes == 0
    assert said.machine.node_bytes_per_s is None


REFUSED: tuple[dict[str, Any], ...] = (
    {"gpus": "0xA100-80G"},
    {"gpus": " "},
    {"gpus": "-1xA100-80G"},
    {"gpus": "8xA100-80G,4xT4"},
    {"gpus": "9" * 5000 + "xT4"},
    {"gpus": "577xT4"},
    {"gpus": "2x0.25G"},
    {"host_bandwidth": "300"},
    {"host_ram": "512"},
    {"host_ram": "0G"},
    {"cpu_cores": 0},
    {"network": "400"},
)


def test_what_makes_no_machine_is_refused(golden: Callable[[str, str], None]) -> None:
    refused = [refusal(machine_of_spec, **({"gpus": "8xA100-80G"} | said)) for said in REFUSED]
    golden("".join(f"{error}\n" for error in refused), "machine/specs.txt")
