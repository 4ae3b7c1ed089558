"""Settings of a command line of accelerate, torchrun, DeepSpeed's launcher or python."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import refuse
from zerofit.checking.inputs.command_line import read_command
from zerofit.checking.inputs.fsdp import read_fsdp
from zerofit.checking.inputs.fsdp_words import FSDP_FLAGS, words_of_line
from zerofit.checking.script_files import read_bytes
from zerofit.checking.situation import Situation
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import decode, format_of, read_document
from zerofit.core.command import RANK_FOR_EACH_GPU, Launcher, Refusal, RefusedFlag
from zerofit.core.errors import Unreadable, UserError, bad_value
from zerofit.core.overrides import flag_of
from zerofit.core.strategy import Engine

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from zerofit.checking.inputs.fsdp import FsdpSettings
    from zerofit.configs.document import Document
    from zerofit.core.command import Flag, LaunchCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLine:
    """A parsed command line of another launcher."""

    words: tuple[str, ...]
    """The flags for `zerofit launch`."""
    target: tuple[str, ...]
    """The script or module, and its arguments."""
    is_module: bool
    """True for a module, as with python -m."""
    environment: tuple[tuple[str, str], ...]
    """Variables set in the line."""
    left_out: tuple[str, ...]
    """Flags that zerofit ignores, as the user wrote them."""
    command: LaunchCommand
    """The line as its launcher parses it."""
    notes: tuple[str, ...] = ()
    """What was translated from FSDP's words, one sentence each."""

    @property
    def names(self) -> tuple[str, ...]:
        """The settings of these flags, as keyword arguments of `zerofit.launch`."""
        return tuple(dict.fromkeys((_NAMES.get(flag) or _SWITCHES[flag])[0] for flag, _ in self._pairs()))

    @property
    def settings(self) -> dict[str, Any]:
        """Their values.

        Raises:
            UserError: one is no number.
        """
        return _settings(self._pairs())

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each flag with its value, which a switch has not."""
        rest = iter(self.words)
        for flag in rest:
            yield flag, "" if flag in _SWITCHES else next(rest, "")

    def words_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the flags of some settings, with their values."""
        wanted, words = set(names), list[str]()
        for flag, value in self._pairs():
            name, _ = _SWITCHES[flag] if flag in _SWITCHES else _NAMES[flag]
            if name in wanted:
                words += (flag,) if flag in _SWITCHES else (flag, value)
        return tuple(words)


_SAME_WORDS = """
    num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids config_file
    deepspeed_config_file use_deepspeed zero_stage offload_optimizer_device offload_param_device
    gradient_accumulation_steps gradient_clipping cpu
    nnodes node_rank nproc_per_node master_addr master_port
    hostfile num_gpus
    """
_SAME = frozenset(_SAME_WORDS.split())
"""Flags that `zerofit launch` has with the same meaning; torchrun's and DeepSpeed's in the last line."""
_RENAMED = {
    "use_cpu": "--cpu",
    "num_nodes": "--num-machines",
    "num_accelerators": "--num-gpus",
    "deepspeed_hostfile": "--hostfile",
    "offload_optimizer_nvme_path": "--nvme-path",
    "offload_param_nvme_path": "--nvme-path",
    "parallelism_config_sp_size": "--sequence-parallel-size",
    "parallelism_config_tp_size": "--tensor-parallel-size",
}
_IGNORED_WORDS = """
    multi_gpu same_network rdzv_backend rdzv_id rdzv_conf rdzv_endpoint standalone local_addr
    monitor_interval start_method event_log_handler log_dir redirects tee local_ranks_filter role quiet debug
    num_cpu_threads_per_process enable_cpu_affinity use_env no_local_rank launcher no_ssh no_ssh_check
    force_multi bind_cores_to_rank bind_core_list save_pid enable_each_rank_log log_level
    main_training_function deepspeed_multinode_launcher zero3_init_flag zero3_save_16bit_model
    downcast_bf16 module
    use_fsdp use_parallelism_config parallelism_config_dp_shard_size
    parallelism_config_sp_backend parallelism_config_sp_seq_length
    parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation
    """
