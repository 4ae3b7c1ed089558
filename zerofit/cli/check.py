"""zerofit check: checks files, flags and scripts against the rules, before anything runs."""

from __future__ import annotations

import os
import sys
from functools import cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click

from zerofit.checking import check_run
from zerofit.checking.rules import ALL_RULES
from zerofit.cli.completion import complete_file, complete_gpus
from zerofit.cli.output.console import Console, echo, for_terminal
from zerofit.cli.parameters import CONTEXT, POSITIVE, Verb, Word, typed_line, typed_words
from zerofit.cli.shared_options import capture_limit_option, json_option
from zerofit.core.command import Route
from zerofit.core.errors import UserError
from zerofit.core.secrets import shell_words
from zerofit.scripts.capture.limit import check_capture_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.checking.report import Report
    from zerofit.checking.targets import Targets
    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine


@click.command(cls=Verb, context_settings={**CONTEXT, "allow_interspersed_args": False})
@click.option("--strict", is_flag=True, help="Exit 1 for warnings too.")
@json_option
@click.option("--sarif", "as_sarif", is_flag=True, help="Print SARIF 2.1.0, for code review tools.")
@click.option(
    "--fix", is_flag=True, help="Fix what has exactly one right answer; the original is kept in FILE.bak."
)
@click.option("--dry-run", is_flag=True, help="With --fix: print the change as a diff, and write nothing.")
@click.option(
    "--route", type=Word("route", Route), help="Reader of the DeepSpeed file, if no script shows it."
)
@click.option("--num-processes", type=POSITIVE, help="Ranks on all nodes together.")
@click.option("--cpu", "on_cpu", is_flag=True, help="The run is on the CPU.")
@click.option(
    "--gpus", metavar="SPEC", shell_complete=complete_gpus, help="GPUs of one node, such as 8xA100-80G."
)
@click.option("--here", is_flag=True, help="The run is on this machine: check it against its GPUs.")
@click.option(
    "--capture",
    "captures",
    is_flag=True,
    help="Run the script up to its training, to learn what its source does not show.",
)
@capture_limit_option
@click.argument(
    "targets", nargs=-1, type=click.UNPROCESSED, metavar="TARGETS...", shell_complete=complete_file
)
@click.pass_context
def check(
    context: click.Context,
    *,
    targets: tuple[str, ...],
    strict: bool,
    as_json: bool,
    as_sarif: bool,
    fix: bool,
    dry_run: bool,
    route: Route | None,
    num_processes: int | None,
    on_cpu: bool,
    gpus: str | None,
    here: bool,
    captures: bool,
    capture_limit_s: float,
) -> int:
    """Report what would fail, or silently go wrong, before it runs.

    TARGETS are files: a DeepSpeed JSON (- for standard input), an accelerate YAML, a script
    followed by its arguments, a shell script or notebook with launch lines, a training recipe. Or the
    whole command, as it will be run:

    \b
      zerofit check ds_config.json accelerate.yaml
      zerofit check train.py --bf16 --deepspeed ds_config.json
      zerofit check accelerate launch --config_file accelerate.yaml train.py
      zerofit check run.sh

    Files that these name are read too. Exit code 1 if there is an error, or with --strict a warning.
    `zerofit rule ID` explains a finding's rule.
    """
    _refuse_wrong_use(context, targets, as_json=as_json, as_sarif=as_sarif, fix=fix, dry_run=dry_run)
    if not captures:
        check_capture_limit(capture_limit_s, because="no --capture")
    if gpus is not None and here:
        raise click.UsageError("--gpus and --here are alternatives", context)

    def check_words(*, words: Sequence[str] = targets, **others: Any) -> Report:
        return check_run.check(*words, **others)

    check_targets = partial(
        check_words,
        strict=strict,
        route=route,
        num_processes=num_processes,
        on_cpu=on_cpu,
        machine=_machine(gpus, here=here),
        stdin=cache(sys.stdin.buffer.read),
    )
    _refuse_flags_behind(context, targets, check_targets)
    if captures:
        check_targets = partial(
            check_targets, capture=_capture(check_targets().targets, limit_s=capture_limit_s)
        )
    if fix:
        from zerofit.checking.fix_files import diff_of, find_fixes, write_fixes

        fixes = find_fixes(lambda overlay: check_targets(overlay=overlay))
        if not fixes:
            echo("zerofit: nothing to fix: no finding has exactly one right answer", err=True)
        click.echo("".join(diff_of(change) for change in fixes), nl=False, err=not dry_run)
        if dry_run and fixes:
            left = check_targets(overlay={os.path.realpath(change.name): change.after for change in fixes})
            if left.exit_code:
                echo(
                    f"zerofit: this would be left:\n\n{_output(left, as_json=False, as_sarif=False)}",
                    err=True,
                )
            return left.exit_code
        for change, backup in zip(fixes, write_fixes(fixes), strict=True):
            echo(f"zerofit: fixed {change.name}; original: {backup}", err=True)
    report = check_targets()
    if report.targets.capture is not None and not captures:
        echo("zerofit: with facts of an earlier capture of this script, unchanged since", err=True)
    echo(_output(report, as_json=as_json, as_sarif=as_sarif))
    return report.exit_code


