"""The flags of accelerate launch, torchrun, deepspeed and zerofit launch, off their own parsers."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from zerofit.configs.schema import Key, OnUnknown, Schema, Section, ValueKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import click

_DEVICES = ("none", "cpu", "nvme")
_TRUTH = ("true", "false", "yes", "no", "t", "f", "y", "n", "on", "off", "1", "0")
"""accelerate/utils/environment.py, str_to_bool."""
_STD = r"[0-3]|(\d+:[0-3],)*\d+:[0-3]"
"""torch/distributed/elastic/multiprocessing/api.py, Std.from_str."""
_RANKS_PER_NODE = r"auto|cpu|gpu|xpu|npu|hpu|mlu|musa|[+-]?\d+"
"""torch/distributed/run.py, determine_local_world_size; with the devices that plug-ins of torch bring."""
_NODES = r"\d+(:\d+)?"
"""torch/distributed/run.py, parse_min_max_nnodes."""
_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
"""torch/distributed/elastic/rendezvous/registry.py."""


def _truth() -> dict[str, Any]:
    return {"choices": _TRUTH, "ignores_case": True}


def _texts(pattern: str, example: str) -> dict[str, Any]:
    return {"pattern": pattern, "example": example}


_ACCELERATE_CHECKS: Mapping[str, Mapping[str, Any]] = {
    "zero_stage": {"at_least": 0, "at_most": 3},
    "offload_optimizer_device": {"choices": _DEVICES, "ignores_case": True},
    "offload_param_device": {"choices": _DEVICES, "ignores_case": True},
    "zero3_init_flag": _truth(),
    "zero3_save_16bit_model": _truth(),
    "fsdp_offload_params": _truth(),
    "fsdp_forward_prefetch": _truth(),
    "fsdp_use_orig_params": _truth(),
    "fsdp_cpu_ram_efficient_loading": _truth(),
    "fsdp_sync_module_states": _truth(),
    "fsdp_activation_checkpointing": _truth(),
    "fsdp_activation_checkpointing_offload": _truth(),
    "fp8_override_linear_precision": _texts(
        f"(?i:({'|'.join(_TRUTH)})(,({'|'.join(_TRUTH)}))*)", "true,false,true"
    ),
    "main_process_port": {"at_least": 0, "at_most": 65535},
    "tee": _texts(_STD, "3 or 0:3,1:1"),
    "rdzv_backend": {"choices": _RENDEZVOUS},
}
"""What accelerate (utils/launch.py, utils/dataclasses.py) or torch demands of a value once it is parsed."""
_TORCHRUN_CHECKS: Mapping[str, Mapping[str, Any]] = {
    "nnodes": _texts(_NODES, "2 or 1:4"),
    "nproc_per_node": _texts(_RANKS_PER_NODE, "8, gpu or auto"),
    "rdzv_backend": {"choices": _RENDEZVOUS},
    "max_restarts": {"at_least": 0},
    "master_port": {"at_least": 0, "at_most": 65535},
    "redirects": _texts(_STD, "3 or 0:3,1:1"),
    "tee": _texts(_STD, "3 or 0:3,1:1"),
}
_DEEPSPEED_CHECKS: Mapping[str, Mapping[str, Any]] = {
    "launcher": {"choices": ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"), "ignores_case": True},
    "master_port": {"at_least": 0, "at_most": 65535},
}
"""deepspeed/launcher/runner.py: another launcher is a NotImplementedError."""
_ANY_NUMBER = "a number"
_KINDS: Mapping[Any, tuple[ValueKind, ...]] = {int: (ValueKind.INTEGER,), float: (ValueKind.NUMBER,)}


def probe_accelerate_launch_schema() -> Schema:
    """Return the flags of `accelerate launch`; a switch has the one type bool, other flags take a value."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.constants import (
        DEEPSPEED_MULTINODE_LAUNCHERS,
        FSDP_AUTO_WRAP_POLICY,
        FSDP_BACKWARD_PREFETCH,
        FSDP_SHARDING_STRATEGY,
        FSDP_STATE_DICT_TYPE,
    )

    lists: dict[str, dict[str, Any]] = {
        "deepspeed_multinode_launcher": {"choices": tuple(DEEPSPEED_MULTINODE_LAUNCHERS)},
        "fsdp_auto_wrap_policy": {"choices": tuple(FSDP_AUTO_WRAP_POLICY), "ignores_case": True},
        "fsdp_backward_prefetch": {
            "choices": (*_with_numbers(FSDP_BACKWARD_PREFETCH[:-1]), *FSDP_BACKWARD_PREFETCH[-1:]),
            "ignores_case": True,
        },
        "fsdp_sharding_strategy": {
            "choices": (*_with_numbers(FSDP_SHARDING_STRATEGY), "_HYBRID_SHARD_ZERO2"),
            "ignores_case": True,
        },
        "fsdp_state_dict_type": {"choices": _with_numbers(FSDP_STATE_DICT_TYPE), "ignores_case": True},
    }
    return _schema("accelerate", launch_command_parser()._actions, {**_ACCELERATE_CHECKS, **lists})


