"""`check --fix`: applies the edits of findings, shows a diff, and writes the files with backups."""

from __future__ import annotations

import difflib
import itertools
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.checking.targets import fixable_together, is_fixable
from zerofit.configs.document import CutBlanks
from zerofit.configs.text.edits import Uneditable, apply_edits, cut_blanks
from zerofit.core.atomic_file import write_whole
from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerofit.checking.report import Report
    from zerofit.checking.targets import TargetFile
    from zerofit.configs.document import Edit

_MAX_ROUNDS = 10
"""ASSUMPTION: a fixed key can reveal errors below it, so a few rounds are needed, but never ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One changed file."""

    name: str
    """As the user named it."""
    before: str
    after: str


def find_fixes(look: Callable[[Mapping[str, str]], Report]) -> tuple[Fix, ...]:
    """Return the changed files after applying all findings' edits, including findings that appear afterwards.

    Args:
        look: reads and checks the targets, with texts instead of files, by the files' real paths.

    Raises:
        UserError: no finding's change can be made safely.
    """
    fixes: dict[str, Fix] = {}
    for _ in range(_MAX_ROUNDS):
        report = look({path: fix.after for path, fix in fixes.items()})
        fixed = _apply_findings(report)
        if not fixed:
            break
        for path, fix in fixed.items():
            before = fixes[path].before if path in fixes else fix.before
            fixes[path] = Fix(name=fix.name, before=before, after=fix.after)
    return tuple(fix for fix in fixes.values() if fix.before != fix.after)


def diff_of(fix: Fix) -> str:
    """Return the change of a file as a unified diff for `patch`."""
    lines = difflib.unified_diff(
        fix.before.splitlines(keepends=True), fix.after.splitlines(keepends=True), fix.name, fix.name
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def write_fixes(fixes: Sequence[Fix]) -> tuple[str, ...]:
    """Write each file atomically, with a backup beside it; return the names of the backups.

    Raises:
        UserError: a file is not writable, or has changed since the check; then none is written.
    """
    for fix in fixes:
        _refuse_if_not_writable(fix)
    return tuple(_write(fix) for fix in fixes)


def _apply_findings(report: Report) -> dict[str, Fix]:
    """Return the files changed by the findings' edits, by their real paths.

    Raises:
        UserError: there are edits, and none of them can be made.
    """
    files = report.targets.files
    requested: dict[str, list[Edit]] = {}
    wanted = [finding for finding in report.findings if is_fixable(finding, files)]
    for finding in fixable_together(wanted, files) or wanted:
        for edit in finding.edits:
            requested.setdefault(edit.document, []).append(edit)
    fixes = {}
    for file in report.targets.files:
        before = file.text
        if before is None or not os.path.isfile(file.name) or file.name not in requested:
            continue
        after = _edited(file, requested[file.name])
        if after != before:
            fixes[os.path.realpath(file.name)] = Fix(name=file.name, before=before, after=after)
    return fixes


def _edited(file: TargetFile, edits: Sequence[Edit]) -> str:
    try:
        if file.document is not None:
            return apply_edits(file.document, edits)
        return cut_blanks(str(file.text), (edit.line for edit in edits if isinstance(edit, CutBlanks)))
    except Uneditable as error:
        raise UserError(
            "fix-not-possible",
            "the file can't be fixed",
            found=f"{file.name}: {error}",
            why="--fix only makes changes with exactly one right answer",
            fix="change it manually, as described in the findings of zerofit check",
        ) from None


def _refuse_if_not_writable(fix: Fix) -> None:
    path = os.path.realpath(fix.name)
    folder = os.path.dirname(path)
    fix_text = "make it writable, or see the change with check --fix --dry-run"
    if not os.stat(path).st_mode & 0o222 or not os.access(path, os.W_OK):
        found, why = "it is read-only", "someone protected it from changes"
    elif not os.access(folder, os.W_OK | os.X_OK):
        found, why = f"{folder} is read-only", "the backup is written beside the file"
    elif Path(path).read_bytes() == fix.before.encode("utf-8"):
        return
    else:
        found, why = "it has changed since the check", "another program has written it"
        fix_text = "check it again"
    raise _not_written(f"{fix.name}: {found}", why, fix_text)


def _not_written(found: str, why: str, fix: str) -> UserError:
    return UserError("fix-not-written", "a file can't be fixed", found=found, why=why, fix=fix)


def _write(fix: Fix) -> str:
    """Write a backup and the file atomically, keeping mode and owner; return the backup's name."""
    path = os.path.realpath(fix.name)
    before = os.stat(path)
    names = (f"{path}.bak{number or ''}" for number in itertools.count())
    backup = next(name for name in names if not os.path.lexists(name))
    try:
        shutil.copy2(path, backup)
        write_whole(Path(path), fix.after, mode=0o600, sync=True)
    except BaseException as error:
        Path(backup).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        fix_text = "free some space, or see the change with check --fix --dry-run"
        raise _not_written(f"{fix.name}: {error.strerror}", "the file is unchanged", fix_text) from None
    os.chmod(path, stat.S_IMODE(before.st_mode))
    with suppress(PermissionError):  # only root may change the owner
        os.chown(path, before.st_uid, before.st_gid)
    beside = os.path.relpath(backup)
    return backup if beside.startswith(os.pardir) else beside
