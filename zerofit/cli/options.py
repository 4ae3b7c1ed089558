"""The flags that `config` and `launch` share, and the Request that they make."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zerofit.errors import UserError, nearest
from zerofit.plan import Plan, plan_from_json
from zerofit.presets import PRESETS
from zerofit.request import Request
from zerofit.strategy import Engine, OffloadDevice, OptimizerName, Precision, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Callable

_Command = TypeVar("_Command", bound="Callable[..., Any]")

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    # accelerate and torchrun write flags with underscores, zerofit with hyphens; both are understood.
    "token_normalize_func": lambda token: token.replace("_", "-"),
}
"""click's context settings of every verb."""

_PRECISIONS = {"no": Precision.FP32, "fp32": Precision.FP32, "fp16": Precision.FP16, "bf16": Precision.BF16}
_STAGES = {str(stage.value): stage for stage in ZeroStage}


class _Word(click.ParamType[Any]):
    """One of a few words, each standing for a value; a wrong one gets the nearest right one."""

    def __init__(self, name: str, words: dict[str, Any]) -> None:
        self.name = name
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        word = value.lower().replace("_", "-")
        if word in self._words:
            return self._words[word]
        flag = param.opts[0] if param else self.name
        near = nearest(word, self._words)
        raise UserError(
            f"unknown-{self.name.replace('_', '-')}",
            f"{flag} can't be {value!r}",
            found=f"{flag} {value}",
            why=f"it is one of {', '.join(self._words)}",
            fix=f"did you mean {flag} {near}?" if near else "name one of them",
        )

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[" + "|".join(self._words) + "]"


def _words(enum: Any) -> dict[str, Any]:
    return {member.value: member for member in enum}


class Verb(click.Command):
    """A verb whose name stands in what is said of mistakes on its command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = ctx  # click leaves it out where a flag lacks its value
            raise


class Number(click.ParamType[float | str]):
    """A finite number within bounds; a wrong one is told what it should be.

    Args:
        kind: int for whole numbers, or float.
        least: smallest that is allowed.
        most: largest that is allowed; None for any.
        words: words that are taken as they are, in place of a number.
    """

    def __init__(
        self,
        kind: type[int] | type[float],
        *,
        least: int,
        most: int | None = None,
        words: tuple[str, ...] = (),
    ) -> None:
        self.name = "integer" if kind is int else "number"
        self._kind = kind
        self._least = least
        self._most = most
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value in self._words:
            return str(value)
        try:
            number = self._kind(value)
        except ValueError:
            number = math.nan
        if not (
            math.isfinite(number) and number >= self._least and (self._most is None or number <= self._most)
        ):
            raise self._wrong(str(value), param, ctx)
        return number

    def _wrong(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> UserError:
        flag = param.opts[0] if param else self.name
        kind = "whole number" if self._kind is int else "number"
        bounds = f"of at least {self._least}" if self._most is None else f"from {self._least} to {self._most}"
        return UserError(
            "bad-value",
            f"{flag} can't be {value!r}",
            found=f"{flag} {value}",
            why=f"it is {' or '.join([*self._words, ''])}a {kind} {bounds}",
            fix=f"see {ctx.command_path if ctx else 'zerofit'} --help",
        )


_POSITIVE = Number(int, least=1)

_STRATEGY_OPTIONS = (
    click.option(
        "--preset", metavar="NAME", help=f"Start from a preset: {', '.join(p.name for p in PRESETS)}."
    ),
    click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Start from a plan file."),
    click.option("--engine", type=_Word("engine", _words(Engine)), help="DeepSpeed, or PyTorch alone."),
    click.option(
        "--zero-stage", type=_Word("zero-stage", _STAGES), help="What DeepSpeed shards over the ranks."
    ),
    click.option(
        "--offload-optimizer",
        "--offload-optimizer-device",
        "optimizer_offload",
        type=_Word("offload", _words(OffloadDevice)),
        help="Where optimizer states live.",
    ),
    click.option(
        "--offload-param",
        "--offload-param-device",
        "param_offload",
        type=_Word("offload", _words(OffloadDevice)),
        help="Where parameter shards live; needs ZeRO-3.",
    ),
    click.option("--nvme-path", metavar="DIR", help="Folder on the NVMe disk, for offload to nvme."),
    click.option(
        "--mixed-precision",
        "precision",
        type=_Word("precision", _PRECISIONS),
        help="Format of forward and backward.",
    ),
    click.option("--micro-batch-size", type=_POSITIVE, help="Samples per rank in one forward pass."),
    click.option(
        "--gradient-accumulation-steps", type=_POSITIVE, help="Forward passes per rank in an optimizer step."
    ),
    click.option("--global-batch-size", type=_POSITIVE, help="Samples per optimizer step over all ranks."),
    click.option(
        "--gradient-clipping", type=Number(float, least=0), help="Largest norm of the gradients; 0 is off."
    ),
    click.option(
        "--gradient-checkpointing/--no-gradient-checkpointing", default=None, help="Recompute activations."
    ),
    click.option(
        "--optimizer", type=_Word("optimizer", _words(OptimizerName)), help="The optimizer to train with."
    ),
    click.option("--compile", is_flag=True, default=None, help="Use torch.compile."),
    click.option(
        "--num-processes", type=_POSITIVE, help="Ranks on all nodes together; one a GPU where it is left out."
    ),
    click.option("--num-machines", "--nnodes", "num_nodes", type=_POSITIVE, help="Nodes that take part."),
    click.option("--cpu", "on_cpu", is_flag=True, help="Leave GPUs alone: a rehearsal on the CPU."),
)


def strategy_options(command: _Command) -> _Command:
    """Give a command the flags that describe a strategy and its ranks."""
    for option in reversed(_STRATEGY_OPTIONS):
        command = option(command)
    return command


def request_of(*, plan_file: Path | None, **flags: Any) -> Request:
    """Return the flags as a Request.

    Raises:
        UserError: the plan file can't be read.
    """
    return Request(plan=_read_plan(plan_file) if plan_file else None, **flags)


def _read_plan(path: Path) -> Plan:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "plan-file-missing",
            "the plan file can't be opened",
            found=f"--plan {path}: {getattr(error, 'strerror', None) or 'it is no text'}",
            why="a plan file is JSON text, such as plan.json in a run folder",
            fix="name a plan file that is there, or leave out --plan",
        ) from None
    return plan_from_json(text, name=str(path))
