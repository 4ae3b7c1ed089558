"""The machine to plan for: the one that flags describe, or this one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.machine.gpus import check_gpu_ids
from zerofit.machine.machine_spec import SpecifiedMachine, machine_of_spec
from zerofit.machine.this_node import probe_machine
from zerofit.scripts.target import put_before

if TYPE_CHECKING:
    from zerofit.planning.options import MachineFlags
    from zerofit.planning.sources.nodes import Nodes

_BESIDE_GPUS = ("host_ram", "nvme", "cpu_cores", "network", "host_bandwidth")
"""Fields of MachineFlags that need --gpus."""
_SAY_GPUS = "say which GPUs the run will have, such as --gpus 8xA100-80G"


def machine_of(
    flags: MachineFlags, *, num_nodes: int, target: tuple[str, ...] | None = None
) -> SpecifiedMachine:
    """Return the machine that the flags describe, or this one.

    Args:
        target: the script with its arguments, which may contain --gpus by mistake.

    Raises:
        UserError: this machine has no GPU, or a flag can't be read.
    """
    beside = {name: getattr(flags, name) for name in _BESIDE_GPUS}
    if flags.gpus is not None:
        return machine_of_spec(flags.gpus, num_nodes=num_nodes, **beside)
    said = [f"--{name.replace('_', '-')} {value}" for name, value in beside.items() if value is not None]
    if said:
        raise UserError(
            "gpus-missing",
            "another machine needs its GPUs",
            found=f"{' '.join(said)} without --gpus",
            why="without --gpus the plan is for this machine as it is",
            fix=put_before("--gpus", target)
            or "add --gpus, such as --gpus 8xA100-80G, or leave the others out",
        )
    machine = probe_machine()
    if not machine.gpus:
        raise no_gpus_here(put_before("--gpus", target) or _SAY_GPUS)
    return SpecifiedMachine(machine=machine, assumptions=())


def no_gpus_here(fix: str) -> UserError:
    """Return the error for a machine without a GPU to plan for."""
    return UserError(
        "no-gpus-here",
        "there is no GPU on this machine to plan for",
        found="no GPU that the driver shows",
        why="a plan compares the model with the memory and rates of GPUs",
        fix=fix,
    )


def specified_machine(flags: MachineFlags, *, nodes: Nodes) -> SpecifiedMachine:
    """Return the machine described by --gpus and related flags, with the GPUs in --gpu-ids."""
    specified = machine_of(flags, num_nodes=nodes.num_nodes or 1)
    if (indices := nodes.gpu_indices) is None:
        return specified
    gpus = specified.machine.gpus
    check_gpu_ids(indices, len(gpus), listed_by=f"--gpus {flags.gpus}")
    machine = replace(specified.machine, gpus=tuple(gpus[index] for index in indices))
    return replace(specified, machine=machine)
