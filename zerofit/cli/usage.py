"""click's usage errors in zerofit's form."""

from __future__ import annotations

import click

from zerofit.errors import UserError, nearest

_FOREIGN_FLAGS = {
    "--use-deepspeed": "--engine deepspeed, --zero-stage or --preset choose it",
    "--multi-gpu": "leave it out: --num-processes counts the GPUs, all of them where it is left out",
    "--config-file": "leave it out: zerofit writes accelerate's file; --preset or --plan say what is in it",
    "--deepspeed-config-file": "leave it out: zerofit writes the file; --preset or --plan say what is in it",
    "--standalone": "leave it out: on one node zerofit finds a free port",
    "--dynamo-backend": "--compile switches torch.compile on",
    "--rdzv-backend": "leave it out: on several nodes give --main-process-ip and --main-process-port",
    "--rdzv-endpoint": "give --main-process-ip and --main-process-port",
    "--max-restarts": "leave it out: a run that ends in an error is not started again",
    "--same-network": "leave it out: the nodes must reach --main-process-ip",
}
"""What to do in place of a flag of accelerate's or torchrun's, as click writes it: with hyphens."""


def usage_error(error: click.UsageError) -> UserError:
    """Return a mistake on the command line as click reports it, in the form of all other errors."""
    command = error.ctx.command_path if error.ctx else "zerofit"
    help_line = f"see {command} --help"
    if isinstance(error, click.NoSuchOption):
        return _unknown_flag(error, command, help_line)
    if isinstance(error, click.exceptions.NoSuchCommand):
        return _unknown_verb(error, help_line)
    if isinstance(error, click.MissingParameter):
        return UserError(
            "missing-argument",
            "an argument is missing",
            found=command,
            why=error.format_message().rstrip("."),
            fix=help_line,
        )
    return UserError(
        "usage",
        "the command line is wrong",
        found=command,
        why=error.format_message().rstrip("."),
        fix=help_line,
    )


def _unknown_flag(error: click.NoSuchOption, command: str, help_line: str) -> UserError:
    parameters = error.ctx.command.get_params(error.ctx) if error.ctx else []
    flags = [name for parameter in parameters for name in parameter.opts if name.startswith("--")]
    near = nearest(error.option_name, flags)
    takes_script = any(parameter.name == "script_args" for parameter in parameters)
    return UserError(
        "unknown-flag",
        f"{command} has no flag {error.option_name}",
        found=error.option_name,
        why="flags before the script are zerofit's own; those behind it go to the script"
        if takes_script
        else f"it is none of those that {command} --help lists",
        fix=_FOREIGN_FLAGS.get(error.option_name) or (f"did you mean {near}?" if near else help_line),
    )


def _unknown_verb(error: click.exceptions.NoSuchCommand, help_line: str) -> UserError:
    group = error.ctx.command if error.ctx else None
    verbs = group.list_commands(error.ctx) if isinstance(group, click.Group) and error.ctx else []
    near = nearest(error.command_name, verbs)
    path = error.ctx.command_path if error.ctx else "zerofit"
    return UserError(
        "unknown-verb",
        f"there is no verb {error.command_name!r}",
        found=f"{path} {error.command_name}",
        why=f"the verbs are {', '.join(verbs)}",
        fix=f"did you mean {path} {near}?" if near else help_line,
    )
