"""The words of layouts: where the model lies, and what a layout lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.strategy import OffloadDevice, ZeroStage
from zerofit.units import format_bytes

if TYPE_CHECKING:
    from zerofit.estimates import MemoryEstimate
    from zerofit.plan import Topology
    from zerofit.strategy import Strategy

TIME_WORDS = "to read and move weights, at the peaks of memory and links: computed, not measured"
"""What a plan's time is."""
_OFFLOADED = {OffloadDevice.CPU: ", weights in host memory", OffloadDevice.NVME: ", weights on NVMe"}


def layout_words(strategy: Strategy, topology: Topology) -> str:
    """Return where the model lies: "whole model on each of 8 GPUs", "ZeRO-3 over 8 GPUs"."""
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        offloaded = _OFFLOADED.get(strategy.param_offload, "")
        return f"ZeRO-3 {'over' if topology.world_size > 1 else 'on'} {ranks_words(topology)}{offloaded}"
    if topology.world_size == 1:
        return f"whole model on {ranks_words(topology)}"
    return f"whole model on each of {ranks_words(topology)}"


def ranks_words(topology: Topology) -> str:
    """Return the ranks: "8 GPUs", "16 GPUs of 2 nodes", "one GPU", "the CPU", "2 ranks on the CPU"."""
    if topology.on_cpu:
        words = "the CPU" if topology.world_size == 1 else f"{topology.world_size} ranks on the CPU"
    else:
        words = "one GPU" if topology.world_size == 1 else f"{topology.world_size} GPUs"
    return f"{words} of {topology.num_nodes} nodes" if topology.num_nodes > 1 else words


def needs_words(estimate: MemoryEstimate, limit: int, where: str) -> str:
    """Return what is needed of what there is: "needs 31.4 GiB of 22.3 GiB on each GPU"."""
    return f"needs {format_bytes(estimate.peak_bytes)} of {format_bytes(limit)} {where}"


def duration(seconds: float) -> str:
    """Return a time as a person would say it: "40 s", "12 min", "3.1 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
