"""sbatch's options that users set themselves, and those that `zerofit submit` sets."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from zerofit.checking.inputs.batch_jobs import SHORT_NAMES, gpus_in
from zerofit.core.errors import nearest
from zerofit.core.units import GIB, MIB
from zerofit.launching.clusters.scheduler_options import (
    FLAG,
    SchedulerOption,
    check_not_own,
    parse_options,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerofit.launching.clusters.job import Resources

_NO_VALUE = frozenset(
    ("contiguous", "hold", "overcommit", "reboot", "spread-job", "use-min-nodes", "verbose")
)
_MAY_HAVE_VALUE = frozenset(("exclusive", "get-user-env", "nice", "no-kill", "oversubscribe", "propagate"))
_WITH_VALUE = frozenset(
    [
        "acctg-freq", "bb", "bbf", "begin", "cluster-constraint", "comment", "container", "container-id",
        "core-spec", "cores-per-socket", "cpu-freq", "dependency", "deadline", "delay-boot", "distribution",
        "exclude", "extra", "extra-node-info", "gpu-bind", "gpu-freq", "gpus-per-node", "gres", "gres-flags",
        "hint", "job-name", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label",
        "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist",
        "power", "prefer", "priority", "profile", "qos", "reservation", "segment", "sockets-per-node",
        "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task",
        "wckey",
    ]
)  # fmt: skip
_KNOWN = _NO_VALUE | _MAY_HAVE_VALUE | _WITH_VALUE

_ONE_LAUNCHER = "leave it out: one launcher a node starts that node's ranks"
_GPUS = "set the GPUs of a node with --gpus, as in --gpus 8xH100"
_LOGS = "leave it out: `zerofit runs logs` prints the output, which is in the run folder"
_LEAVE = "leave it out; with --write-only you submit the job yourself, as you like"
_OWN = {
    "time": "use --time",
    "nodes": "use --num-machines",
    "partition": "use --partition",
    "account": "use --account",
    "constraint": "use --constraint",
    "cpus-per-task": "use --cpu-cores",
    "cpus-per-gpu": "use --cpu-cores, the cores of a node",
    "signal": "use --save-time",
    "requeue": "use --max-requeues",
    "no-requeue": "use --max-requeues 0",
    "export": "name variables with --env",
    "export-file": "name variables with --env",
    "chdir": "run zerofit submit in that folder",
    **dict.fromkeys(("gpus", "gpus-per-socket", "gpus-per-task"), _GPUS),
    **dict.fromkeys(
        ["ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"], _ONE_LAUNCHER
    ),
    **dict.fromkeys(("output", "error", "input", "open-mode"), _LOGS),
    **dict.fromkeys(
        [
            "array",
            "clusters",
            "gid",
            "help",
            "het-group",
            "ignore-pbs",
            "parsable",
            "quiet",
            "test-only",
            "uid",
            "usage",
            "version",
            "wait",
            "wrap",
        ],
        _LEAVE,
    ),
}
"""What to do instead of setting an option that zerofit sets, or that would change what it reads."""
_REPLACED = {
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    **{name: name for name in ("job-name", "mem", "tmp", "gpus-per-node")},
}
"""Options of the user's, and the one of zerofit's that each replaces."""
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_GPUS_OF_NODE = re.compile(r"(?:[\w.-]+:)?(\d+)")
_SIZE = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
"""sbatch(1), --mem: megabytes if no unit is given."""


def parse_sbatch_options(
    texts: Iterable[str], *, resources: Resources | None = None
) -> dict[str, str | None]:
    """Return the user's options by their long names; the value is None for an option without one.

    Args:
        texts: "qos=high", "--exclude=node07", "exclusive".
        resources: that the plan needs; None before they are known.

    Raises:
        UserError: zerofit sets an option itself, its value is missing or wrong, or the plan needs more.
    """
    found: dict[str, str | None] = {}
    for typed in parse_options(texts):
        name = SHORT_NAMES.get(typed.name, typed.name)
        option = SchedulerOption(name=name, value=typed.value)
        if name in found:
            raise refused(str(typed), why=f"--{name} is given twice", fix="leave one of them out")
        check_not_own(option, _OWN)
        _check(option)
        if resources is not None:
            _check_gpus(option, resources.gpus_per_node)
            _check_sizes(option, resources)
        found[name] = option.value
    return found


def fix_of_flag(flag: str) -> str | None:
    """Return how `zerofit submit` takes a flag of sbatch, or of a pod; None if it is neither."""
    name = flag.lstrip("-")
    if name in _OWN:
        return _OWN[name]
    if name in _KNOWN:
        value = "" if name in _NO_VALUE else "=VALUE"
        return f"pass it to the scheduler: {FLAG} {name}{value}"
    if name.rstrip("s") in ("annotation", "label"):
        return f"pass it to Kubernetes: {FLAG} {name.rstrip('s')}s.KEY=TEXT"
    return None


def unknown_to_sbatch(options: Iterable[str]) -> list[str]:
    """Return a warning for each option that is not sbatch's own; a site's plugins may know it."""
    warnings = []
    for name in options:
        if name not in _KNOWN:
            near = nearest(name, _KNOWN)
            meant = f" (did you mean --{near}?)" if near else ""
            warnings.append(
                f"--{name} is no option of sbatch itself{meant}: a plugin of the site must know it"
            )
    return warnings


def replaced_by(options: Mapping[str, str | None]) -> dict[str, str]:
    """Return the options of zerofit's that the user's replace, with the user's."""
    replaced = {_REPLACED[name]: name for name in options if name in _REPLACED}
    return replaced | ({"gpus-per-node": "gres"} if gpus_in(options.get("gres") or "") else {})


