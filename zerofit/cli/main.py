"""The zerofit command: finds the verb, loads it when it is used, prints errors in one form."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import NoReturn

import click

from zerofit import __version__
from zerofit.cli.usage import usage_error
from zerofit.errors import EXIT_USAGE, UserError

_VERBS = {
    "bench": "Measure the ladder of memory strategies on this machine.",
    "check": "Say what would fail, or silently go wrong, before it runs.",
    "config": "Write DeepSpeed and accelerate files for a strategy.",
    "data": "Report a dataset's lengths, and what padding wastes.",
    "doctor": "Check this machine and its tools.",
    "generate": "Write completions for a file of prompts.",
    "launch": "Train a script under the fastest strategy that fits.",
    "plan": "Say what a run needs, and choose the fastest strategy that fits.",
}
"""Verb and help line; each is the command of that name in the module zerofit.cli.VERB."""


class _LazyGroup(click.Group):
    """Loads a verb's module only when that verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        gc.disable()  # what modules bring stays: to look for rubbish among it takes a tenth of the time
        module = importlib.import_module(f"zerofit.cli.{cmd_name}")
        gc.freeze()
        gc.enable()
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="zerofit %(version)s")
@click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, value: ctx.obj is not None and ctx.obj.update(debug=value),
    help="Show the traceback of an error.",
)
def zerofit() -> None:
    """Make Hugging Face training fit.

    `zerofit launch train.py ARGS` sees what any accelerate or Trainer script trains, and trains it under the
    fastest memory strategy that fits; `zerofit VERB --help` tells about each verb.
    """


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    settings = {"debug": False}  # filled in by --debug, for what goes wrong after it was read
    try:
        sys.exit(zerofit.main(prog_name="zerofit", standalone_mode=False, obj=settings) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(EXIT_USAGE)
    except click.UsageError as error:
        _fail(usage_error(error), debug=settings["debug"])
    except click.Abort:
        sys.exit(130)
    except UserError as error:
        _fail(error, debug=settings["debug"])
    except ExceptionGroup as group:
        errors, others = group.split(UserError)
        if errors is None or others is not None:
            raise
        known = (error for error in errors.exceptions if isinstance(error, UserError))
        _fail(*known, debug=settings["debug"])
    except BrokenPipeError:
        # What reads our output has gone; Python would complain once more while closing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _fail(*errors: UserError, debug: bool) -> NoReturn:
    if debug and len(errors) == 1:
        raise errors[0]
    if debug:
        raise  # the group of them all, which is being handled
    for error in errors:
        click.echo(str(error), err=True)
    sys.exit(max(error.exit_code for error in errors))
