"""This node of a run: its GPUs and ranks, its number, and where the nodes meet."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.configs.write.command import Rendezvous
from zerofit.core.command import RANK_FOR_EACH_GPU
from zerofit.core.errors import UserError
from zerofit.machine.machine_spec import SpecifiedMachine
from zerofit.machine.port import DEFAULT_PORT, free_port, is_port_free
from zerofit.machine.this_node import probe_machine
from zerofit.planning.machine_from_flags import specified_machine
from zerofit.planning.options import MachineFlags

if TYPE_CHECKING:
    from zerofit.core.plan import Topology
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.sources.nodes import Nodes


def on_this_node(spec: RunSpec) -> RunSpec:
    """Return the spec with this node and the machine to plan for; in a dry run both may be another machine.

    Raises:
        UserError: a flag of a machine can't be read, or a GPU of --gpu-ids is not there.
    """
    on_cpu, nodes = spec.runs_on_cpu, spec.nodes
    plans_elsewhere = spec.dry_run and not on_cpu
    if plans_elsewhere and spec.described != MachineFlags():
        node = specified_machine(spec.described, nodes=nodes).machine
    else:
        node = probe_machine(gpu_ids=nodes.gpu_indices, may_be_unreadable=on_cpu)
    if plans_elsewhere and spec.plan is not None and not node.gpus:
        node = spec.plan.machine
    if nodes.ranks_per_node == RANK_FOR_EACH_GPU:
        nodes = replace(nodes, ranks_per_node=1 if on_cpu else max(1, len(node.gpus)))
        spec = replace(spec, nodes=nodes).setting("--nproc-per-node", world_size=nodes.world_size)
    machine = SpecifiedMachine(machine=node, assumptions=())
    if spec.gpus is not None:
        machine = specified_machine(spec.described, nodes=nodes)
    return replace(spec, node=node, machine=machine)


def find_rendezvous(nodes: Nodes, topology: Topology) -> Rendezvous:
    """Return the rendezvous: for one node at a free port, for several at the given address and port.

    Raises:
        UserError: for several nodes, a required setting is missing.
    """
    if nodes.machine_rank is not None and nodes.machine_rank >= topology.num_nodes:
        raise _no_such_node(nodes, topology)
    if topology.num_nodes == 1:
        # Not 29500 first: two runs started at the same time would both find it free.
        return Rendezvous(main_process_port=free_port(nodes.main_process_port or 0), gpu_ids=nodes.gpu_ids)
    port = DEFAULT_PORT if nodes.main_process_port is None else nodes.main_process_port
    machine_rank = _check_several_nodes(nodes, topology)
    if port == 0 or (machine_rank == 0 and not is_port_free(port)):
        raise UserError(
            "port-taken",
            "the port for the nodes' rendezvous can't be used",
            found=f"--main-process-port {port}",
            why="another process listens on it"
            if port
            else "the other nodes could not know a port chosen here",
            fix="set a free port, the same on every node",
        )
    return Rendezvous(
        machine_rank=machine_rank,
        main_process_ip=nodes.main_process_ip,
        main_process_port=port,
        gpu_ids=nodes.gpu_ids,
    )


def _check_several_nodes(nodes: Nodes, topology: Topology) -> int:
    """Return this node's number."""
    missing = [
        flag
        for flag, value in (
            ("--machine-rank", nodes.machine_rank),
            ("--main-process-ip", nodes.main_process_ip),
        )
        if value is None
    ]
    if missing or nodes.machine_rank is None:
        raise UserError(
            "node-unknown",
            "a run on several nodes needs this node's number",
            found=f"{_nodes_words(nodes, topology)} without {' and '.join(missing)}",
            why="the command runs on every node, and the ranks meet at node 0",
            fix="set both, or use a --hostfile",
        )
    return nodes.machine_rank


def _nodes_words(nodes: Nodes, topology: Topology) -> str:
    """Return the number of nodes as the user wrote it; without a flag, as in the plan."""
    if nodes.num_nodes is not None:
        return f"--num-machines {topology.num_nodes}"
    return "one node" if topology.num_nodes == 1 else f"a plan for {topology.num_nodes} nodes"


def _no_such_node(nodes: Nodes, topology: Topology) -> UserError:
    last = topology.num_nodes - 1
    return UserError(
        "node-out-of-range",
        "there is no such node",
        found=f"--machine-rank {nodes.machine_rank} with {_nodes_words(nodes, topology)}",
        why="nodes are numbered from 0",
        fix=f"set --machine-rank to 0 up to {last}" if last else "set --num-machines to the number of nodes",
    )
