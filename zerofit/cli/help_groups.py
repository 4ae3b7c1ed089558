"""Help of verbs with many flags: common ones in groups, and all of them under --help-all."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from zerofit.cli.parameters import ONE_OF, Number, Verb

_GROUPS = {
    "Strategy": (
        "preset",
        "plan",
        "engine",
        "zero_stage",
        "optimizer_offload",
        "param_offload",
        "optimizer",
        "allow",
        "prefers_speed",
    ),
    "Batch and precision": (
        "micro_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "precision",
    ),
    "Model changes": ("gradient_checkpointing", "freeze", "lora", "qlora", "attention", "compile"),
    "Machine": ("num_processes", "num_nodes", "gpu_ids", "on_cpu", "gpus"),
    "Run": ("model", "no_capture", "recover", "dry_run", "quiet", "verbose"),
}
"""Common parameters of all verbs, by group."""
_MAX_FLAG_WIDTH = 30
"""Maximum width of a flag with its value; for a wider one, whose help names its choices, the kind replaces
them."""


class GroupedVerb(Verb):
    """A verb whose --help shows common flags in groups, and --help-all every flag.

    Args:
        groups: names of parameters by group, for the verb's own groups; they precede the shared ones, and
            replace those of the same name.
    """

    def __init__(self, *args: Any, groups: dict[str, tuple[str, ...]] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        own = groups or {}
        placed = {name for names in own.values() for name in names}
        self._groups = own | {
            group: tuple(name for name in names if name not in placed)
            for group, names in _GROUPS.items()
            if group not in own
        }
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show every flag, each with its whole text, and exit.",
            )
        )

    def _show_all(self, ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            self.format_usage(ctx, formatter)
            self.format_help_text(ctx, formatter)
            super().format_options(ctx, formatter)
            options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
            if hidden := [option.opts[0] for option in options if option.hidden]:
                text = f"Also accepted, and seldom needed: {', '.join(hidden)}."
                formatter.write_paragraph()
                formatter.write(
                    "\n".join(textwrap.wrap(text, formatter.width, break_on_hyphens=False)) + "\n"
                )
            click.echo(formatter.getvalue().rstrip("\n"))
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups."""
        named = {param.name: param for param in self.params if isinstance(param, click.Option)}
        for group, names in self._groups.items():
            rows = [_row(named[name], ctx) for name in names if name in named]
            if not rows:
                continue
            with formatter.section(group):
                formatter.write_dl(rows, col_max=_MAX_FLAG_WIDTH + 1)
        formatter.write_paragraph()
        formatter.write_text("--help-all shows every flag, and every word that a flag takes.")


def _row(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    """Return a flag by its first name, and its help but for a long list of words, which is in --help-all."""
    is_count = isinstance(option.type, Number) and option.type.is_whole and not option.type.words
    metavar = "" if option.is_flag else f" {'N' if is_count else option.make_metavar(ctx)}"
    flag = option.opts[0] if option.opts[0].startswith("--") else ", ".join(option.opts)
    if len(flag + metavar) > _MAX_FLAG_WIDTH and not is_count:
        metavar = f" {(option.type.name or 'value').upper()}"
    text = (option.help or "").partition(ONE_OF)[0]
    return flag + metavar, ("[required] " if option.required else "") + text.rstrip(".")
