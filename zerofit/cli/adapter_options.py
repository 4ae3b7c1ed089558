"""Flags for trained parameters: freezing, adapters and the quantized base."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.parameters import POSITIVE, Number, ParamType
from zerofit.core.errors import UserError, nearest
from zerofit.core.freezing import WORDS, is_word
from zerofit.core.setting import Said
from zerofit.core.strategy import Lora, Quantization
from zerofit.planning.options import Allow

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALL_LINEAR = "all-linear"
"""peft's keyword for every linear layer but the head."""
_ALPHA_PER_RANK = 2
"""ASSUMPTION: adapters are scaled by alpha / rank; alpha is twice the rank in many recipes."""
_IN_PATTERNS = "*?[."
"""Characters that only occur in patterns of parameter names."""
_SHAPE = {
    "lora_rank": "--lora-rank",
    "lora_alpha": "--lora-alpha",
    "lora_dropout": "--lora-dropout",
    "lora_targets": "--lora-targets",
    "lora_saved": "--lora-modules-to-save",
}
"""Options for the shape of adapters, by parameter."""


class _Names(ParamType[tuple[str, ...]]):
    """Comma-separated names."""

    name = "names"

    def __init__(self, metavar: str) -> None:
        self._metavar = metavar

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if not isinstance(value, str):
            return tuple(value)
        names = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
        if names:
            return names
        flag = param.opts[0] if param else self.name
        raise UserError(
            "bad-value",
            f"{flag} names nothing",
            found=f"{flag} {value!r}",
            why="it must be one name, or several, separated by commas",
            fix=f"name something, or leave out {flag}",
        )

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self._metavar


ADAPTER_OPTIONS = (
    click.option(
        "--freeze",
        multiple=True,
        type=_Names("NAMES"),
        help="Freeze embeddings, embeddings+N (and N blocks), blocks, all-but-head, or patterns: "
        "'*.layer.0.*'.",
    ),
    click.option("--lora", is_flag=True, help="Train adapters on frozen weights (peft)."),
    click.option("--qlora", is_flag=True, help="The same, on weights in 4 bits (bitsandbytes)."),
    click.option(
        "--lora-rank",
        type=POSITIVE,
        help=f"Rank of the adapters; default: {Lora().rank}. With --lora, --qlora or --allow lora.",
    ),
    click.option(
        "--lora-alpha",
        type=POSITIVE,
        help="Adapters are scaled by this over their rank; default: twice the rank.",
    ),
    click.option(
        "--lora-dropout", type=Number(float, least=0, most=1), help="Dropout on the input of the adapters."
    ),
    click.option(
        "--lora-targets",
        type=_Names(f"NAMES|{_ALL_LINEAR}"),
        help="Comma-separated modules to adapt; default: those of the model family.",
    ),
    click.option(
        "--lora-modules-to-save",
        "lora_saved",
        type=_Names("NAMES"),
        help="Modules to train whole beside the adapters, such as a new head.",
    ),
)


ADAPTER_FLAGS = frozenset({*_SHAPE, "qlora"})
"""Parameters that are not fields of Strategy, but determine some."""


def adapter_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Strategy from these flags, by parameter names.

    Raises:
        UserError: an unknown keyword for freezing, or a flag for adapters without adapters.
    """
    wants = flags["lora"] or flags["qlora"]
    frozen = tuple(dict.fromkeys(name for names in flags["freeze"] for name in names))
    for name in frozen:
        _check_frozen(name)
    given = [flag for name, flag in _SHAPE.items() if flags[name] is not None]
    if given and not wants and not {Allow.LORA, Allow.QLORA} & flags.get("allow", frozenset()):
        raise _no_adapters(given)
    targets, rank = flags["lora_targets"] or (), flags["lora_rank"] or Lora().rank
    _check_targets(targets)
    adapters = Lora(
        rank=rank,
        alpha=flags["lora_alpha"] or _ALPHA_PER_RANK * rank,
        dropout=flags["lora_dropout"] or 0.0,
        target_modules=targets,
        modules_to_save=flags["lora_saved"] or (),
    )
    of_both = partial(Said, text="--qlora")
    return {
        "freeze": frozen or None,
        "lora": (of_both(value=adapters) if flags["qlora"] else adapters) if wants else None,
        "allowed_lora": adapters if given and not wants else None,
        "quantization": of_both(value=Quantization.NF4) if flags["qlora"] else None,
    }


def _check_targets(targets: tuple[str, ...]) -> None:
    if _ALL_LINEAR not in targets or len(targets) == 1:
        return
    raise UserError(
        "lora-targets-mixed",
        f"{_ALL_LINEAR} can't be combined with names",
        found=f"--lora-targets {','.join(targets)}",
        why="it means every linear layer but the head, and peft would look for a module of that name",
        fix=f"give --lora-targets {_ALL_LINEAR}, or only module names",
    )


def _no_adapters(given: list[str]) -> UserError:
    flags = ", ".join(given)
    return UserError(
        "adapter-flags-without-adapters",
        "a flag for adapters has no effect without adapters",
        found=f"{flags} without --lora or --qlora",
        why="every weight trains, and the flag would be ignored",
        fix=f"add --lora, or --allow lora for adapters only if nothing else fits; or leave out {flags}",
    )


def _check_frozen(said: str) -> None:
    if is_word(said) or any(sign in said for sign in _IN_PATTERNS):
        return
    near = nearest(said, WORDS)
    raise UserError(
        "unknown-freeze",
        f"--freeze can't be {said!r}",
        found=f"--freeze {said}",
        why=f"it must be {', '.join(WORDS)}, or a pattern of parameter names that contains *, ? or a dot",
        fix=f"did you mean --freeze {near}?" if near else f"write it as a pattern, --freeze '*{said}*'",
    )
