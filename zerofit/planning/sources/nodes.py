"""The nodes of a run, from flags, files and a hostfile."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.command import RANK_FOR_EACH_GPU
from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
"""A host's name or address, without characters special to a shell or ssh."""
_HOSTFILE_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d{1,5})")

_LARGEST_HOSTFILE = 16 * 1024 * 1024
"""Bytes; a node takes 50. ASSUMPTION."""


def is_host(text: str) -> bool:
    """Return True if a text can only be a host's name or address."""
    return _HOST.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Flags for nodes; None if not given."""

    num_nodes: int | None = None
    """Number of nodes."""
    num_processes: int | None = None
    """Ranks on all nodes together."""
    ranks_per_node: int | None = None
    """Ranks on each node, as torchrun sets it, or RANK_FOR_EACH_GPU."""
    machine_rank: int | None = None
    """This node's number, from 0."""
    main_process_ip: str | None = None
    """Address of node 0."""
    main_process_port: int | None = None
    """Port on node 0; 0 chooses a free one."""
    gpu_ids: str | None = None
    """GPUs of this node to use, comma-separated."""

    @property
    def gpu_indices(self) -> tuple[int, ...] | None:
        """The GPUs of this node to use; None for all."""
        if self.gpu_ids in (None, "all"):
            return None
        try:
            return tuple(int(part) for part in str(self.gpu_ids).split(","))
        except ValueError:
            raise UserError(
                "bad-gpu-ids",
                "the list of GPUs can't be read",
                found=f"--gpu-ids {self.gpu_ids}",
                why="it must be a comma-separated list of integers",
                fix="write it as in --gpu-ids 0,1",
            ) from None

    @property
    def world_size(self) -> int | None:
        """Ranks on all nodes together, given in either way; None if not given."""
        if self.ranks_per_node is None:
            return self.num_processes
        world_size = self.ranks_per_node * (self.num_nodes or 1)
        if self.num_processes not in (None, world_size):
            raise _contradicting_ranks(
                f"--num-processes {self.num_processes} and --nproc-per-node {self.ranks_per_node} "
                f"on {self.num_nodes or 1} nodes",
                per_node="--nproc-per-node",
                fix="leave one of the two out",
            )
        return world_size


def _contradicting_ranks(found: str, *, per_node: str, fix: str) -> UserError:
    return UserError(
        "ranks-said-twice",
        "two flags contradict each other on the number of ranks",
        found=found,
        why=f"--num-processes counts the ranks of all nodes, {per_node} those of one",
        fix=fix,
    )


def with_hostfile(nodes: Nodes, path: Path) -> Nodes:
    """Return the nodes completed by a DeepSpeed hostfile; flags override the file.

    The same command is run on every node, and finds the node's own line by its name.

    Raises:
        UserError: the file can't be read, or names no node, or not this one.
    """
    hosts = _read_hostfile(path)
    slots = set(hosts.values())
    if len(slots) > 1:
        raise _bad_hostfile(
            path, f"{len(slots)} different numbers of slots", "every node must have the same number of ranks"
        )
    machine_rank = nodes.machine_rank
    if machine_rank is None:
        own = {socket.gethostname(), socket.getfqdn()}
        machine_rank = next((rank for rank, host in enumerate(hosts) if host in own), None)
    if machine_rank is None:
        raise _bad_hostfile(path, "no line with this node's name", f"this node is {socket.gethostname()}")
    num_nodes = nodes.num_nodes or len(hosts)
    ranks_per_node = slots.pop() if nodes.ranks_per_node is None else nodes.ranks_per_node
    is_counted = ranks_per_node != RANK_FOR_EACH_GPU
    if is_counted and nodes.num_processes not in (None, ranks_per_node * num_nodes):
        raise _contradicting_ranks(
            f"--num-processes {nodes.num_processes} and slots={ranks_per_node} on {num_nodes} nodes"
            f"   ({path})",
            per_node="slots",
            fix="leave --num-processes out",
        )
    return replace(
        nodes,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        machine_rank=machine_rank,
        main_process_ip=nodes.main_process_ip or next(iter(hosts)),
    )


def _read_hostfile(path: Path) -> dict[str, int]:
    try:
        text = read_bounded_text(path, most_bytes=_LARGEST_HOSTFILE)
    except (OSError, UnicodeDecodeError) as error:
        why = "a hostfile is text with one line `HOST slots=N` per node"
        raise _bad_hostfile(path, getattr(error, "strerror", None) or "no text", why) from None
    hosts: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        match = _HOSTFILE_LINE.fullmatch(line)
        if not line:
            continue
        if match is None or not is_host(match[1]):
            raise _bad_hostfile(path, f"line {number}: {line}", "a line must be `HOST slots=N`")
        if int(match[2]) == 0:
            raise _bad_hostfile(path, f"line {number}: {line}", "a node must have at least one slot")
        if match[1] in hosts:
            raise _bad_hostfile(path, f"line {number}: {line}", "each node may only have one line")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise _bad_hostfile(path, "no node", "a line must be `HOST slots=N`")
    return hosts


def _bad_hostfile(path: Path, found: str, why: str) -> UserError:
    fix = "fix the file, or set --num-machines, --machine-rank and --main-process-ip"
    return UserError(
        "bad-hostfile", "the hostfile can't be used", found=f"{found}   ({path})", why=why, fix=fix
    )
