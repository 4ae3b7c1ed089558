"""Checks before any rank starts: equal nodes, as planned, and a working all-reduce between them."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from zerofit.core.errors import UserError, first_line
from zerofit.core.plan import Plan, plan_to_json
from zerofit.core.strategy import OffloadDevice
from zerofit.core.units import GIB, format_bytes
from zerofit.launching.clusters.job import Job, code_digest
from zerofit.launching.clusters.meeting import EXIT_UNREACHABLE, Meeting, within
from zerofit.machine.limits import may_lock_all_memory, probe_disk
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions

_GROUP_LIMIT_S = 30.0
"""ASSUMPTION: creating a group of all nodes and an all-reduce take less, unless something is wrong."""
_BARRIER_LIMIT_S = 20.0
"""Shorter, so that node 0 names the nodes that can't reach each other before these give up and disconnect."""
_ALL_REDUCE_LIMIT_S = 40.0
"""Longer, so that torch can say what failed."""
_ALL_REDUCE_BYTES = 4 << 20
_SHOWN_NODES = 3
_CLOCK_S = 5.0
_LEAST_FREE_BYTES = 10 * GIB
_LEAST_MEMORY_SHARE = 0.95
"""Memory of GPUs of one kind differs by some MiB between drivers. ASSUMPTION."""


def facts_of_node(plan: Plan, job: Job) -> dict[str, Any]:
    """Return this node's facts for the other nodes."""
    import resource

    gpus = () if plan.topology.on_cpu else probe_machine(may_be_unreadable=True).gpus
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_limited = memlock != resource.RLIM_INFINITY and not may_lock_all_memory()
    return {
        "versions": {
            name: version for name, version in asdict(probe_versions()).items() if version is not None
        },
        "plan": hashlib.sha256(plan_to_json(plan).encode()).hexdigest(),
        "code": code_digest(job.target),
        "gpus": [(gpu.name, gpu.memory_bytes) for gpu in gpus],
        "free_bytes": probe_disk("run folder", Path(job.run_folder)).free_bytes,
        "memlock_bytes": memlock if is_limited else None,
    }


def check_nodes(plan: Plan, names: tuple[str, ...], facts: tuple[dict[str, Any], ...]) -> None:
    """Check that all nodes can run one plan together; each node reaches the same result.

    Raises:
        UserError: a node differs from node 0, or lacks GPUs.
    """
    for name, own in zip(names, facts, strict=True):
        _check_gpus(plan, name, own["gpus"])
        for what in _EQUAL_FACTS:
            if own[what] != facts[0][what]:
                raise _nodes_differ(what, name, own[what], names[0], facts[0][what])


def warnings_of(plan: Plan, job: Job, names: tuple[str, ...], facts: tuple[dict[str, Any], ...]) -> list[str]:
    """Return warnings about possible problems, one sentence each."""
    found = []
    if job.code_digest and facts[0]["code"] != job.code_digest:
        found.append("the script's folder has changed since the submission that the plan is for")
    pins = plan.strategy.optimizer_offload is not OffloadDevice.NONE and not plan.topology.on_cpu
    for name, own in zip(names, facts, strict=True):
        if own["free_bytes"] < _LEAST_FREE_BYTES:
            free = format_bytes(own["free_bytes"])
            found.append(f"{name} has {free} of disk left for the run folder, {job.run_folder}")
        if own["memlock_bytes"] is not None and pins:
            limit = format_bytes(own["memlock_bytes"])
            found.append(f"{name} lets a process lock {limit} of memory (ulimit -l), but offload pins more")
    return found


def clock_warnings(meeting: Meeting) -> list[str]:
    """Return a sentence for each node whose clock is off, by which logs of several nodes are sorted.

    To be called right after the all-reduce, which ends on all nodes at the same time.
    """
    clocks = meeting.gather("clock", time.time())
    return [
        f"the clock of {name} is {clock - clocks[0]:+.0f} s off that of {meeting.names[0]}"
        for name, clock in zip(meeting.names, clocks, strict=True)
        if abs(clock - clocks[0]) > _CLOCK_S
    ]