_IGNORED = frozenset(_IGNORED_WORDS.split())
"""Flags for the launcher's rendezvous and logs, which zerofit handles itself; ZeRO-3 always loads in shards
and saves whole weights."""
_UNSUPPORTED = {
    "use_megatron_lm": "zerofit splits models with --tensor-parallel-size and --pipeline-parallel-size, "
    "without Megatron-LM",
    "tpu": "zerofit plans for NVIDIA GPUs",
    "use_xpu": "zerofit plans for NVIDIA GPUs",
    "no_python": "zerofit runs inside the Python process of each rank",
    "run_path": "zerofit runs inside the Python process of each rank",
    "autotuning": "zerofit's plan replaces it",
    "exclude": "zerofit selects a node's GPUs by --gpu-ids",
}
"""Flags that can't be ignored, and why zerofit does not support them."""


def read_line(words: Sequence[str]) -> ReadLine | None:
    """Return a parsed command line of another launcher; None for a script or module with its arguments.

    Raises:
        UserError: it has something that zerofit does not support, or starts nothing.
    """
    command = read_command(words, schemas=load_schemas())
    if command is None or command.launcher is Launcher.ZEROFIT:
        return None
    if command.runner is not None:
        raise _starts_by_runner(command.runner, words)
    script = _script_of(command)
    flags: list[str] = []
    left_out: list[str] = []
    if command.launcher is Launcher.TORCHRUN and command.find("nproc_per_node") is None:
        flags += ["--nproc-per-node", "1"]  # the default in torch/distributed/run.py
    fsdp = words_of_line(command, file=_config_file(command))
    settings = None if fsdp is None else read_fsdp(fsdp)
    for flag in command.flags:
        if settings is not None and (flag.name.startswith("fsdp_") or flag.name in ("use_fsdp", *FSDP_FLAGS)):
            continue
        taken = _own_flag(flag, command)
        flags += taken
        if not taken and flag.name not in ("module", "mixed_precision"):
            left_out.append(flag.text)
    flags += [] if settings is None else _words_of_fsdp(settings)
    is_module = command.find("module") is not None or _is_python_module(words, command)
    return ReadLine(
        words=tuple(flags),
        target=(script, *command.arguments),
        is_module=is_module,
        environment=command.environment,
        left_out=tuple(left_out),
        command=command,
        notes=() if settings is None else settings.notes,
    )


def names_beside(line: ReadLine, own: Collection[str]) -> tuple[str, ...]:
    """Return the settings of a line that count beside zerofit's own flags.

    Args:
        line: the line behind them.
        own: the settings that these flags set.
    """
    left_out = () if RANKS.isdisjoint(own) else RANKS
    left_out = (*left_out, *(("gpu_ids",) if "on_cpu" in own else ()))
    return tuple(name for name in line.names if name not in left_out)


def ineffective_settings(line: ReadLine, ignored: Iterable[Flag]) -> tuple[str, ...]:
    """Return the settings of a line's flags that its launcher ignores."""
    taken = (_own_flag(flag, line.command)[:1] for flag in ignored)
    return tuple(dict.fromkeys(_NAMES[flag][0] for own in taken for flag in own))


def with_line_behind(command: LaunchCommand) -> LaunchCommand:
    """Return a `zerofit launch` line with the line of another launcher behind it as its own flags.

    Raises:
        UserError: that line has something that zerofit does not support.
    """
    if command.launcher is not Launcher.ZEROFIT or command.script is None or command.find("module"):
        return command
    line = read_line((command.script, *command.arguments))
    if line is None:
        return command
    own = [word for flag in command.flags for word in flag.words]
    said = [f"--{flag.name.replace('_', '-')}" for flag in command.flags]
    kept = names_beside(line, [(_NAMES.get(flag) or _SWITCHES.get(flag) or (flag,))[0] for flag in said])
    words = [*line.words_of(kept), *own, *(["-m"] if line.is_module else []), *line.target]
    whole = read_command(["zerofit", "launch", *words], schemas=load_schemas()) or command
    return replace(
        whole,
        environment=(*command.environment, *line.environment),
        runner=command.runner,
        behind=line.command,
        own_flags=frozenset(flag.name for flag in command.flags),
    )