def _machine(gpus: str | None, *, here: bool) -> Machine | None:
    """Return the node that will run it; None if the user does not say."""
    if gpus is not None:
        from zerofit.machine.machine_spec import machine_of_spec  # imported only if needed

        return machine_of_spec(gpus, num_nodes=1).machine
    if not here:
        return None
    from zerofit.machine.this_node import probe_machine

    return probe_machine()


def _refuse_wrong_use(
    context: click.Context,
    targets: tuple[str, ...],
    *,
    as_json: bool,
    as_sarif: bool,
    fix: bool,
    dry_run: bool,
) -> None:
    if not targets:
        argument = next(param for param in context.command.params if param.name == "targets")
        raise click.MissingParameter(ctx=context, param=argument)
    if as_json and as_sarif:
        raise click.UsageError("--json and --sarif are alternatives", context)
    if dry_run and (as_json or as_sarif):
        raise click.UsageError("--dry-run prints a diff instead of any other output", context)
    if dry_run and not fix:
        raise click.UsageError("--dry-run needs --fix: a check alone writes nothing", context)
    if fix and "-" in takewhile(lambda word: not word.endswith(".py"), targets):
        raise click.UsageError("--fix changes files, but - is standard input", context)


def _refuse_flags_behind(
    context: click.Context, targets: tuple[str, ...], check_targets: Callable[..., Report]
) -> None:
    """Check that no flag of this verb is behind a file; name the line with the flags in front."""
    if not os.path.isfile(targets[0]) or targets[0].endswith(".py"):
        return  # a command, or a script with its own arguments
    options = [param for param in context.command.params if isinstance(param, click.Option)]
    is_switch = {name: param.is_flag for param in options for name in param.opts}
    words = list(takewhile(lambda word: not word.endswith(".py"), targets))
    files, flags, rest = list[str](), list[str](), [word for word in words if word != "--"]
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if name not in is_switch:
            files.append(word)
            continue
        flags.append(word)
        if not (is_switch[name] or equals):
            flags.append(rest.pop(0) if rest and not rest[0].startswith("-") else "VALUE")
    if not flags:
        return
    files += targets[len(words) :]
    typed, _ = typed_words()
    moved = UserError(
        "flag-behind-file",
        "flags of zerofit check come before the files",
        found=shell_words(flags),
        why="arguments after a script or launcher belong to it",
        fix=shell_words((*typed[: len(typed) - len(targets)], *flags, *files)),
    )
    errors: list[UserError] = []
    try:
        check_targets(words=files)
    except* UserError as group:
        errors += (error for error in group.exceptions if isinstance(error, UserError))
    raise ExceptionGroup("targets that can't be checked", [*errors, moved])


def _capture(targets: Targets, *, limit_s: float) -> Capture:
    """Return the capture of the only script among the targets."""
    if len(targets.script_targets) != 1:
        raise UserError(
            "capture-needs-a-script",
            "--capture needs exactly one script",
            found=f"--capture with {len(targets.script_targets)} scripts",
            why="it runs the script among the targets up to where its training would begin",
            fix="name one script, followed by its arguments, or leave out --capture",
        )
    from zerofit.scripts.capture.with_progress import captured  # imported only if needed, as it takes time
    from zerofit.scripts.capture_summary import capture_lines

    (target,) = targets.script_targets
    without = "leave out --capture, to read only the source"
    retry = typed_line().with_capture_limit
    with captured(target, limit_s=limit_s, instead=without, retry=retry, observer=Console()) as run:
        echo(for_terminal("\n".join(capture_lines(run.capture, is_cached=run.is_cached))), err=True)
        return run.capture


def _output(report: Report, *, as_json: bool, as_sarif: bool) -> str:
    verdict, files = report.verdict, report.targets.files
    if as_json:
        from zerofit.cli.output.findings_json import findings_json

        return findings_json(verdict, files=files, num_rules=len(ALL_RULES))
    if as_sarif:
        from zerofit.cli.output.sarif import sarif
        from zerofit.core.version import VERSION

        return sarif(verdict, files=files, rules=ALL_RULES, version=VERSION)
    return for_terminal(str(report))
