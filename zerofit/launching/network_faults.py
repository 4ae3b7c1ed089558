"""What NCCL, libfabric and UCX say of a network that fails: the device, the peer, and what to look at."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.launching.failures import KnownFailure

NETWORK_FAILED = "network-failed"
_COMPLETION = re.compile(
    r"completion from peer (?P<peer>[^\s<]{1,60})(?:<\d+>)? with "
    r"(?:status=(?:(?P<name>IBV_WC_\w{1,40})\()?(?P<status>\d{1,3})\)?|error (?P<error>\d{1,3}))"
)
"""NCCL's transport/net_ib.cc: "status=12", "status=IBV_WC_RETRY_EXC_ERR(12)", before 2.19 "error 12"."""
_HOST = re.compile(r"(?P<host>[A-Za-z][\w.-]{0,100}):\d+:\d+ \[")
"""In front of NCCL's messages: HOST:PID:THREAD [GPU]."""
_DEVICE = re.compile(
    r"\bhca (?P<hca>[\w/:.-]{1,40})"
    r"|NET/IB\w? ?: ?(?P<event>[\w.-]{1,40}?)(?::\d+)? Got async"
    r"|retry count exceeded on (?P<ucx>[\w.-]{1,40})"
    r"|mlx5_core \S{1,40} (?P<kernel>[\w.-]{1,40}): Link down"
)
_SOCKET = re.compile(
    r"(?:Call to \w{1,20} (?:from|to) |Read error \[|Connect to )(?P<peer>[\d.]{7,15}|[\w.-]{1,60}?)[<\]: ]"
)
_ACCESS = (
    "the adapter was refused access to memory: mostly of a GPU (GPUDirect), by PCIe's ACS, an IOMMU or a "
    "missing nvidia-peermem",
    "NCCL_NET_GDR_LEVEL=LOC in front of the command leaves GPUDirect out; lsmod | grep peermem; ",
)
_STATUS = {
    4: ("local protection error", *_ACCESS),
    9: ("invalid request", *_ACCESS),
    10: ("remote access error", *_ACCESS),
    11: ("remote operation error", *_ACCESS),
    12: (
        "retries exceeded",
        "the peer no longer answers: a link, a cable, a switch or its adapter failed, or its process had "
        "ended, which its own log shows",
        "",
    ),
    13: (
        "receiver not ready",
        "the peer took no message in time: its process hangs or has ended, or the network is overloaded",
        "",
    ),
}
"""Of the verbs' enum ibv_wc_status (rdma-core, libibverbs/verbs.h): words, why, and what to type first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFault:
    """A failure of the network as one line describes it; None for what it does not name."""

    host: str | None = None
    device: str | None = None
    peer: str | None = None
    status: int | None = None
    """The status of a completion in InfiniBand's verbs."""


def network_fault(text: str) -> NetworkFault:
    """Return what a line says of a failed network."""
    completion, socket = _COMPLETION.search(text), _SOCKET.search(text)
    host, device = _HOST.search(text), _DEVICE.search(text)
    status = None if completion is None else completion["status"] or completion["error"]
    peer = completion or socket
    return NetworkFault(
        host=host and host["host"],
        device=None if device is None else next(name for name in device.groups() if name),
        peer=peer and peer["peer"],
        status=None if status is None else int(status),
    )


def named_fault(failure: KnownFailure, text: str) -> KnownFailure:
    """Return the failure of a network in the words of the line that shows it."""
    fault = network_fault(text)
    words, why, first = _STATUS.get(fault.status or 0, ("", "", ""))
    if fault.status is not None and not words:
        words = f"status {fault.status}"
    here = " ".join(filter(None, (fault.host, fault.device)))
    way = f"{here} -> {fault.peer}" if here and fault.peer else here or (fault.peer and f"to {fault.peer}")
    said = ", ".join(filter(None, (words, way)))
    fix = failure.fix
    if fault.peer or fault.device:
        peer = fault.peer or "the peer"
        fix = (
            f"{first}{f'ibstat {fault.device or str()}'.strip()} on {fault.host or 'this node'}, ibstat on "
            f"{peer}, and the log of {peer}: an earlier error there is the cause"
        )
    cause = f"{failure.cause}: {said}" if said else failure.cause
    return replace(failure, cause=cause, why=why or failure.why, fix=fix)