def _config_file(command: LaunchCommand) -> Document | None:
    """Return the file of `accelerate config` that a line names; None if it names none that can be read."""
    flag = command.find("config_file")
    if flag is None or not flag.value:
        return None
    try:
        text = decode(read_bytes(flag.value))
        return read_document(text, name=flag.value, format=format_of(flag.value, text))
    except (UserError, Unreadable):
        return None  # which is reported when the file is read for its settings


def _words_of_fsdp(settings: FsdpSettings) -> list[str]:
    """Return settings of FSDP as zerofit's flags."""
    words: list[str] = []
    for name, said in settings.said.items():
        flag = flag_of(name, said.value)
        words += [flag] if isinstance(said.value, bool) else [flag, str(said.value)]
    return words


def _script_of(command: LaunchCommand) -> str:
    """Return the script of a line that its launcher takes; the errors are those of `zerofit check`."""
    from zerofit.checking.rules.launch.flags import ON_LINES  # only for lines: the rules take time

    no_script = RefusedFlag(flag=None, why=Refusal.NO_SCRIPT)
    if command.script is None and no_script not in command.refused:
        command = replace(command, refused=(*command.refused, no_script))
    refuse(Situation(command=command, schemas=load_schemas()), rules=ON_LINES)
    assert command.script is not None
    return command.script


_NAMES: dict[str, tuple[str, type]] = {
    "--num-processes": ("num_processes", int),
    "--num-machines": ("num_nodes", int),
    "--nnodes": ("num_nodes", int),
    "--machine-rank": ("machine_rank", int),
    "--node-rank": ("machine_rank", int),
    "--main-process-ip": ("main_process_ip", str),
    "--master-addr": ("main_process_ip", str),
    "--main-process-port": ("main_process_port", int),
    "--master-port": ("main_process_port", int),
    "--gpu-ids": ("gpu_ids", str),
    "--nproc-per-node": ("ranks_per_node", int),
    "--num-gpus": ("ranks_per_node", int),
    "--config-file": ("config_file", str),
    "--deepspeed-config-file": ("deepspeed_file", str),
    "--hostfile": ("hostfile", str),
    "--zero-stage": ("zero_stage", int),
    "--offload-optimizer-device": ("optimizer_offload", str),
    "--offload-param-device": ("param_offload", str),
    "--nvme-path": ("nvme_path", str),
    "--gradient-accumulation-steps": ("gradient_accumulation_steps", int),
    "--gradient-clipping": ("gradient_clipping", float),
    "--mixed-precision": ("precision", str),
    "--sequence-parallel-size": ("sequence_parallel_size", int),
    "--tensor-parallel-size": ("tensor_parallel_size", int),
    "--engine": ("engine", str),
    "--state-dict-type": ("state_dict_type", str),
    "--dp-replicate-size": ("dp_replicate_size", int),
    "--offload-optimizer": ("optimizer_offload", str),
    "--offload-param": ("param_offload", str),
}
"""The keyword argument of each flag with a value, and its type."""
_SWITCHES = {
    "--cpu": ("on_cpu", True),
    "--use-deepspeed": ("engine", Engine.DEEPSPEED),
    "--compile": ("compile", True),
    "--reshard-after-forward": ("reshard_after_forward", True),
    "--no-reshard-after-forward": ("reshard_after_forward", False),
    "--gradient-checkpointing": ("gradient_checkpointing", True),
    "--offload-activations": ("activation_offload", True),
}
"""The keyword argument of each flag without a value, and what it says."""
RANKS = frozenset({"num_processes", "ranks_per_node"})
"""Settings of the number of ranks, of which one source gives all."""
_ANY_GPU = ("gpu", "auto")
"""torchrun's words for one rank per GPU."""


