"""The zerofit command: finds the verb, imports it when it is used, prints errors."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import click

from zerofit.cli.output.console import for_terminal, wants_colour
from zerofit.cli.system_errors import refused_by_system
from zerofit.core.errors import EXIT_USAGE, UserError, nearest
from zerofit.core.overrides import REMOVED_FLAGS
from zerofit.core.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

_VERBS = {
    "bench": "Measure the ladder of memory strategies on this machine.",
    "check": "Find what would fail, or silently go wrong, before it runs.",
    "config": "Write DeepSpeed and accelerate files for a strategy.",
    "data": "Report a dataset's lengths, and what padding wastes.",
    "doctor": "Check this machine and its tools.",
    "explain": "Explain why a run failed, from its folder or its logs.",
    "export": "Write a checkpoint's weights as from_pretrained reads them.",
    "generate": "Write completions for a file of prompts.",
    "gpus": "List the GPUs that --gpus knows by name.",
    "launch": "Train a script under the fastest strategy that fits.",
    "models": "List the models that --model knows by name.",
    "plan": "Predict what a run needs, and choose the fastest strategy that fits.",
    "recipes": "List launch lines for models that are often fine-tuned.",
    "rule": "Explain a rule of check, or list them all.",
    "runs": "List, follow and cancel local and submitted runs.",
    "submit": "Plan a run here, and submit it to Slurm, Kubernetes or SkyPilot.",
    "tune": "Run the plan's best few strategies for some steps, and pick the fastest.",
}
"""Verb and help line; each is the command of that name in the module zerofit.cli.VERB."""


_BROKEN_PIPE = 141
"""Exit code where the reader of the output has exited: 128 + SIGPIPE, as for other tools."""


class _BrokenPipeError(Exception):
    """A BrokenPipeError that click does not turn into exit code 1, which means that nothing fits."""


@contextlib.contextmanager
def _broken_pipe_raised() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _BrokenPipeError from None


class _LazyGroup(click.Group):
    """Imports a verb's module only when that verb is called; `zerofit help VERB` is `zerofit VERB --help`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _broken_pipe_raised():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipe_raised():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        gc.disable()  # garbage collection during imports takes a tenth of the time
        module = importlib.import_module(f"zerofit.cli.{cmd_name}")
        gc.freeze()
        gc.enable()
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, message="zerofit %(version)s")
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

    `zerofit launch train.py ARGS` captures what any accelerate or Trainer script trains, and trains it under
    the fastest memory strategy that fits; `zerofit VERB --help` describes each verb.
    """


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by the shell, as in >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # as Python does for stderr: names of files may be any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run()
    except (BrokenPipeError, _BrokenPipeError):
        sys.exit(_BROKEN_PIPE)
    except OSError as error:  # of printing an error
        with contextlib.suppress(OSError):
            click.echo(for_terminal(str(_unwritable(error))), err=True)
        sys.exit(EXIT_USAGE)
    finally:
        # Python would fail again at its end, and exit with 120.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_of_output(error: OSError) -> bool:
    """Return True for an error of printing, as on a full disk: it is raised within click.echo()."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is click.echo.__code__


def _unwritable(error: OSError) -> UserError:
    return UserError(
        "output-unwritable",
        "the output can't be written",
        found=error.strerror or str(error),
        why="the file or terminal that it goes to takes no more",
        fix="free space there, or write the output elsewhere",
    )


