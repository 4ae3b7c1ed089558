"""Rules on ranks and machines: what a launcher can run where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import (
    STANDARD_LAUNCHER,
    LaunchLayers,
    launch_count,
    launch_of,
    launch_of_deepspeed,
    launch_value,
    several_through_deepspeed,
    uses_deepspeed,
    whole_number,
)
from zerofit.checking.rule import (
    ACCELERATE,
    Hit,
    Rule,
    Severity,
    declared,
    fails,
    ignored,
)
from zerofit.checking.rules.launch.ranks import uneven_nodes
from zerofit.checking.situation import known
from zerofit.configs.document import SetValue
from zerofit.core.command import Launcher, is_literal
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation


@Rule(
    id="num-processes-is-for-all-machines",
    severity=Severity.ERROR,
    summary="the ranks do not divide over the nodes",
    why="num_processes counts the ranks of all machines, and accelerate drops the remainder",
    fix="set num_processes to the ranks per machine times the machines",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=ignored(not_reproduced="needs two machines"),
)
def _uneven_ranks(situation: Situation) -> Iterator[Hit]:
    yield from uneven_nodes(situation)
    launch = launch_of(situation)
    if launch is None:
        return
    ranks, machines = launch_count(launch, "num_processes"), launch_count(launch, "num_machines")
    if ranks is None or machines is None or machines.value < 2 or ranks.value < 1:
        return
    if ranks.value % machines.value:
        yield Hit(found=f"{ranks.text} with {machines.text}", place=ranks.place)


@Rule(
    id="num-processes-is-text",
    severity=Severity.ERROR,
    summary="accelerate can't calculate with a num_processes in quotes",
    why="it takes the file's text as it is, and Python can't divide or compare a text and a number",
    fix="write num_processes without quotes",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=fails("unsupported operand type(s) for //: 'str' and 'int'"),
)
def _text_for_ranks(situation: Situation) -> Iterator[Hit]:
    launch = launch_of(situation)
    if launch is None or launch.file is None:
        return
    ranks = launch_value(launch, "num_processes")
    number = whole_number(ranks.value) if ranks else None
    if ranks is None or ranks.place is None or not isinstance(ranks.value, str) or number is None:
        return  # a flag's text is converted
    if reason := _where_ranks_are_a_number(launch):
        edit = SetValue(document=launch.file.name, path=("num_processes",), value=number)
        fix = f"write num_processes: {number} without quotes"
        yield Hit(
            found=f'num_processes="{ranks.value}" with {reason}', place=ranks.place, fix=fix, edits=(edit,)
        )


def _where_ranks_are_a_number(launch: LaunchLayers) -> str:
    """Return the setting with which accelerate calculates with num_processes; empty if it only hands it on.

    commands/launch.py, _validate_launch_command; utils/launch.py, prepare_simple_launcher_cmd_env,
    prepare_multi_gpu_env and prepare_deepspeed_cmd_env.
    """
    flags, on_cpu = launch.command, launch_value(launch, "use_cpu")
    if flags is not None and (flag := flags.find("cpu")):
        return flag.text
    if (
        on_cpu is not None
        and on_cpu.value is True
        and not (flags and flags.find("num_cpu_threads_per_process"))
    ):
        return on_cpu.text
    kind = launch_value(launch, "distributed_type")
    chosen = flags.find("multi_gpu", "use_fsdp", "use_megatron_lm", "use_deepspeed") if flags else None
    if chosen is None and (
        kind is None or kind.value == "XLA" or (flags and flags.find("tpu", "tpu_cluster"))
    ):
        return ""
    if chosen is None and kind is not None and kind.value in (False, "NO", "MULTI_CPU"):
        return kind.text
    machines = launch_count(launch, "num_machines")
    if machines is None or machines.value < 2:
        return ""
    use, launcher = uses_deepspeed(launch), launch_value(launch, "deepspeed_multinode_launcher")
    if use is not None and use.value and (launcher is None or launcher.value != STANDARD_LAUNCHER):
        filters = (launch_value(launch, f"deepspeed_{name}_filter") for name in ("exclusion", "inclusion"))
        if any(said is not None and said.value is not None for said in filters):
            return ""  # DeepSpeed's launcher then counts the GPUs itself
    return machines.text


@Rule(
    id="multinode-needs-hostfile",
    severity=Severity.ERROR,
    summary="without a hostfile DeepSpeed's launcher only runs on this machine",
    why="accelerate passes `--hostfile None`, and the launcher then only uses this machine",
    fix="set deepspeed_multinode_launcher to standard and start the command on every machine, or name a "
    "deepspeed_hostfile",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=ignored(("world_size", 1)),
)
def _no_hostfile(situation: Situation) -> Iterator[Hit]:
    launch, machines, hostfile = several_through_deepspeed(situation) or (None, None, None)
    if launch and machines and not (hostfile and hostfile.value):
        launcher = launch_value(launch, "deepspeed_multinode_launcher")
        text = launcher.text if launcher else "no deepspeed_multinode_launcher"
        yield Hit(found=f"{machines.text} with {text} and no deepspeed_hostfile", place=machines.place)
    elif launch is None and (words := _numbered_machines(situation)):
        yield Hit(
            found=f"{words} with no deepspeed_multinode_launcher",
            why="each machine runs this line; on several, accelerate calls DeepSpeed's launcher, which "
            "without a hostfile only uses this machine: each trains alone",
            fix="add --deepspeed_multinode_launcher standard",
            confidence=Confidence.LIKELY,
        )


def _numbered_machines(situation: Situation) -> str:
    """Return the flags of a line that each of several machines runs with its own number; empty otherwise.

    Their values are variables: what they hold only the job knows.
    """
    launch, _ = launch_of_deepspeed(situation) or (None, None)
    flags = launch.command if launch is not None else None
    if launch is None or flags is None:
        return ""
    chosen = ("deepspeed_multinode_launcher", "deepspeed_hostfile")
    if any(said is not None and said.value for said in (launch_value(launch, name) for name in chosen)):
        return ""
    machines, rank = flags.find("num_machines"), flags.find("machine_rank")
    if machines is None or rank is None or not (machines.value and rank.value):
        return ""
    is_open = not is_literal(machines.value) and not is_literal(rank.value)
    return f"{machines.text} {rank.text}" if is_open else ""


@Rule(
    id="multinode-writes-environment",
    severity=Severity.WARNING,
    summary="accelerate writes the environment, including secrets, to .deepspeed_env",
    why="each launch appends it again, and DeepSpeed's launcher sends it to all machines",
    fix="set deepspeed_multinode_launcher to standard and start the command on every machine, or delete "
    ".deepspeed_env before and after each launch",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=ignored(("left .deepspeed_env", True)),
)
def _environment_in_a_file(situation: Situation) -> Iterator[Hit]:
    _, machines, hostfile = several_through_deepspeed(situation) or (None, None, None)
    if machines and hostfile and hostfile.value:
        yield Hit(found=f"{machines.text} with {hostfile.text}", place=machines.place)


@Rule(
    id="cpu-ranks-need-zerofit-launch",
    severity=Severity.ERROR,
    summary="plain accelerate can't run DeepSpeed on several CPU ranks",
    why="it treats each of them as rank 0 of 1, and every rank would read all the data",
    fix="test with `zerofit launch --cpu`, or leave --cpu out for files that are for GPUs",
    see=f"{ACCELERATE}/state.py",
    evidence=ignored(("accelerate_world_size", 1)),
)
def _deepspeed_on_cpu_ranks(situation: Situation) -> Iterator[Hit]:
    if situation.launcher is not Launcher.ACCELERATE or situation.topology is None:
        return
    topology = situation.topology
    if not topology.on_cpu or topology.world_size == 1:
        return
    if known(situation.settings.engine, "whether DeepSpeed runs").value is Engine.DEEPSPEED:
        yield Hit(found=f"--cpu with {topology.world_size} ranks")


RULES = declared(vars())
