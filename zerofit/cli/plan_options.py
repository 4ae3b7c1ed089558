"""Flags of planning: model, workload, machine and allowed changes; shared by the verbs that plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.completion import complete_gpus, complete_model, matching
from zerofit.cli.parameters import (
    DTYPE,
    POSITIVE,
    TASK,
    ParamType,
    Parsed,
    Word,
    number_option,
    option_group,
)
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
        help="A folder, config.json, hub id or catalog name.",
    ),
    number_option(
        "--seq-len",
        "--sequence-length",
        "--max-seq-length",
        "sequence_length",
        help="Tokens of the longest sample; for speech, of its text.",
    ),
    number_option(
        "--target-len",
        "--target-length",
        "target_length",
        help="Tokens of an encoder-decoder's longest target; default: the sample's.",
    ),
    click.option("--task", type=TASK, hidden=True, help=TASK.listed("Task of the model's head.")),
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
        help=f"What may change if nothing else fits: {', '.join(Allow)}.",
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
        help="Closed forms, no trace: what fits or may fit, in a second.",
    ),
    click.option(
        "--prefer-speed",
        "prefers_speed",
        is_flag=True,
        help="Prefer speed to SCRIPT's batch, engine and fp32.",
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
    *,
    gpus: str = "GPUs of one node, such as 8xA100-80G; default: the local ones.",
    takes_several: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the flags for another machine.

    Args:
        gpus: the help of --gpus.
        takes_several: True if --gpus may be repeated.
    """
    gpus_option = click.option(
        "--gpus", metavar="SPEC", multiple=takes_several, shell_complete=complete_gpus, help=gpus
    )
    return option_group(gpus_option, *_MACHINE_OPTIONS)
