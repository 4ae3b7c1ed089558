"""Bandwidth between this node's GPUs and to the host, through NVML: NVLink, else PCIe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zerofit.core.facts import GpuSpec

_PCIE_LANE_BYTES_PER_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""One lane, one direction, after encoding (generation 6: 242 of the 256 bytes of a flit).

Source: https://pcisig.com/faq
"""
_FASTEST_PCIE = 16 * _PCIE_LANE_BYTES_PER_S[6]
"""A faster host link is not PCIe, such as NVLink-C2C of a GH200; NVML only knows PCIe."""
_NVLINK_BYTES_PER_S = (14.0625e9, 20e9, 25e9, 50e9)
"""Data-sheet rates of one NVLink, one direction: GA102, P100, V100 to H100, Blackwell.

NVML reports the wire rate, up to 6.25 % higher: 26.562 GB/s for a link of an H100.
Source: https://www.nvidia.com/en-us/data-center/nvlink/; "Third-Generation NVLink" in
https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf
"""
_ABOVE_NOMINAL = 1.08


def with_links(specs: Mapping[int, GpuSpec], library: Any) -> Iterator[GpuSpec]:
    """Yield each GPU with the rates of its links; unknown rates are left unchanged.

    NVLink counts if it connects all these GPUs, directly or through others, so that a ring over all of them
    is fast. With bridges between pairs of four cards, the ring uses PCIe.

    Args:
        specs: the GPUs that a run may use, by NVML index.
        library: NVML, initialized, or None.
    """
    is_joined = _nvlink_joins(tuple(specs), library) if len(specs) > 1 else None
    for index, spec in specs.items():
        host = _pcie_bytes_per_s(index, library)
        if host is None or (spec.host_bytes_per_s or 0) > _FASTEST_PCIE:
            host = spec.host_bytes_per_s
        peer = spec.peer_bytes_per_s
        if is_joined:
            peer = _nvlink_bytes_per_s(index, library) or peer
        elif is_joined is not None:
            peer = host
        yield replace(
            spec,
            host_bytes_per_s=host,
            peer_bytes_per_s=peer,
            has_fast_links=spec.has_fast_links if is_joined is None else is_joined,
        )


def _pcie_bytes_per_s(index: int, library: Any) -> float | None:
    """Return the rate of the slot, one direction; the current rate is lower while the GPU is idle."""
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        generation = library.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        num_lanes = library.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except library.NVMLError:
        return None
    lane = _PCIE_LANE_BYTES_PER_S.get(generation)
    return lane * num_lanes if lane is not None and num_lanes > 0 else None


def _nvlink_joins(indices: tuple[int, ...], library: Any) -> bool | None:
    """Return True if NVLink connects every GPU to every other, directly or not; None if unknown."""
    reached, waiting = {indices[0]}, [indices[0]]
    try:
        handles = {index: library.nvmlDeviceGetHandleByIndex(index) for index in indices}
        while waiting:
            here = waiting.pop()
            for other in set(indices) - reached:
                status = library.nvmlDeviceGetP2PStatus(
                    handles[here], handles[other], library.NVML_P2P_CAPS_INDEX_NVLINK
                )
                if status == library.NVML_P2P_STATUS_OK:
                    reached.add(other)
                    waiting.append(other)
    except library.NVMLError:
        return None
    return reached == set(indices)


def _nvlink_bytes_per_s(index: int, library: Any) -> float | None:
    """Return the rate of all active NVLinks of the GPU together, one direction; None if unknown."""
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        (speed,) = library.nvmlDeviceGetFieldValues(handle, [library.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    except library.NVMLError:
        return None
    wire = speed.value.uiVal * 1e6
    if speed.nvmlReturn != library.NVML_SUCCESS or wire <= 0:
        return None
    links = (_is_active(handle, link, library) for link in range(library.NVML_NVLINK_MAX_LINKS))
    return sum(links) * _nominal(wire) or None


def _nominal(wire_bytes_per_s: float) -> float:
    """Return a link's data-sheet rate, or the given one if none is close."""
    for nominal in _NVLINK_BYTES_PER_S:
        # P100 links report slightly less than their 20 GB/s.
        if nominal * 0.97 <= wire_bytes_per_s <= nominal * _ABOVE_NOMINAL:
            return nominal
    return wire_bytes_per_s


def _is_active(handle: Any, link: int, library: Any) -> bool:
    try:
        return bool(library.nvmlDeviceGetNvLinkState(handle, link) == library.NVML_FEATURE_ENABLED)
    except library.NVMLError:
        return False
