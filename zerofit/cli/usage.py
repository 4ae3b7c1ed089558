"""click's usage errors in zerofit's form."""

from __future__ import annotations

import click

from zerofit.errors import UserError, nearest


def usage_error(error: click.UsageError) -> UserError:
    """Return a mistake on the command line as click reports it, in the form of all other errors."""
    command = error.ctx.command_path if error.ctx else "zerofit"
    help_line = f"see {command} --help"
    if isinstance(error, click.NoSuchOption):
        near = _nearest_option(error)
        return UserError(
            "unknown-flag",
            f"{command} has no flag {error.option_name}",
            found=error.option_name,
            why="flags before the script are zerofit's own; those behind it go to the script",
            fix=f"did you mean {near}?" if near else help_line,
        )
    if isinstance(error, click.MissingParameter):
        return UserError(
            "missing-argument",
            "an argument is missing",
            found=command,
            why=error.format_message().rstrip("."),
            fix=help_line,
        )
    if isinstance(error, click.BadParameter):
        flag = "/".join(error.param.opts[:1]) if error.param else "an argument"
        return UserError(
            "bad-value",
            f"{flag} can't have this value",
            found=flag,
            why=error.message.rstrip("."),
            fix=help_line,
        )
    return UserError(
        "usage", "the command line is wrong", found=command, why=error.format_message(), fix=help_line
    )


def _nearest_option(error: click.NoSuchOption) -> str | None:
    if error.ctx is None:
        return None
    valid = [
        name
        for parameter in error.ctx.command.get_params(error.ctx)
        for name in parameter.opts
        if name.startswith("--")
    ]
    return nearest(error.option_name.replace("_", "-"), valid)
