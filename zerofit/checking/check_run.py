"""check(): files, a script or a whole command against the rules; and the check before a run starts."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.checking.engine import Verdict, sort_findings
from zerofit.checking.engine import check as check_rules
from zerofit.checking.inputs.capture import with_capture
from zerofit.checking.inputs.situations import situations
from zerofit.checking.read_targets import read_targets
from zerofit.checking.report import Report
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES, ON_READING
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.cache_folder import cache_folder
from zerofit.core.command import Route
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerofit.checking.situation import Situation
    from zerofit.checking.targets import Targets
    from zerofit.core.capture import Capture
    from zerofit.core.facts import Machine, Versions


def check(
    *targets: str | Path,
    strict: bool = False,
    route: Route | str | None = None,
    num_processes: int | None = None,
    on_cpu: bool = False,
    machine: Machine | None = None,
    versions: Versions | None = None,
    capture: Capture | None = None,
    stdin: Callable[[], bytes] | None = None,
    overlay: Mapping[str, str] | None = None,
) -> Report:
    """Find what would fail, or silently go wrong, before a run; `zerofit check` for programs and notebooks.

    `check("ds_config.json", "accelerate.yaml")` checks files together, `check("train.py", "--deepspeed",
    "ds_config.json")` a script with its arguments, and `check("accelerate", "launch", "train.py")` a command.
    Files named by these are checked too. In a notebook the report displays as text.

    Args:
        targets: files, a script and its arguments, or a command, word by word.
        strict: warnings fail the check too.
        route: the library that reads the DeepSpeed file, if no script shows it: "accelerate", "trainer" or
            "native".
        num_processes: ranks on all nodes together.
        on_cpu: the run is on the CPU.
        machine: the node that will run it, to check against its GPUs.
        versions: the library versions of the run; None means the installed ones.
        capture: the script's capture, which overrides facts from its source; None means that of an earlier
            plan or launch, if nothing has changed since.
        stdin: returns the content of the target "-"; None reads standard input.
        overlay: texts to read instead of files, by the files' real paths.

    Returns:
        The report: print it, or use its `findings`, `ok` and `exit_code`.

    Raises:
        ExceptionGroup: of one UserError for each target that can't be checked.
    """
    versions = versions or probe_versions()

    def as_said(targets: Targets) -> Targets:
        return replace(
            targets,
            route=targets.route if route is None else Route(route),
            num_processes=num_processes,
            on_cpu=on_cpu,
            machine=machine,
            versions=versions,
        )

    read = read_targets(
        [os.fspath(target) for target in targets],
        schemas=load_schemas(versions),
        stdin=stdin or sys.stdin.buffer.read,
        overlay=overlay,
    )
    read = replace(read, runs=tuple(map(as_said, read.runs)))
    read = as_said(read)
    read = replace(read, capture=capture or _cached(read))
    return Report(targets=read, verdict=verdict_of(read), strict=strict)


def _cached(targets: Targets) -> Capture | None:
    if len(targets.script_targets) != 1:
        return None
    from zerofit.scripts.capture.cache import ScriptRun, load  # imported only if needed

    run = ScriptRun(target=targets.script_targets[0], environment=os.environ, cwd=Path.cwd())
    found = load(cache_folder(os.environ, Path.home()), run)
    return found[0] if found is not None else None


def verdict_of(targets: Targets) -> Verdict:
    """Return the results of all rules for all situations of the targets, without duplicates."""
    verdicts = [_verdict(run, targets.capture) for run in targets.runs or (targets,)]
    # For a file that can't be parsed, or starts nothing, everything is unknown, and not worth a line.
    is_unread = targets.files and all(file.broken or file.has_nothing for file in targets.files)
    unknown = dict.fromkeys(unknown for verdict in verdicts for unknown in verdict.unknown)
    return Verdict(
        findings=sort_findings(finding for verdict in verdicts for finding in verdict.findings),
        unknown=() if is_unread else tuple(unknown),
        notes=tuple(dict.fromkeys(targets.notes)),
    )


def _verdict(targets: Targets, capture: Capture | None) -> Verdict:
    """Return the results of all rules for all situations of a run; what a line says is at that line."""
    made = situations(targets)
    if capture is not None:
        made = tuple(with_capture(situation, capture) for situation in made)
    verdicts = [
        check_rules(situation, rules=ON_READING if situation.is_imported else ALL_RULES) for situation in made
    ]
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    if (line := targets.line) is not None:
        findings = [
            replace(finding, place=finding.place or line.place_of(finding.found)) for finding in findings
        ]
    unknown = [unknown for verdict in verdicts for unknown in verdict.unknown]
    return Verdict(findings=tuple(findings), unknown=tuple(unknown))


def stop_at_errors(situation: Situation, *, no_check: bool, say: Callable[[str], object]) -> None:
    """Check a run before any of its files is written or any process started.

    Args:
        situation: what will run.
        no_check: continue despite errors.
        say: prints a finding; receives warnings, and errors if `no_check`.

    Raises:
        ExceptionGroup: of one UserError for each finding that is an error.
    """
    stop_at_findings(check_rules(situation, rules=ALL_RULES), no_check=no_check, say=say)


def stop_at_findings(verdict: Verdict, *, no_check: bool, say: Callable[[str], object]) -> None:
    """Tell what rules found.

    Args:
        verdict: the results of rules.
        no_check: continue despite errors.
        say: prints a finding; receives warnings, and errors if `no_check`.

    Raises:
        ExceptionGroup: of one UserError for each finding that is an error.
    """
    errors, warnings = verdict.of(Severity.ERROR), verdict.of(Severity.WARNING)
    for finding in warnings + (errors if no_check else ()):
        say(finding.as_text())
    if errors and not no_check:
        raise ExceptionGroup("combinations that don't work", [finding.as_error() for finding in errors])
