"""Flags of planning: model, workload, machine and allowed changes; shared by the verbs that plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.completion import complete_gpus, complete_model, matching
from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.parameters import (
    DTYPE,
    POSITIVE,
    TASK,
    ParamType,
    Parsed,
    Word,
    number_option,
    option_group,
    remember_typed,
)
from zerofit.core.errors import UserError, nearest
from zerofit.core.overrides import FLAGS
from zerofit.core.units import parse_bytes
from zerofit.planning.options import DEFAULT_RESERVE, Allow, Loop, Reserve

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem


class _Allowed(ParamType[frozenset[Allow]]):
    """Comma-separated keywords."""

    name = "allow"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> frozenset[Allow]:
        if isinstance(value, frozenset):
            return value
        word = Word("allow", Allow)
        return frozenset(word.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip())

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return ",".join(Allow)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return matching(Allow, last, before + comma)


def _reserve(text: str) -> Reserve:
    """Return a share of the GPU, or a size."""
    text = text.strip()
    if text == "0":
        return Reserve()
    if not text.endswith("%"):
        return Reserve(num_bytes=parse_bytes(text))
    share = float(text[:-1]) / 100
    if not 0 <= share < 1:
        raise ValueError(text)
    return Reserve(share=share)


_RESERVE = Parsed(
    "reserve",
    _reserve,
    why="it must be a share of the GPU from 0% to 99%, or a size with a unit",
    fix="write it as in --reserve 5% or --reserve 4G",
)

model_options = option_group(
    click.option(
        "--model",
        metavar="MODEL",
        shell_complete=complete_model,
        help="A folder, config.json, hub id or name from the catalog.",
    ),
    number_option(
        "--seq-len",
        "--sequence-length",
        "--max-seq-length",
        "sequence_length",
        help="Tokens of the longest sample; for a speech model, of its text.",
    ),
    number_option(
        "--target-len",
        "--target-length",
        "target_length",
        help="Tokens of an encoder-decoder's longest target; default: the sample's.",
    ),
    click.option("--task", type=TASK, help=TASK.listed("Task of the model's head.")),
    click.option(
        "--padded/--no-padded",
        "is_padded",
        default=None,
        help="Whether the attention mask contains padding; default: padded.",
    ),
    click.option(
        "--loop",
        type=Word("loop", Loop),
        help="Training loop; default: the script's, otherwise plain, which needs more.",
    ),
    click.option(
        "--dtype",
        type=DTYPE,
        metavar="[fp32|fp16|bf16]",
        help="Format in which the script loads the weights; default: the checkpoint's.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."),
    click.option(
        "--allow",
        type=_Allowed(),
        default=frozenset(),
        help="Changes permitted if nothing else fits; to what is trained, or on what.",
    ),
    click.option(
        "--reserve",
        type=_RESERVE,
        metavar="SHARE|SIZE",
        default=Reserve(share=DEFAULT_RESERVE),
        help=f"Memory to leave free on each GPU; default: {DEFAULT_RESERVE:.0%}.",
    ),
    click.option(
        "--expandable-segments",
        is_flag=True,
        help="The run sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    click.option(
        "--fast",
        "is_fast",
        is_flag=True,
        help="Use closed forms instead of a trace, in a second; plan then says what fits or may fit.",
    ),
    click.option(
        "--fastest",
        "takes_fastest",
        is_flag=True,
        help="Use the fastest strategy, even in 16 bits; if SCRIPT names no precision.",
    ),
)
"""The flags for model and workload."""

_MACHINE_OPTIONS = (
    click.option("--host-ram", metavar="SIZE", help="Host memory of one node, such as 1T; with --gpus."),
    click.option(
        "--nvme", metavar="SIZE", help="Free space on one node's NVMe disks, such as 7T; with --gpus."
    ),
    click.option("--cpu-cores", type=POSITIVE, help="Physical cores of one node; with --gpus."),
    click.option(
        "--host-bandwidth",
        metavar="RATE",
        help="Bandwidth of one node's host memory, such as 300GB/s; with --gpus.",
    ),
    click.option("--network", metavar="RATE", help="Bandwidth between nodes, such as 400Gb/s; with --gpus."),
)


def machine_options(
    *, gpus: str = "GPUs of one node, such as 8xA100-80G; default: the local ones."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the flags for another machine.

    Args:
        gpus: the help of --gpus.
    """
    gpus_option = click.option("--gpus", metavar="SPEC", shell_complete=complete_gpus, help=gpus)
    return option_group(gpus_option, *_MACHINE_OPTIONS)


class FixingVerb(GroupedVerb):
    """A verb that accepts --fix NAME=VALUE for the flag of that name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        remember_typed(ctx, args)
        if not any(argument == "--fix" or argument.startswith("--fix=") for argument in args):
            return super().parse_args(ctx, args)
        own, of_script = self._split_at_the_script(ctx, args)
        rest, unfixed = iter(own), []
        for argument in rest:
            if argument == "--fix":
                unfixed += as_flag(next(rest, ""))
            elif argument.startswith("--fix="):
                unfixed += as_flag(argument.removeprefix("--fix="))
            else:
                unfixed.append(argument)
        remember_typed(ctx, [*unfixed, *of_script], again=True)
        return super().parse_args(ctx, unfixed + of_script)

    def _split_at_the_script(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Return zerofit's own flags, and the script with its arguments, if any."""
        values, _ = self.peek(ctx, args)
        script_args = values.get("script_args")
        number = int(isinstance(values.get("script"), str))
        if isinstance(script_args, tuple):  # otherwise click's marker for a missing value
            number += len(script_args)
        return args[: len(args) - number], args[len(args) - number :]


_ON_OFF = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_SWITCHES = {
    "--gradient-checkpointing": "--no-gradient-checkpointing",
    "--compile": None,
    "--lora": None,
    "--tf32": "--no-tf32",
    "--liger": None,
    "--group-by-length": None,
}
"""Flags without a value, and their negation; None: leave it out."""


def as_flag(said: str) -> list[str]:
    """Return "zero-stage=3" as ["--zero-stage", "3"]."""
    name, equals, value = said.partition("=")
    word = name.strip().lstrip("-").replace("_", "-")
    flags = {field.replace("_", "-"): flag for field, flag in FLAGS.items()}
    flags |= {flag.removeprefix("--"): flag for flag in FLAGS.values()}
    if not equals or word not in flags:
        near, names = nearest(word, flags), sorted({flag[2:] for flag in FLAGS.values()})
        raise UserError(
            "fix-unreadable",
            "the value of --fix can't be used",
            found=f"--fix {said}",
            why=f"it must be NAME=VALUE, with a name of {', '.join(names)}",
            fix=f"did you mean --fix {near}=VALUE?" if near else "write it as in --fix zero-stage=3",
        )
    flag = flags[word]
    if flag not in _SWITCHES:
        return [flag, value]
    if value.lower() not in _ON_OFF:
        raise UserError(
            "fix-unreadable",
            "the value of --fix can't be used",
            found=f"--fix {said}",
            why=f"{flag} is on or off",
            fix=f"write --fix {word}=on or --fix {word}=off",
        )
    opposite = _SWITCHES[flag]
    return [flag] if _ON_OFF[value.lower()] else [opposite] if opposite else []
