"""Space on NVMe that the ranks of one node need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import OffloadDevice

if TYPE_CHECKING:
    from zerofit.planning.estimate.engines.engine import Setup


def nvme_bytes_needed(setup: Setup) -> int:
    """Return the NVMe space of one node's ranks.

    An offloaded optimizer keeps master, two states and the gradient, 16 bytes per element; offloaded weights
    take their own bytes. Source: deepspeed 0.19.8, runtime/swap_tensor/optimizer_utils.py and
    partitioned_param_swapper.py.
    """
    strategy, log, topology = setup.strategy, setup.log, setup.topology
    num_bytes = 0
    for parameter in log.parameters:
        part = -(-parameter.num_elements // topology.num_replicas)
        if strategy.optimizer_offload is OffloadDevice.NVME and parameter.trains and setup.trains:
            num_bytes += 16 * part
        if strategy.param_offload is OffloadDevice.NVME:
            num_bytes += parameter.bytes_per_element * part
    return num_bytes * topology.ranks_per_node
