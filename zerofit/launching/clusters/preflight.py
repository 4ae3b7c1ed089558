"""Checks before any rank starts: equal nodes, as planned, and a working all-reduce between them."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.plan import Plan, plan_to_json
from zerofit.core.strategy import OffloadDevice
from zerofit.core.units import GIB, format_bytes
from zerofit.launching.clusters.job import Job, code_digest
from zerofit.launching.clusters.peers import EXIT_UNREACHABLE, Meeting, Peers, interface_to
from zerofit.machine.limits import may_lock_all_memory, probe_disk
from zerofit.machine.port import free_port
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions

_ALL_REDUCE_LIMIT_S = 40.0
"""ASSUMPTION: importing torch and creating a group of all nodes takes less, unless something is wrong."""
_ALL_REDUCE_BYTES = 4 << 20
_CLOCK_S = 5.0
_LEAST_FREE_BYTES = 10 * GIB
_LEAST_MEMORY_SHARE = 0.95
"""Memory of GPUs of one kind differs by some MiB between drivers. ASSUMPTION."""
_POLL_S = 0.1


def facts_of_node(plan: Plan, job: Job) -> dict[str, Any]:
    """Return this node's facts for the other nodes."""
    import resource

    gpus = () if plan.topology.on_cpu else probe_machine(may_be_unreadable=True).gpus
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_limited = memlock != resource.RLIM_INFINITY and not may_lock_all_memory()
    return {
        "versions": {name: one for name, one in asdict(probe_versions()).items() if one is not None},
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
    for name, one in zip(names, facts, strict=True):
        _check_gpus(plan, name, one["gpus"])
        for what in _EQUAL_FACTS:
            if one[what] != facts[0][what]:
                raise _nodes_differ(what, name, one[what], names[0], facts[0][what])


def warnings_of(plan: Plan, job: Job, names: tuple[str, ...], facts: tuple[dict[str, Any], ...]) -> list[str]:
    """Return warnings about possible problems, one sentence each."""
    found = []
    if job.code_digest and facts[0]["code"] != job.code_digest:
        found.append("the script's folder has changed since the submission that the plan is for")
    pins = plan.strategy.optimizer_offload is not OffloadDevice.NONE and not plan.topology.on_cpu
    for name, one in zip(names, facts, strict=True):
        if one["free_bytes"] < _LEAST_FREE_BYTES:
            free = format_bytes(one["free_bytes"])
            found.append(f"{name} has {free} of disk left for the run folder, {job.run_folder}")
        if one["memlock_bytes"] is not None and pins:
            limit = format_bytes(one["memlock_bytes"])
            found.append(f"{name} lets a process lock {limit} of memory (ulimit -l), but offload pins more")
    return found


def clock_warnings(meeting: Meeting) -> list[str]:
    """Return a sentence for each node whose clock is off; called by all nodes at the same time.

    Logs of several nodes are sorted by time.
    """
    place = meeting.place
    meeting.tell(f"ready/{place.node}", "")
    for node in range(place.num_nodes):
        meeting.hear(f"ready/{node}", limit_s=place.limit_s)
    meeting.tell(f"clock/{place.node}", str(time.time()))
    heard = [meeting.hear(f"clock/{node}", limit_s=place.limit_s) for node in range(place.num_nodes)]
    clocks = [float(one) if one is not None else math.nan for one in heard]
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
        fix="ask the cluster for such nodes (`zerofit submit --constraint` on Slurm, --node-selector on "
        "Kubernetes), or submit again with the actual --gpus; `nvidia-smi` tells if the node's driver works",
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
        names = [one for one in sorted({*mine, *others}) if mine.get(one) != others.get(one)]
        pairs = (f"{one} {mine.get(one, 'missing')} and {others.get(one, 'missing')}" for one in names)
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


def choose_interface(meeting: Meeting) -> str | None:
    """Make gloo and NCCL use the interface on the route between the nodes, and return its name.

    By default gloo uses the interface of the node's own name, which on Debian is 127.0.1.1.
    """
    mine = meeting.place.node
    other = meeting.master_address if mine else meeting.facts[1]["address"]
    interface = interface_to(other)
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    return interface


def check_all_reduce(meeting: Meeting, peers: Peers, *, on_cpu: bool) -> float:
    """Run an all-reduce over one process per node, and return its time in seconds.

    Raises:
        UserError: it failed or took too long; it names the nodes that did not respond.
    """
    place = meeting.place
    port = meeting.by_node_0("port of reduction", lambda: str(free_port(0)))
    command = (sys.executable, "-m", __name__, meeting.master_address, port, "gloo" if on_cpu else "nccl")
    started = time.monotonic()
    process = subprocess.Popen(
        (*command, str(place.node), str(place.num_nodes)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        while process.poll() is None and time.monotonic() - started < _ALL_REDUCE_LIMIT_S:
            time.sleep(_POLL_S)
            peers.check()
    finally:
        process.kill()
        _, said = process.communicate()
    took_s = time.monotonic() - started
    if process.returncode == 0:
        meeting.tell(f"reduced/{place.node}", "")
    left_s = max(0.0, _ALL_REDUCE_LIMIT_S - took_s) if process.returncode == 0 else 0.0
    silent = [
        meeting.names[node]
        for node in range(place.num_nodes)
        if meeting.hear(f"reduced/{node}", limit_s=left_s) is None
    ]
    if not silent:
        return took_s
    last = said.decode(errors="replace").strip().splitlines()
    raise _all_reduce_failed(meeting, silent, last[-1] if last else f"no answer in {took_s:.0f} s")


def _all_reduce_failed(meeting: Meeting, silent: list[str], said: str) -> UserError:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "unknown")
    return UserError(
        "nodes-cannot-reduce",
        f"{', '.join(silent)} did not take part in the all-reduce",
        found=f"{said[:200]}   ({meeting.place.name}, interface {interface})",
        why="the nodes can reach node 0, but the ranks must reach each other at any port",
        fix="open all ports between the nodes on this interface, or name another one: "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with --env",
        exit_code=EXIT_UNREACHABLE,
    )


def _reduce(address: str, port: str, backend: str, rank: str, world_size: str) -> None:
    """Run one node's process of the all-reduce."""
    import torch
    from torch import distributed

    limit = timedelta(seconds=_ALL_REDUCE_LIMIT_S)
    method = f"tcp://{address}:{port}"
    distributed.init_process_group(
        backend, init_method=method, rank=int(rank), world_size=int(world_size), timeout=limit
    )
    device = "cpu" if backend == "gloo" else "cuda:0"
    tensor = torch.ones(_ALL_REDUCE_BYTES // 4, device=device)
    distributed.all_reduce(tensor)
    if tensor[-1].item() != int(world_size):
        raise SystemExit(f"the sum is {tensor[-1].item()} instead of {world_size}")
    with contextlib.suppress(RuntimeError):
        distributed.destroy_process_group()


if __name__ == "__main__":
    _reduce(*sys.argv[1:])
