"""The GPUs of probe_machine and their links, against a fake NVML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml
from refusals import refusal

from zerofit.core.facts import GpuSpec
from zerofit.core.units import GIB
from zerofit.machine.gpu_links import with_links
from zerofit.machine.gpus import probe_driver, probe_gpus, visible_indices
from zerofit.machine.this_node import probe_machine
from zerofit.machine.toolchain import Driver

_UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444")


@pytest.mark.parametrize(
    ("visible_devices", "indices"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("-1", ()),
        (" 1 , 3 ", (1, 3)),
        ("0,7,1", (0,)),
        ("0,-1,1", (0,)),
        ("0,1,0", ()),
        ("GPU-bbbb3333", (2,)),
        ("GPU-cccc,GPU-aaaa1", (3, 0)),
        ("GPU-aaaa", ()),
        ("MIG-aaaa1111", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    visible_devices: str | None, indices: tuple[int, ...]
) -> None:
    assert visible_indices(visible_devices, _UUIDS) == indices


_A = GpuSpec(name="NVIDIA A", memory_bytes=80 * GIB, reserved_bytes=GIB, compute_capability=(8, 0))
_B = GpuSpec(name="NVIDIA B", memory_bytes=24 * GIB, compute_capability=(7, 5))


@pytest.mark.parametrize(
    ("environ", "gpu_ids", "gpus"),
    [
        pytest.param({}, None, (_A, _A, _B), id="all that answer"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "2,0"}, None, (_B, _A), id="in the user's order"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, None, (), id="an empty list hides all"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, None, (_B,), id="by UUID"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0"}, (1, 2), (_A, _B), id="--gpu-ids takes precedence"),
    ],
)
def test_gpus_are_those_that_the_run_would_see(
    environ: dict[str, str], gpu_ids: tuple[int, ...] | None, gpus: tuple[GpuSpec, ...]
) -> None:
    nvml = FakeNvml()
    assert probe_machine(gpu_ids=gpu_ids, environ=environ, nvml=nvml).gpus == gpus
    assert nvml.num_started == 0


def test_a_gpu_of_the_catalog_gets_its_rates_and_keeps_its_memory() -> None:
    nvml = FakeNvml()
    nvml.product_names = {"A": "A100-SXM4-80GB"}
    (gpu,) = probe_machine(gpu_ids=(0,), environ={}, nvml=nvml).gpus
    assert (gpu.memory_bytes, gpu.usable_bytes) == (80 * GIB, 79 * GIB)
    assert (gpu.bf16_flops_per_s, gpu.peer_bytes_per_s, gpu.host_bytes_per_s) == (312e12, 300e9, 31.5e9)


def test_driver_states_its_own_version_and_the_newest_cuda() -> None:
    assert probe_driver(nvml=FakeNvml()) == Driver(version="550.54.15", cuda_version=(12, 4), num_gpus=4)


def _gpus(root: Path, visible_devices: str | None, nvml: FakeNvml, **options: Any) -> tuple[GpuSpec, ...]:
    return probe_gpus(gpu_ids=None, visible_devices=visible_devices, root=root, nvml=nvml, **options)


def test_no_driver_means_no_gpus(tmp_path: Path) -> None:
    nvml = FakeNvml(has_driver=False)
    assert _gpus(tmp_path, None, nvml) == ()
    assert probe_driver(nvml=nvml) is None


@pytest.mark.parametrize("visible_devices", ["", " ", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose_are_no_mistake(tmp_path: Path, visible_devices: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert _gpus(tmp_path, visible_devices, FakeNvml()) == ()
    assert _gpus(tmp_path, visible_devices, FakeNvml(has_driver=False)) == ()


def test_gpus_that_can_not_be_read_are_refused_unless_that_is_allowed(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / "dev" / name).touch()
    texts = []
    for visible_devices, has_driver in (("MIG-aaaa1111", True), (None, False)):
        nvml = FakeNvml(has_driver=has_driver)
        texts.append(f"{refusal(_gpus, tmp_path, visible_devices, nvml)}\n")
        assert _gpus(tmp_path, visible_devices, nvml, may_be_unreadable=True) == ()
    golden("".join(texts), "machine/gpus-unreadable.txt")


def test_wrong_gpu_ids_are_refused(golden: Callable[[str, str], None]) -> None:
    texts = [
        f"{refusal(probe_machine, gpu_ids=gpu_ids, environ={}, nvml=FakeNvml())}\n"
        for gpu_ids in ((0, 7), (1, 1), (-1,))
    ]
    golden("".join(texts), "machine/gpu-ids.txt")


def _links_of(**told: Any) -> FakeNvml:
    """Return a node of eight GPUs that tells of its links."""
    return FakeNvml(**{"names": ("A",) * 8, "generation": 4, "joined": frozenset(), **told})


def _all_pairs(num_gpus: int) -> frozenset[frozenset[int]]:
    return frozenset(frozenset({a, b}) for a in range(num_gpus) for b in range(a))


def _pairs(*pairs: tuple[int, int]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, pairs))


_KNOWN = GpuSpec(
    name="known", memory_bytes=GIB, peer_bytes_per_s=300e9, host_bytes_per_s=31.5e9, has_fast_links=True
)
_SUPERCHIP = GpuSpec(name="on C2C", memory_bytes=GIB, peer_bytes_per_s=450e9, host_bytes_per_s=450e9)
_UNKNOWN = GpuSpec(name="unknown", memory_bytes=GIB)


def _links(spec: GpuSpec, num_gpus: int, nvml: FakeNvml) -> tuple[float | None, float | None]:
    """Return (peer, host) in GB/s, the same for all GPUs."""
    (rates,) = {
        (gpu.peer_bytes_per_s, gpu.host_bytes_per_s)
        for gpu in with_links(dict.fromkeys(range(num_gpus), spec), nvml)
    }
    peer, host = (None if rate is None else round(rate / 1e9, 2) for rate in rates)
    return peer, host


@pytest.mark.parametrize(
    ("spec", "num_gpus", "nvml", "links"),
    [
        pytest.param(
            _UNKNOWN,
            8,
            _links_of(joined=_all_pairs(8), num_links=12, wire_mb_per_s=25000),
            (300, 31.51),
            id="8 x A100 on NVSwitch",
        ),
        pytest.param(
            _UNKNOWN,
            8,
            _links_of(generation=5, joined=_all_pairs(8), num_links=18, wire_mb_per_s=26562),
            (450, 63.02),
            id="8 x H100: the wire's rate is above what the data sheet counts",
        ),
        pytest.param(
            _UNKNOWN,
            4,
            _links_of(generation=3, joined=_pairs((0, 1), (1, 2), (2, 3)), num_links=6, wire_mb_per_s=25781),
            (150, 15.75),
            id="V100s that reach each other over others",
        ),
        pytest.param(
            _UNKNOWN,
            2,
            _links_of(joined=_all_pairs(2), num_links=4, wire_mb_per_s=14062),
            (56.25, 31.51),
            id="two RTX 3090 with a bridge",
        ),
        pytest.param(
            _KNOWN,
            4,
            _links_of(joined=_pairs((0, 1), (2, 3)), num_links=4, wire_mb_per_s=14062),
            (31.51, 31.51),
            id="bridges in pairs leave the ring to PCIe",
        ),
        pytest.param(_KNOWN, 1, _links_of(generation=3), (300, 15.75), id="one GPU has no peer to ask about"),
        pytest.param(
            _KNOWN, 2, _links_of(generation=None, joined=None), (300, 31.5), id="nothing told: the catalog's"
        ),
        pytest.param(
            _KNOWN, 2, _links_of(joined=_all_pairs(2)), (300, 31.51), id="NVLink of a rate that is not told"
        ),
        pytest.param(_SUPERCHIP, 1, _links_of(generation=5), (450, 450), id="a host link that is no PCIe"),
    ],
)
def test_links_are_what_the_driver_tells_else_the_catalogs(
    spec: GpuSpec, num_gpus: int, nvml: FakeNvml, links: tuple[float | None, float | None]
) -> None:
    assert _links(spec, num_gpus, nvml) == links


@pytest.mark.parametrize(
    ("spec", "num_gpus", "nvml", "has_fast_links"),
    [
        (_UNKNOWN, 8, _links_of(joined=_all_pairs(8), num_links=12, wire_mb_per_s=25000), True),
        (_UNKNOWN, 2, _links_of(joined=_all_pairs(2), num_links=4, wire_mb_per_s=14062), True),
        (_KNOWN, 4, _links_of(joined=_pairs((0, 1), (2, 3))), False),
        (_KNOWN, 2, _links_of(joined=None), True),
        (_KNOWN, 1, _links_of(), True),
        (_UNKNOWN, 1, _links_of(), False),
    ],
)
def test_links_are_fast_where_nvlink_joins_all_gpus_else_as_the_catalog_has_it(
    spec: GpuSpec, num_gpus: int, nvml: FakeNvml, has_fast_links: bool
) -> None:
    found = with_links(dict.fromkeys(range(num_gpus), spec), nvml)
    assert {gpu.has_fast_links for gpu in found} == {has_fast_links}
