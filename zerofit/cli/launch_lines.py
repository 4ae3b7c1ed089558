"""Verbs that accept a launch line of accelerate, torchrun, DeepSpeed or python in place of the script."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.completion import complete_file
from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.parameters import Number, option_group, remember_typed
from zerofit.core.strategy import Engine
from zerofit.launching.nodes import RANK_FOR_EACH_GPU
from zerofit.launching.other_launchers import read_line

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANKS = ("num_processes", "ranks_per_node")
_RANK_FLAGS = ("--num-processes", "--nproc-per-node", "--num-gpus")
_LINE = "zerofit: a command line of another launcher"
"""Key of a parsed command line in a context."""
launch_line_options = option_group(
    click.option(
        "--nproc-per-node",
        "--num-gpus",
        "ranks_per_node",
        type=Number(int, least=1, words=("gpu", "auto")),
        help="Ranks on each node, or gpu for one per GPU.",
    ),
    click.option(
        "--config-file", metavar="FILE", shell_complete=complete_file, help="A file of `accelerate config`."
    ),
    click.option(
        "--deepspeed-config-file",
        "--deepspeed",
        "deepspeed_file",
        metavar="FILE",
        shell_complete=complete_file,
        help="A JSON file of DeepSpeed.",
    ),
    click.option("--use-deepspeed", is_flag=True, help="accelerate's spelling of --engine deepspeed."),
    click.option(
        "--multi-gpu", is_flag=True, help="Accepted for accelerate; all GPUs of the node are used anyway."
    ),
)
"""The flags of other launchers."""


def resolve_line_flags(flags: dict[str, Any]) -> int | None:
    """Take the flags of other launchers out of the flags of a verb, and return the ranks of each node."""
    del flags["multi_gpu"]
    if flags.pop("use_deepspeed") and flags["engine"] is None:
        flags["engine"] = Engine.DEEPSPEED
    ranks_per_node: int | str | None = flags.pop("ranks_per_node")
    return RANK_FOR_EACH_GPU if isinstance(ranks_per_node, str) else ranks_per_node


def line_sentences() -> list[str]:
    """Return what the running verb made of another launcher's line; empty without one."""
    sentences: list[str] = click.get_current_context().meta.get(_LINE, [])
    return sentences


class LaunchLineVerb(GroupedVerb):
    """A verb that also accepts a whole command line of another launcher instead of the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, list(args))
        if ctx.resilient_parsing or ctx.params["script"] is None:  # shell completion, or plan --model
            return rest
        words = (ctx.params["script"], *ctx.params["script_args"])
        line = None if ctx.params["module"] else read_line(words)
        if line is None:
            return rest
        own = args[: len(args) - len(words)]
        flags, unused = self._known(line.words)
        if any(ctx.params[name] is not None for name in _RANKS):  # flags before the launcher take precedence
            flags = _without(flags, _RANK_FLAGS)
        if ctx.params.get("on_cpu"):
            flags = _without(flags, ("--gpu-ids",))
        words = (*flags, *own, *(("-m",) if line.is_module else ()), *line.target)
        os.environ.update(line.environment)
        ctx.params.clear()
        remember_typed(ctx, list(words), again=True)
        rest = super().parse_args(ctx, list(words))
        ctx.meta[_LINE] = [f"the command is equivalent to: {ctx.command_path} {shlex.join(words)}"]
        if line.left_out:
            ctx.meta[_LINE].append(f"without {', '.join(line.left_out)}, which zerofit handles itself")
        if unused:
            ctx.meta[_LINE].append(f"without {', '.join(unused)}, which {ctx.command_path} does not use")
        return rest

    def _known(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the flags of a line that this verb has, with their values, and those that it lacks."""
        names = {name for one in self.params for name in one.opts}
        unknown = [word for word in words if word.startswith("--") and word not in names]
        return _without(list(words), tuple(unknown)), unknown


def _without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """Return flags with their values, except some."""
    pairs = zip(words, ["", *words], strict=False)
    return [
        word for word, before in pairs if word not in flags and (word.startswith("--") or before not in flags)
    ]