def _check_gpus(plan: Plan, name: str, gpus: list[tuple[str, int]]) -> None:
    if plan.topology.on_cpu:
        return
    needed, planned = plan.topology.ranks_per_node, plan.machine.gpus
    kinds = ", ".join(f"{count} x {gpu}" for gpu, count in Counter(gpu for gpu, _ in gpus).items())
    smallest = min((size for _, size in gpus[:needed]), default=0)
    least = min((gpu.memory_bytes for gpu in planned), default=0)
    if len(gpus) >= needed and smallest >= _LEAST_MEMORY_SHARE * least:
        return
    raise UserError(
        "node-without-its-gpus",
        f"{name} lacks the GPUs of the plan",
        found=f"{kinds or 'no GPU'}; the plan is for {needed} x "
        f"{planned[0].name if planned else 'GPU'} ({format_bytes(least)}) on each node",
        why="the ranks of all nodes train together, and its own could not start, or would run out of memory",
        fix="ask the cluster for such nodes (`zerofit submit --constraint FEATURE` on Slurm, --node-selector "
        "on Kubernetes), or submit again with the actual --gpus; `nvidia-smi` tells if the driver works",
        exit_code=EXIT_UNREACHABLE,
    )


_EQUAL_FACTS = {
    "versions": (
        "nodes-differ-in-versions",
        "install the same versions, or use one environment on a shared disk",
    ),
    "plan": ("nodes-differ-in-plan", "give all nodes the run folder created by `zerofit submit`"),
    "code": (
        "nodes-differ-in-code",
        "give all nodes the same copy of the script and the files beside it",
    ),
}
"""The facts that must be equal on all nodes: the error if one is not, and its fix."""


def _nodes_differ(what: str, name: str, mine: Any, first: str, others: Any) -> UserError:
    """Return the error for a node that differs from node 0 in one of these facts."""
    if what != "versions":
        found = f"{name}: {mine[:12] or 'none'}, {first}: {others[:12] or 'none'}"
    else:
        packages = [name for name in sorted({*mine, *others}) if mine.get(name) != others.get(name)]
        pairs = (f"{name} {mine.get(name, 'missing')} and {others.get(name, 'missing')}" for name in packages)
        found = f"{name} and {first}: {', '.join(pairs)}"
    rule, fix = _EQUAL_FACTS[what]
    return UserError(
        rule,
        f"the nodes differ in their {what}",
        found=found,
        why="different ranks hang, or train something else than planned",
        fix=fix,
        exit_code=EXIT_UNREACHABLE,
    )


def choose_interface(meeting: Meeting) -> None:
    """Make gloo and NCCL use the network interface by which the nodes reach each other.

    By default gloo uses the interface of the node's own name, which on Debian is 127.0.1.1.
    """
    node = meeting.place.node
    own = meeting.facts[node]["address"] if node else meeting.master_address
    for interface, addresses in psutil.net_if_addrs().items():
        if own in [address.address for address in addresses]:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, interface)


def check_all_reduce(meeting: Meeting) -> float:
    """Pass a barrier and an all-reduce of all launchers over gloo, and return their time in seconds.

    Raises:
        UserError: a node failed or took too long; it names each.
    """
    started = time.monotonic()
    try:
        within(_ALL_REDUCE_LIMIT_S, _all_reduce, meeting)
        problem = None
    except TimeoutError:
        problem = f"no answer in {_ALL_REDUCE_LIMIT_S:.0f} s"
    except RuntimeError as error:
        problem = first_line(error)[:200]
    took_s = time.monotonic() - started
    problems = meeting.gather("all-reduce", problem)
    failed = {name: text for name, text in zip(meeting.names, problems, strict=True) if text is not None}
    if failed:
        raise _all_reduce_failed(failed)
    return took_s


def _all_reduce(meeting: Meeting) -> None:
    import torch
    from torch import distributed

    limit, world_size = timedelta(seconds=_GROUP_LIMIT_S), meeting.place.num_nodes
    store = distributed.PrefixStore("all-reduce", meeting.store)
    rank = meeting.place.node
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        distributed.monitored_barrier(timeout=timedelta(seconds=_BARRIER_LIMIT_S), wait_all_ranks=True)
        tensor = torch.ones(_ALL_REDUCE_BYTES // 4)
        distributed.all_reduce(tensor)
        if tensor[-1].item() != world_size:
            raise RuntimeError(f"the sum is {tensor[-1].item()} instead of {world_size}")
    finally:
        distributed.destroy_process_group()


def _all_reduce_failed(failed: dict[str, str]) -> UserError:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "unknown")
    shown = "; ".join(f"{name}: {text}" for name, text in list(failed.items())[:_SHOWN_NODES])
    return UserError(
        "nodes-cannot-reduce",
        f"the all-reduce between the nodes failed on {', '.join(failed)}",
        found=f"{shown}   (interface {interface})",
        why="the nodes can reach node 0, but the ranks must reach each other at any port",
        fix="open all ports between the nodes on this interface, or name another one: "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with --env",
        exit_code=EXIT_UNREACHABLE,
    )