def _check(option: SchedulerOption) -> None:
    if not _NAME.fullmatch(option.name):
        raise refused(
            str(option),
            why="names of sbatch's options have lower-case letters, digits and hyphens",
            fix="write it as in --scheduler-option qos=high; `man sbatch` lists the options",
        )
    if option.name in _NO_VALUE and option.value is not None:
        raise refused(str(option), why=f"--{option.name} takes no value", fix=f"write {option.name} alone")
    if option.name in _WITH_VALUE and not option.value:
        raise refused(
            str(option), why=f"--{option.name} needs a value", fix=f"write it as in {option.name}=VALUE"
        )


def _check_gpus(option: SchedulerOption, gpus_per_node: int) -> None:
    """Check that an option asks for the GPUs of the plan, if it asks for any."""
    value, counts = option.value or "", []
    if option.name == "gres":
        counts = gpus_in(value)
    elif option.name == "gpus-per-node":
        counts = [int(match[1]) if (match := _GPUS_OF_NODE.fullmatch(value)) else 0]
    if counts and sum(counts) != gpus_per_node:
        raise refused(
            str(option),
            why=f"the plan is for {gpus_per_node} GPUs on each node",
            fix=f"ask for {gpus_per_node}, or set others with --gpus",
        )


def _check_sizes(option: SchedulerOption, resources: Resources) -> None:
    """Check that an option asks for the memory and the scratch space that the plan needs, or for more."""
    memory, scratch = resources.memory_bytes, resources.scratch_bytes
    needed = {
        "mem": memory,
        "mem-per-cpu": memory / resources.cores_per_node,
        "mem-per-gpu": memory / max(1, resources.gpus_per_node),
        "tmp": scratch,
    }.get(option.name, 0)
    match = _SIZE.fullmatch(option.value or "")
    if not needed or match is None:
        return
    asked = int(match[1]) * MIB * 1024 ** ("KMGT".index(match[2].upper() or "M") - 1)
    if option.name == "mem" and asked == 0:
        return  # all memory of the node
    if asked < needed:
        least = math.ceil(needed / GIB)
        raise refused(
            str(option),
            why=f"the plan needs {least}G",
            fix=f"ask for at least {option.name}={least}G, or leave it out",
        )
