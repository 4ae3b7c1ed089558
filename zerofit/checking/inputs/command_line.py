"""Parses a launch command into its launcher, flags, script and the script's own arguments."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.situation import RunSettings
from zerofit.configs.schema import ValueKind
from zerofit.core.command import Flag, LaunchCommand, Launcher
from zerofit.core.overrides import FLAGS
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, Precision, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerofit.configs.schema import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFlags:
    """How a launcher parses its flags; names are without leading dashes, with underscores."""

    switches: frozenset[str]
    """Long names of flags without a value."""
    valued: frozenset[str]
    """Long names of flags with a value."""
    short: Mapping[str, str]
    """Other names, and the long name of each."""
    abbreviates: bool = False
    """True if the launcher accepts unambiguous prefixes of long names."""
    takes_dashes: bool = True
    """True if it treats --num-gpus as --num_gpus."""

    def find(self, name: str) -> str | None:
        """Return the long name that the launcher resolves a name to; None if unknown."""
        name = self.short.get(name, name)
        if name in self.switches or name in self.valued:
            return name
        if not self.abbreviates or len(name) == 1:
            return None
        fitting = {self.short.get(other, other) for other in self.names if other.startswith(name)}
        return fitting.pop() if len(fitting) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        """All names after two dashes, in alphabetical order."""
        return tuple(sorted(name for name in {*self.switches, *self.valued, *self.short} if len(name) > 1))


def _flags(*, switches: str, valued: str, short: Mapping[str, str], **more: bool) -> LauncherFlags:
    return LauncherFlags(
        switches=frozenset(switches.split()), valued=frozenset(valued.split()), short=short, **more
    )


TORCHRUN = _flags(  # torch/distributed/run.py; use_env is of torch.distributed.launch
    switches="""
        help standalone module no_python run_path virtual_local_rank use_env
        """,
    valued="""
        nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts
        monitor_interval start_method event_log_handler role log_dir redirects tee
        local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters node_rank
        master_addr master_port local_addr logs_specs numa_binding signals_to_handle
        shutdown_timeout
        """,
    short={"h": "help", "m": "module", "r": "redirects", "t": "tee"},
    abbreviates=True,
)
DEEPSPEED = _flags(  # deepspeed/launcher/runner.py
    switches="""
        help module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid
        bind_cores_to_rank quiet
        """,
    valued="""
        hostfile include exclude num_nodes num_gpus master_port master_addr node_rank launcher
        launcher_args enable_each_rank_log autotuning bind_core_list ssh_port venv_script
        log_level
        """,
    short={
        "h": "help",
        "H": "hostfile",
        "i": "include",
        "e": "exclude",
        "q": "quiet",
        "num_accelerators": "num_gpus",
    },
    abbreviates=True,
    takes_dashes=False,
)
ZEROFIT = _flags(  # zerofit/cli/launch.py
    switches="""
        help version debug gradient_checkpointing no_gradient_checkpointing compile cpu module
        dry_run no_check
        """,
    valued="""
        preset plan engine zero_stage offload_optimizer offload_param nvme_path
        mixed_precision micro_batch_size gradient_accumulation_steps global_batch_size
        gradient_clipping optimizer num_processes num_machines machine_rank main_process_ip
        main_process_port nproc_per_node hostfile gpu_ids run_dir
        """,
    short={
        "h": "help",
        "m": "module",
        "offload_optimizer_device": "offload_optimizer",
        "offload_param_device": "offload_param",
        "nnodes": "num_machines",
        "node_rank": "machine_rank",
        "master_addr": "main_process_ip",
        "master_port": "main_process_port",
    },
)


_FIELDS: Mapping[str, Callable[[str], Any]] = {
    "engine": Engine,
    "zero_stage": lambda word: ZeroStage(int(word)),
    "optimizer_offload": OffloadDevice,
    "param_offload": OffloadDevice,
    "precision": Precision,
    "micro_batch_size": int,
    "gradient_accumulation_steps": int,
    "optimizer": OptimizerName,
}
"""Fields of a strategy that flags of `zerofit launch` set, and how their words are read."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?t?$")
_WRAPPERS = ("nohup", "time", "exec")
"""Commands that run the rest of the line unchanged."""
_RUNNERS = ("srun", "uv", "poetry", "pipenv", "conda", "numactl", "nsys")
"""Commands that have their own flags before the command to run."""
_LAUNCHERS = {
    "accelerate-launch": Launcher.ACCELERATE,
    "torchrun": Launcher.TORCHRUN,
    "deepspeed": Launcher.DEEPSPEED,
    "deepspeed.pt": Launcher.DEEPSPEED,
}
PROGRAMS = ("accelerate", "zerofit", *_LAUNCHERS)
_ENV_WITH_VALUE = ("-u", "--unset", "-C", "--chdir")
_PYTHON_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_MODULES = {
    "accelerate.commands.launch": Launcher.ACCELERATE,
    "torch.distributed.run": Launcher.TORCHRUN,
    "torch.distributed.launch": Launcher.TORCHRUN,
    "deepspeed.launcher.runner": Launcher.DEEPSPEED,
}


def read_command(words: Sequence[str], *, launch_flags: Section) -> LaunchCommand | None:
    """Return a parsed launch command; None if it does not start a Python script in a known way.

    Args:
        words: the command, split as by a shell.
        launch_flags: the flags of `accelerate launch`, as in Schemas.accelerate_launch.
    """
    rest = _without_wrappers(list(words))
    command = _from_launcher(rest, launch_flags) if rest else None
    if command is None:
        return None
    before = list(words[: len(words) - len(rest)])
    variables = tuple(word.partition("=")[::2] for word in before if _ASSIGNMENT.match(word))
    runner = next((word for word in before if _program(word) in _RUNNERS), None)
    return replace(command, environment=variables, runner=runner)


