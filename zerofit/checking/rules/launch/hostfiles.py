"""Rules on DeepSpeed's hostfile, and the flags that choose nodes and GPUs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import whole_number
from zerofit.checking.inputs.hostfiles import named_slots
from zerofit.checking.rule import DEEPSPEED, Hit, Rule, Severity, declared, fails, ignored
from zerofit.core.command import Launcher, is_literal
from zerofit.core.setting import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.hostfiles import Hostfile
    from zerofit.checking.situation import Situation
    from zerofit.core.command import Flag, LaunchCommand

_RUNNER = f"{DEEPSPEED}/launcher/runner.py"
_FILTERS = ("include", "exclude")
_COUNTS = ("num_nodes", "num_gpus")


def _of_deepspeed(situation: Situation) -> LaunchCommand | None:
    command = situation.command
    return command if command is not None and command.launcher is Launcher.DEEPSPEED else None


def _with_nodes(situation: Situation) -> tuple[LaunchCommand, Hostfile] | None:
    """Return DeepSpeed's launch line and its hostfile; None without one that the launcher reads."""
    command, hosts = _of_deepspeed(situation), situation.hostfile
    return None if command is None or hosts is None or hosts.refused else (command, hosts)


def _filters(command: LaunchCommand) -> Iterator[Flag]:
    """Yield --include and --exclude with their values, if those are known."""
    for name in _FILTERS:
        flag = command.find(name)
        if flag is not None and flag.value and is_literal(flag.value):
            yield flag


@Rule(
    id="hostfile-refused",
    severity=Severity.ERROR,
    summary="DeepSpeed's launcher can't read the hostfile",
    why='each line is "NODE slots=GPUS", and any other ends the launcher',
    fix='write "NODE slots=GPUS" in each line',
    see=_RUNNER,
    evidence=fails(not_reproduced="the harness starts no hosts"),
)
def _refused(situation: Situation) -> Iterator[Hit]:
    refused = situation.hostfile.refused if situation.hostfile is not None else None
    if refused is not None and _of_deepspeed(situation) is not None:
        yield Hit(found=refused.found, place=refused.place, why=refused.why, fix=refused.fix)


@Rule(
    id="hostfile-lacks-slot",
    severity=Severity.ERROR,
    summary="the hostfile has no such node or GPU",
    why="slots=N is the number of GPUs of a node, numbered from 0, and the launcher accepts no others",
    fix="write the node's real number of GPUs as its slots, and choose among them with --include",
    see="https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node",
    evidence=fails(not_reproduced="the harness starts no hosts"),
)
def _lacks_slot(situation: Situation) -> Iterator[Hit]:
    if (read := _with_nodes(situation)) is None:
        return
    command, hosts = read
    for flag in _filters(command):
        for node, slots in named_slots(flag.value or ""):
            number = hosts.slots.get(node)
            if number is None:
                yield Hit(
                    found=f"{flag.text} with no {node} in {hosts.name}",
                    fix=f"name one of {', '.join(list(hosts.slots)[:4])}, or add the node to the hostfile",
                )
            elif missing := [slot for slot in slots if slot >= number]:
                yield Hit(
                    found=f"{flag.text} with {node} slots={number} in {hosts.name}",
                    fix=f"write {node} slots={max(missing) + 1} or more if it has these GPUs: "
                    f"slots={number} are only 0 to {number - 1}",
                )


@Rule(
    id="hostfile-smaller-than-flags",
    severity=Severity.WARNING,
    summary="the flags ask for more than the hostfile has",
    why="the launcher takes the nodes that there are, and as many ranks a node as --num_gpus says",
    fix="complete the hostfile, or lower the flags",
    see=_RUNNER,
    evidence=ignored(not_reproduced="the harness starts no hosts"),
)
def _smaller(situation: Situation) -> Iterator[Hit]:
    if (read := _with_nodes(situation)) is None:
        return
    command, hosts = read
    nodes, gpus = (command.find(name) for name in _COUNTS)
    asked = None if nodes is None else whole_number(nodes.value)
    if nodes is not None and asked and asked > len(hosts.slots):
        number = len(hosts.slots)
        yield Hit(found=f"{nodes.text} with {number} node{'s' * (number > 1)} in {hosts.name}")
    asked = None if gpus is None else whole_number(gpus.value)
    least = min(hosts.slots, key=lambda node: hosts.slots[node])
    if gpus is not None and asked and asked > hosts.slots[least]:
        yield Hit(
            found=f"{gpus.text} with {least} slots={hosts.slots[least]} in {hosts.name}",
            why="--num_gpus replaces the slots, so that ranks without a GPU fail: invalid device ordinal",
        )


@Rule(
    id="hostfile-missing",
    severity=Severity.WARNING,
    summary="the hostfile does not exist",
    why="the launcher only logs that, and trains on this machine alone",
    fix="write the path relative to the folder in which the command runs",
    see=_RUNNER,
    evidence=ignored(not_reproduced="the harness starts no hosts"),
)
def _missing(situation: Situation) -> Iterator[Hit]:
    if situation.missing_hostfile is not None:
        yield Hit(found=situation.missing_hostfile, confidence=Confidence.CERTAIN)


RULES = declared(vars())
