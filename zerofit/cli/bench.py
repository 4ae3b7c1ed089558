"""zerofit bench: measurements on this machine, each a subcommand that is loaded when it is called."""

from __future__ import annotations

import importlib

import click

_BENCHES = {"ladder": "Memory, time and loss of one strategy after another."}
"""Subcommand and help line; each is the command of that name in the module zerofit.cli.bench_NAME."""


class _LazyGroup(click.Group):
    """Loads a subcommand's module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _BENCHES:
            return None
        module = importlib.import_module(f"zerofit.cli.bench_{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Measurements"):
            formatter.write_dl(list(_BENCHES.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure on this machine what zerofit says of it."""