def _from_launcher(rest: list[str], launch_flags: Section) -> LaunchCommand | None:
    """Return the parsed command that starts with its launcher."""
    program = _program(rest[0])
    if program in ("accelerate", "zerofit"):
        launcher = Launcher.ACCELERATE if program == "accelerate" else Launcher.ZEROFIT
        return _launch(launcher, rest[2:], launch_flags) if rest[1:2] == ["launch"] else None
    if program in _LAUNCHERS:
        return _launch(_LAUNCHERS[program], rest[1:], launch_flags)
    return _python(rest[1:], launch_flags) if _PYTHON.match(program) else None


def _without_wrappers(words: list[str]) -> list[str]:
    """Return a command without leading VAR=value, `env` and similar."""
    while words:
        if _ASSIGNMENT.match(words[0]) or words[0] in _WRAPPERS:
            words = words[1:]
        elif _program(words[0]) == "env":
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[2 if words[0] in _ENV_WITH_VALUE else 1 :]
        elif _program(words[0]) in _RUNNERS:
            begin = next((i for i, word in enumerate(words) if _is_launcher(word)), len(words))
            words = words[begin:]
        else:
            break
    return words


def _program(word: str) -> str:
    return word.rpartition("/")[2]


def _is_launcher(word: str) -> bool:
    program = _program(word)
    return program in PROGRAMS or _PYTHON.match(program) is not None


def _python(words: list[str], launch_flags: Section) -> LaunchCommand | None:
    while words and words[0].startswith("-"):
        if words[0] == "-c":
            return None
        if words[0] == "-m":
            return _module(words[1:], launch_flags)
        words = words[2 if words[0] in _PYTHON_WITH_VALUE else 1 :]
    return _command(Launcher.PYTHON, (), words) if words else None


def _module(words: list[str], launch_flags: Section) -> LaunchCommand | None:
    if not words:
        return None
    if words[0] in _MODULES:
        return _launch(_MODULES[words[0]], words[1:], launch_flags)
    if words[:2] == ["zerofit", "launch"]:
        return _launch(Launcher.ZEROFIT, words[2:], launch_flags)
    return _command(Launcher.PYTHON, (), words)


def _launch(launcher: Launcher, words: list[str], launch_flags: Section) -> LaunchCommand:
    known = {
        Launcher.ACCELERATE: _of_section(launch_flags),
        Launcher.TORCHRUN: TORCHRUN,
        Launcher.DEEPSPEED: DEEPSPEED,
        Launcher.ZEROFIT: ZEROFIT,
    }[launcher]
    flags = []
    while words and words[0].startswith("-") and words[0] != "--":
        flag, words = _flag(words, known)
        flags.append(flag)
    return _command(launcher, tuple(flags), words[1:] if words[:1] == ["--"] else words)


def _command(launcher: Launcher, flags: tuple[Flag, ...], words: list[str]) -> LaunchCommand:
    return LaunchCommand(
        launcher=launcher, flags=flags, script=words[0] if words else None, arguments=tuple(words[1:])
    )


def _of_section(section: Section) -> LauncherFlags:
    switches = {key.name for key in section.keys if key.kinds == (ValueKind.BOOL,)}
    return LauncherFlags(
        switches=frozenset(switches),
        valued=frozenset(key.name for key in section.keys if key.name not in switches),
        short={alias: key.name for key in section.keys for alias in key.aliases},
    )


def _flag(words: list[str], known: LauncherFlags) -> tuple[Flag, list[str]]:
    """Return the flag at the start of the words, and the words after it and its value."""
    word, *rest = words
    written, equals, value = word.partition("=")
    name = written.lstrip("-").replace("-", "_")
    name = known.find(name) or name
    if equals:
        return Flag(name=name, value=value, text=word), rest
    if name in known.switches or not rest or not _is_value(rest[0], name in known.valued):
        return Flag(name=name, value=None, text=word), rest
    return Flag(name=name, value=rest[0], text=f"{word} {rest[0]}"), rest[1:]


def _is_value(word: str, is_valued: bool) -> bool:
    """Return True if a word is the value of the flag before it; after an unknown flag, a script is not."""
    if word.startswith("-"):
        return re.fullmatch(r"-\d+(\.\d+)?", word) is not None
    return is_valued or not word.endswith(".py")


def settings_of_zerofit(command: LaunchCommand) -> RunSettings:
    """Return the settings of a `zerofit launch` line; what no flag sets is unknown: the planner decides."""
    fields: dict[str, Said[Any]] = {}
    for name, parse in _FIELDS.items():
        flag = command.find(FLAGS[name].removeprefix("--").replace("-", "_"))
        if flag is not None and flag.value is not None:
            with contextlib.suppress(ValueError):  # zerofit itself refuses it
                value = parse(flag.value.lower().replace("_", "-"))
                fields[name] = Said(value=value, text=flag.text)
    if (checkpointing := command.find("gradient_checkpointing", "no_gradient_checkpointing")) is not None:
        value = checkpointing.name == "gradient_checkpointing"
        fields["gradient_checkpointing"] = Said(value=value, text=checkpointing.text)
    return RunSettings(
        names=dict(FLAGS),
        fields=fields,
        engine=fields.get("engine"),
        zero_stage=fields.get("zero_stage"),
        optimizer_offload=fields.get("optimizer_offload"),
        param_offload=fields.get("param_offload"),
        precision=fields.get("precision"),
    )
