"""The links between GPUs and to the host, against a fake NVML."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from zerofit.core.facts import GpuSpec
from zerofit.core.units import GIB
from zerofit.machine.gpu_links import with_links


class _NvmlError(Exception):
    pass


@dataclass
class _FakeNvml:
    """Stands for pynvml on a node with these links; None is what the driver does not tell."""

    generation: int | None = 4
    num_lanes: int = 16
    joined: frozenset[frozenset[int]] | None = frozenset()
    """The pairs of GPUs between which NVLink can be used."""
    num_links: int = 0
    wire_mb_per_s: int | None = None

    NVMLError = _NvmlError
    NVML_SUCCESS = 0
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    NVML_NVLINK_MAX_LINKS = 36

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        if self.generation is None:
            raise _NvmlError("Not Supported")
        return self.generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return self.num_lanes

    def nvmlDeviceGetP2PStatus(self, handle: int, other: int, capability: int) -> int:  # noqa: N802
        assert capability == self.NVML_P2P_CAPS_INDEX_NVLINK
        if self.joined is None:
            raise _NvmlError("Not Supported")
        return 0 if frozenset({handle, other}) in self.joined else 5

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        assert fields == [self.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        if self.wire_mb_per_s is None:
            return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.wire_mb_per_s))]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= self.num_links + 2:
            raise _NvmlError("Invalid Argument")
        return int(link < self.num_links)


def _all_pairs(num_gpus: int) -> frozenset[frozenset[int]]:
    return frozenset(frozenset({a, b}) for a in range(num_gpus) for b in range(a))


def _pairs(*pairs: tuple[int, int]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, pairs))


_KNOWN = GpuSpec(
    name="known", memory_bytes=GIB, peer_bytes_per_s=300e9, host_bytes_per_s=31.5e9, has_fast_links=True
)
_SUPERCHIP = GpuSpec(name="on C2C", memory_bytes=GIB, peer_bytes_per_s=450e9, host_bytes_per_s=450e9)
_UNKNOWN = GpuSpec(name="unknown", memory_bytes=GIB)


def _links(spec: GpuSpec, num_gpus: int, nvml: _FakeNvml) -> tuple[float | None, float | None]:
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
            _FakeNvml(joined=_all_pairs(8), num_links=12, wire_mb_per_s=25000),
            (300, 31.51),
            id="8 x A100 on NVSwitch",
        ),
        pytest.param(
            _UNKNOWN,
            8,
            _FakeNvml(generation=5, joined=_all_pairs(8), num_links=18, wire_mb_per_s=26562),
            (450, 63.02),
            id="8 x H100: the wire's rate is above what the data sheet counts",
        ),
        pytest.param(
            _UNKNOWN,
            4,
            _FakeNvml(generation=3, joined=_pairs((0, 1), (1, 2), (2, 3)), num_links=6, wire_mb_per_s=25781),
            (150, 15.75),
            id="V100s that reach each other over others",
        ),
        pytest.param(
            _UNKNOWN,
            2,
            _FakeNvml(joined=_all_pairs(2), num_links=4, wire_mb_per_s=14062),
            (56.25, 31.51),
            id="two RTX 3090 with a bridge",
        ),
        pytest.param(
            _KNOWN,
            4,
            _FakeNvml(joined=_pairs((0, 1), (2, 3)), num_links=4, wire_mb_per_s=14062),
            (31.51, 31.51),
            id="bridges in pairs leave the ring to PCIe",
        ),
        pytest.param(_KNOWN, 1, _FakeNvml(generation=3), (300, 15.75), id="one GPU has no peer to ask about"),
        pytest.param(
            _KNOWN, 2, _FakeNvml(generation=None, joined=None), (300, 31.5), id="nothing told: the catalog's"
        ),
        pytest.param(
            _KNOWN, 2, _FakeNvml(joined=_all_pairs(2)), (300, 31.51), id="NVLink of a rate that is not told"
        ),
        pytest.param(_SUPERCHIP, 1, _FakeNvml(generation=5), (450, 450), id="a host link that is no PCIe"),
    ],
)
def test_links_are_what_the_driver_tells_else_the_catalogs(
    spec: GpuSpec, num_gpus: int, nvml: _FakeNvml, links: tuple[float | None, float | None]
) -> None:
    assert _links(spec, num_gpus, nvml) == links


@pytest.mark.parametrize(
    ("spec", "num_gpus", "nvml", "has_fast_links"),
    [
        (_UNKNOWN, 8, _FakeNvml(joined=_all_pairs(8), num_links=12, wire_mb_per_s=25000), True),
        (_UNKNOWN, 2, _FakeNvml(joined=_all_pairs(2), num_links=4, wire_mb_per_s=14062), True),
        (_KNOWN, 4, _FakeNvml(joined=_pairs((0, 1), (2, 3))), False),
        (_KNOWN, 2, _FakeNvml(joined=None), True),
        (_KNOWN, 1, _FakeNvml(), True),
        (_UNKNOWN, 1, _FakeNvml(), False),
    ],
)
def test_links_are_fast_where_nvlink_joins_all_gpus_else_as_the_catalog_has_it(
    spec: GpuSpec, num_gpus: int, nvml: _FakeNvml, has_fast_links: bool
) -> None:
    found = with_links(dict.fromkeys(range(num_gpus), spec), nvml)
    assert {gpu.has_fast_links for gpu in found} == {has_fast_links}