def _run() -> NoReturn:
    settings = {"debug": False}  # set by --debug, for errors after parsing
    try:
        sys.exit(
            zerofit.main(
                prog_name="zerofit", standalone_mode=False, obj=settings, color=wants_colour(os.environ)
            )
            or 0
        )
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(EXIT_USAGE)
    except click.UsageError as error:
        _fail(usage_error(error), debug=settings["debug"])
    except click.Abort:  # a started run handles Ctrl-C itself, and reports how it ended
        click.echo("zerofit: stopped by Ctrl-C; no training was started", err=True)
        sys.exit(130)
    except UserError as error:
        _fail(error, debug=settings["debug"])
    except ExceptionGroup as group:
        errors, others = group.split(UserError)
        if errors is None or others is not None:
            raise
        known = (error for error in errors.exceptions if isinstance(error, UserError))
        _fail(*known, debug=settings["debug"])
    except (BrokenPipeError, _BrokenPipeError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and _is_of_output(error):
            answer: UserError | None = _unwritable(error)
        else:
            answer = refused_by_system(error)
        if answer is None or settings["debug"]:
            raise
        _fail(answer, debug=False)


def _fail(*errors: UserError, debug: bool) -> NoReturn:
    if debug and len(errors) == 1:
        raise errors[0]
    if debug:
        raise  # the group of all, which is being handled
    for error in errors:
        click.echo(for_terminal(str(error)), err=True, color=wants_colour(os.environ))
    sys.exit(max(error.exit_code for error in errors))


_FOREIGN_FLAGS = {
    "--use-fsdp": "--engine fsdp2 shards with FSDP2",
    "--fsdp-version": "leave it out: --engine fsdp2 is version 2",
    "--fsdp-offload-params": "--engine fsdp2 --offload-param cpu offloads",
    "--fsdp-reshard-after-forward": "write --reshard-after-forward or --no-reshard-after-forward",
    "--fsdp-state-dict-type": "write --state-dict-type full or sharded",
    "--fsdp-activation-checkpointing": "write --gradient-checkpointing",
    "--fsdp-activation-checkpointing-offload": "write --offload-activations",
    "--standalone": "leave it out: on one node zerofit finds a free port",
    "--dynamo-backend": "--compile switches torch.compile on",
    "--rdzv-backend": "leave it out: on several nodes set --main-process-ip and --main-process-port",
    "--rdzv-endpoint": "set --main-process-ip and --main-process-port",
    "--max-restarts": "leave it out: a run that ends in an error is not restarted",
    "--same-network": "leave it out: the nodes must reach --main-process-ip",
}
"""Fixes for flags of accelerate or torchrun, by the flag in click's spelling, with hyphens."""


def usage_error(error: click.UsageError) -> UserError:
    """Return click's error on the command line in the form of all other errors."""
    command = error.ctx.command_path if error.ctx else "zerofit"
    help_line = f"see {command} --help"
    if isinstance(error, click.NoSuchOption):
        return _unknown_flag(error, command, help_line)
    if isinstance(error, click.exceptions.NoSuchCommand):
        return _unknown_verb(error, help_line)
    if isinstance(error, click.MissingParameter):
        missing = _missing(error)
        return UserError(
            "missing-argument",
            f"{len(missing)} arguments are missing" if len(missing) > 1 else "an argument is missing",
            found=command,
            why="; ".join(missing),
            fix=help_line,
        )
    return UserError(
        "usage",
        "the command line is wrong",
        found=command,
        why=error.format_message().rstrip("."),
        fix=help_line,
    )


def _missing(error: click.MissingParameter) -> list[str]:
    """Return each required parameter that the command line lacks; click reports the first."""
    first = error.format_message().rstrip(".")
    from zerofit.cli.parameters import Verb

    command = error.ctx.command if error.ctx else None
    if error.ctx is None or not isinstance(command, Verb):
        return [first]
    others = (click.MissingParameter(ctx=error.ctx, param=param) for param in command.missing(error.ctx))
    return list(dict.fromkeys([first, *(other.format_message().rstrip(".") for other in others)]))


def _unknown_flag(error: click.NoSuchOption, command: str, help_line: str) -> UserError:
    parameters = error.ctx.command.get_params(error.ctx) if error.ctx else []
    flags = [name for parameter in parameters for name in parameter.opts if name.startswith("--")]
    near = nearest(error.option_name, flags)
    takes_script = any(parameter.name == "script_args" for parameter in parameters)
    removed = REMOVED_FLAGS.get(error.option_name)
    if removed is not None and removed.replacement in flags:
        return UserError(
            "removed-flag",
            f"{command} no longer has the flag {error.option_name}",
            found=error.option_name,
            why=f"{removed.replacement} replaces it, so that each setting has one flag",
            fix=removed.fix,
        )
    return UserError(
        "unknown-flag",
        f"{command} has no flag {error.option_name}",
        found=error.option_name,
        why="flags before the script belong to zerofit; those after it go to the script"
        if takes_script
        else f"{command} --help does not list it",
        fix=_FOREIGN_FLAGS.get(error.option_name)
        or (_fix_of_scheduler(error.option_name) if "--scheduler-option" in flags else None)
        or (f"did you mean {near}?" if near else help_line),
    )


def _unknown_verb(error: click.exceptions.NoSuchCommand, help_line: str) -> UserError:
    group = error.ctx.command if error.ctx else None
    verbs = group.list_commands(error.ctx) if isinstance(group, click.Group) and error.ctx else []
    within = [f"{name} {error.command_name}" for name in verbs if _has_verb(error, name)]
    near = within[0] if within else nearest(error.command_name, verbs)  # "status", which `zerofit runs` has
    path = error.ctx.command_path if error.ctx else "zerofit"
    if error.command_name.endswith(".py"):
        near = f"launch {error.command_name}"
    return UserError(
        "unknown-verb",
        f"there is no verb {error.command_name!r}",
        found=f"{path} {error.command_name}",
        why=f"the verbs are {', '.join(verbs)}",
        fix=f"did you mean {path} {near}?" if near else help_line,
    )


def _fix_of_scheduler(flag: str) -> str | None:
    """Return how `zerofit submit` passes on a flag of a scheduler; None if it is none."""
    from zerofit.launching.clusters.sbatch_options import fix_of_flag

    return fix_of_flag(flag)


def _has_verb(error: click.exceptions.NoSuchCommand, name: str) -> bool:
    """Return True if a verb is a group that has the unknown one."""
    assert error.ctx is not None
    assert isinstance(error.ctx.command, click.Group)
    group = error.ctx.command.get_command(error.ctx, name)
    return isinstance(group, click.Group) and error.command_name in group.list_commands(error.ctx)