def _with_numbers(names: Iterable[str]) -> tuple[str, ...]:
    """Return names and their numbers from 1 on, which FullyShardedDataParallelPlugin takes too."""
    listed = tuple(names)
    return (*listed, *(str(number) for number, _ in enumerate(listed, 1)))


def probe_torchrun_schema() -> Schema:
    """Return the flags of torchrun, and those that only `python -m torch.distributed.launch` has."""
    from torch.distributed.launch import parse_args
    from torch.distributed.run import get_args_parser

    own = {action.dest for action in get_args_parser()._actions}
    return _schema("torch", parser_of(parse_args)._actions, _TORCHRUN_CHECKS, others=own)


def probe_deepspeed_launcher_schema() -> Schema:
    """Return the flags of the deepspeed launcher."""
    from deepspeed.launcher.runner import parse_args

    return _schema("deepspeed", parser_of(parse_args)._actions, _DEEPSPEED_CHECKS)


def probe_zerofit_launch_schema() -> Schema:
    """Return the flags of `zerofit launch`, off its command."""
    import click

    from zerofit.cli.launch import launch
    from zerofit.core.version import VERSION

    params = launch.get_params(click.Context(launch, **launch.context_settings))
    options = [param for param in params if isinstance(param, click.Option)]
    keys = [key for option in options for key in _option(option)]
    root = Section(keys=tuple(keys), on_unknown=OnUnknown.REJECTS)
    return Schema(package="zerofit", version=VERSION, root=root)


def _option(option: click.Option) -> Iterator[Key]:
    """Yield the key of one of zerofit's options, and that of its negation."""
    from zerofit.cli.parameters import Number, Word

    name, *others = [_plain(opt) for opt in sorted(option.opts, key=lambda opt: not opt.startswith("--"))]
    kind = ValueKind.BOOL if option.is_flag else ValueKind.STRING
    words: tuple[str, ...] = ()
    if isinstance(option.type, Number) and not option.type.words:
        kind = ValueKind.INTEGER if option.type.is_whole else ValueKind.NUMBER
    elif isinstance(option.type, Number):
        words = (*option.type.words, _ANY_NUMBER)
    elif isinstance(option.type, Word):
        words = option.type.words
    yield Key(
        name=name,
        kinds=(kind,),
        converts=not option.is_flag,
        pattern=_pattern(words),
        example=", ".join(words[:-1]) + (" or " if words[1:] else "") + "".join(words[-1:]),
        aliases=tuple(sorted(others)),
    )
    for negated in option.secondary_opts:
        yield Key(name=_plain(negated), kinds=(ValueKind.BOOL,))


def _pattern(words: Iterable[str]) -> str:
    """Return the expression of words as zerofit reads them: in any case, with hyphens or underscores."""
    each = (r"\d+" if word == _ANY_NUMBER else re.escape(word).replace(r"\-", "[-_]") for word in words)
    pattern = "|".join(each)
    return f"(?i:{pattern})" if pattern else ""


def parser_of(parse: Callable[[list[str]], object]) -> argparse.ArgumentParser:
    """Return the parser that a launcher's function makes for itself."""
    made: list[argparse.ArgumentParser] = []
    as_it_is = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **more: Any) -> Any:
        made.append(self)
        return as_it_is(self, *args, **more)

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    try:
        parse(["x.py"])
    finally:
        argparse.ArgumentParser.parse_args = as_it_is  # type: ignore[method-assign]
    return made[0]


def _schema(
    package: str,
    actions: Iterable[argparse.Action],
    checks: Mapping[str, Mapping[str, Any]],
    *,
    others: set[str] | None = None,
) -> Schema:
    """Return the schema of some actions.

    Args:
        package: the library that has the parser.
        actions: its options and positional arguments.
        checks: fields of a key that its parser does not show, since they are checked later.
        others: if given, flags beside these belong to `python -m torch.distributed.launch`.
    """
    keys = []
    for action in actions:
        if any(name.startswith("--") for name in action.option_strings):
            reader = "" if others is None or action.dest in others else "torch.distributed.launch"
            keys.append(_flag(action, checks, reader))
    return Schema(
        package=package,
        version=version(package).partition("+")[0],
        root=Section(keys=tuple(keys), on_unknown=OnUnknown.REJECTS),
    )


def _flag(action: argparse.Action, checks: Mapping[str, Mapping[str, Any]], reader: str) -> Key:
    names = list(dict.fromkeys(_plain(name) for name in action.option_strings))
    name = next(name for name in names if len(name) > 1)
    choices: tuple[str | int, ...] = tuple(action.choices or ())
    if getattr(action.type, "__name__", "") == "str_to_bool":
        checks = {**checks, name: _truth()}
    return Key(
        **{
            "name": name,
            "kinds": (ValueKind.BOOL,) if action.nargs == 0 else _KINDS.get(action.type, (ValueKind.STRING,)),
            "converts": action.nargs != 0,
            "choices": choices,
            "aliases": tuple(sorted(set(names) - {name})),
            "reader": reader,
            **checks.get(name, {}),
        }
    )


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