def _settings(flags: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return flags as keyword arguments of `zerofit.launch`; the last of equal ones counts."""
    settings: dict[str, Any] = {}
    for flag, text in flags:
        if flag in _SWITCHES:
            name, value = _SWITCHES[flag]
            settings.setdefault(name, value)
            continue
        name, kind = _NAMES[flag]
        try:
            is_any = name == "ranks_per_node" and text in _ANY_GPU
            settings[name] = RANK_FOR_EACH_GPU if is_any else kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise bad_value(flag, text, why=f"it is {what}", fix=f"write it as in {flag} 2") from None
    return settings


def _own_flag(flag: Flag, command: LaunchCommand) -> list[str]:
    """Return a flag as `zerofit launch` has it; empty if it is ignored."""
    name, value = flag.name, flag.value
    values = [] if value is None else [value]
    if name in _SAME:
        return [f"--{name.replace('_', '-')}", *values]
    if name in _RENAMED:
        return [_RENAMED[name], *values] if value != "none" else []
    if name == "mixed_precision":
        # A script's own value overrides "no" as well as none: accelerate and Trainer behave the same.
        return ["--mixed-precision", *values] if value != "no" else []
    if name == "dynamo_backend":
        return ["--compile"] if value not in ("no", None) else []
    if name == "rdzv_endpoint" and command.find("nnodes") is not None and value:
        host, _, port = value.rpartition(":")
        return ["--main-process-ip", host or port, *(["--main-process-port", port] if host else [])]
    if name == "include" and value is not None:
        return _included_gpus(flag)
    if name == "max_restarts" and value == "0":
        return []
    if name in _IGNORED or name.startswith("fsdp_") or (name in FSDP_FLAGS and value in ("1", None)):
        return []
    _refuse_unknown(flag, command)
    raise _refused(flag, command)


def _refuse_unknown(flag: Flag, command: LaunchCommand) -> None:
    """Check that the launcher knows a flag; the error is that of `zerofit check`."""
    from zerofit.checking.rules.launch.flags import ON_UNKNOWN_FLAGS

    of_flag = tuple(refused for refused in command.refused if refused.flag == flag)
    situation = Situation(command=replace(command, refused=of_flag), schemas=load_schemas())
    refuse(situation, rules=ON_UNKNOWN_FLAGS)


def _included_gpus(flag: Flag) -> list[str]:
    """Return DeepSpeed's --include localhost:0,1 as GPUs of this node."""
    host, colon, ids = (flag.value or "").partition(":")
    if host != "localhost" or not colon or not re.fullmatch(r"\d+(,\d+)*", ids):
        raise UserError(
            "launcher-flag-not-taken",
            "a flag of another launcher is not supported",
            found=flag.text,
            why="zerofit is started separately on each node, and reads nodes from a hostfile",
            fix="pass --hostfile FILE before the launcher, and leave this out",
        )
    return ["--gpu-ids", ids, "--nproc-per-node", str(len(ids.split(",")))]


def _is_python_module(words: Sequence[str], command: LaunchCommand) -> bool:
    """Return True for `python -m NAME ARGS`."""
    behind = len(words) - len(command.arguments) - 1
    return command.launcher is Launcher.PYTHON and behind > 0 and words[behind - 1] == "-m"


def _refused(flag: Flag, command: LaunchCommand) -> UserError:
    why = _UNSUPPORTED.get(flag.name, "zerofit launch has no flag that does the same")
    return UserError(
        "launcher-flag-not-taken",
        f"a flag of {command.launcher} is not supported",
        found=flag.text,
        why=why,
        fix="leave it out, or start this run without zerofit",
    )


def _starts_by_runner(runner: str, words: Sequence[str]) -> UserError:
    rest = list(words)
    begin = next(
        number
        for number in range(rest.index(runner) + 1, len(rest))
        if read_command(rest[number:], schemas=load_schemas()) is not None
    )
    return UserError(
        "runner-behind-zerofit",
        f"zerofit must be started by {runner}, not the other way round",
        found=f"{runner} behind zerofit",
        why=f"{runner} chooses where and in which environment the rest of its line runs",
        fix=f"{shlex.join([*rest[:begin], 'zerofit', 'launch', *rest[begin:]])}; plan, tune and submit take "
        f"the line without {shlex.join(rest[:begin])}",
    )
