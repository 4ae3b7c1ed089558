"""The flags of other launchers that zerofit has too."""

from __future__ import annotations

from typing import Any

import click

from zerofit.cli.completion import complete_file
from zerofit.cli.parameters import Number, option_group
from zerofit.core.command import RANK_FOR_EACH_GPU
from zerofit.core.strategy import Engine

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
