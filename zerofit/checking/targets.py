"""Targets: the inputs of a check, read: files, a script with its arguments, a launch command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.configs.document import BrokenFile, FileKind
from zerofit.configs.text.edits import Uneditable, apply_edits
from zerofit.core.setting import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zerofit.checking.engine import Finding
    from zerofit.checking.inputs.hostfiles import Hostfile
    from zerofit.checking.inputs.programs import OtherProgram
    from zerofit.checking.inputs.shell_lines import ShellLine
    from zerofit.checking.inputs.shell_words import LineBreak
    from zerofit.configs.document import Document, Edit
    from zerofit.configs.schema import Schemas
    from zerofit.core.capture import Capture
    from zerofit.core.command import LaunchCommand, Route
    from zerofit.core.errors import Unreadable, UserError
    from zerofit.core.facts import Checkpoint, Machine, Versions
    from zerofit.core.setting import Said


DICTIONARY = "dictionary in "
"""Begins the name of a configuration that is a dictionary in a script, before the script's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file that was read, or could not be read."""

    name: str
    """As written by the user, or by the layer that names it; "standard input" for -."""
    kind: FileKind
    document: Document | None = None
    """A parsed configuration; None for a script or a broken file."""
    source: str | None = None
    """A script's text; None for a configuration or a broken file."""
    broken: Unreadable | None = None
    """Why it could not be parsed as its kind."""
    named_by: Said[str] | None = None
    """The line or flag that names the file; None if it is a target."""
    num_lines: int = 0
    """Launch lines of a shell script or notebook."""
    shell_text: str | None = None
    """The text of a shell script; None for any other file."""

    @property
    def text(self) -> str | None:
        """The text of a configuration or a shell script, which edits may change; None for any other file."""
        return self.shell_text if self.document is None else self.document.text

    @property
    def has_nothing(self) -> bool:
        """True for a shell script or notebook without a launch line."""
        return self.kind is FileKind.LINES and not self.num_lines

    @property
    def is_on_command_line(self) -> bool:
        """True if it is a target, or the value of a flag, rather than named in a file."""
        return self.named_by is None or self.named_by.place is None


def is_fixable(finding: Finding, files: Iterable[TargetFile]) -> bool:
    """Return True if a finding has edits, all in files named on the command line.

    Files named by other files may be shared, so --fix does not change them.
    """
    named = {file.name for file in files if file.is_on_command_line}
    return bool(finding.edits) and all(edit.document in named for edit in finding.edits)


def fixable_together(findings: Iterable[Finding], files: Sequence[TargetFile]) -> tuple[Finding, ...]:
    """Return the findings whose edits --fix makes: of those that want different changes of a key the first.

    A finding that is certain comes before one that is not; else their order counts.
    """
    documents = {file.name: file.document for file in files if file.document is not None}
    wanted = [finding for finding in findings if is_fixable(finding, files)]
    if _fit([edit for finding in wanted for edit in finding.edits], documents):
        return tuple(wanted)
    kept: list[Finding] = []
    edits: list[Edit] = []
    for finding in sorted(wanted, key=lambda finding: finding.confidence is not Confidence.CERTAIN):
        if _fit([*edits, *finding.edits], documents):
            kept.append(finding)
            edits += finding.edits
    return tuple(finding for finding in wanted if finding in kept)


def _fit(edits: Sequence[Edit], documents: Mapping[str, Document]) -> bool:
    """Return True if edits can be made together."""
    try:
        for name, document in documents.items():
            apply_edits(document, [edit for edit in edits if edit.document == name])
    except Uneditable:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """All inputs of one `zerofit check`. Files are in the order in which they were named."""

    files: tuple[TargetFile, ...] = ()
    missing: tuple[Said[str], ...] = ()
    """Named files that do not exist: the path, and the line or flag that names it."""
    missing_script: UserError | None = None
    """Why the command's script can't be read, if there is none, and the rest of the line is checked."""
    hostfile: Hostfile | None = None
    """The nodes that DeepSpeed's launcher is told of."""
    missing_hostfile: str | None = None
    """The flag that names a hostfile that does not exist."""
    command: LaunchCommand | None = None
    """The launcher's command line; its script is among the files."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments, with or without a command."""
    are_all_arguments: bool = False
    """True if the script gets no others: it is launched, or a command is checked."""
    route: Route | None = None
    """The library that reads the DeepSpeed configuration, according to the user; the script takes
    precedence."""
    num_processes: int | None = None
    """Ranks on all nodes together, according to the user."""
    on_cpu: bool = False
    """True if the run is on the CPU, according to the user."""
    schemas: Schemas | None = None
    checkpoint: Checkpoint | None = None
    """The checkpoint in the script's arguments."""
    machine: Machine | None = None
    """The node that will run it; None if it is not this one."""
    versions: Versions | None = None
    """Installed versions."""
    capture: Capture | None = None
    """The capture of the script, if requested or cached."""
    program: OtherProgram | None = None
    """The program of the line, if it is none that check knows."""
    line: ShellLine | None = None
    """The line of a file that starts the run; None if the user typed it."""
    runs: tuple[Targets, ...] = ()
    """The targets' runs, if they define several: each launch line of a file, each recipe."""
    notes: tuple[str, ...] = ()
    """What is not checked, and why."""

    @property
    def breaks(self) -> tuple[LineBreak, ...]:
        """Where the run's line loses its next lines."""
        return self.line.breaks if self.line is not None else ()

    @property
    def script_targets(self) -> tuple[tuple[str, ...], ...]:
        """What a capture of each script would run: the script or `-m module`, and its arguments."""
        if self.runs:
            return tuple(dict.fromkeys(target for run in self.runs for target in run.script_targets))
        names = [name for name, _ in self.scripts]
        found: list[tuple[str, ...]] = [(name,) for name in names]
        if self.command is not None and self.command.script is not None:
            script = self.command.script
            found = [(script,) if script in names else ("-m", script)]
        return tuple((*script, *self.arguments) for script in found)

    @property
    def scripts(self) -> tuple[tuple[str, str], ...]:
        """Name and source of each script that could be read."""
        return tuple((file.name, file.source) for file in self.files if file.source is not None)

    @property
    def broken(self) -> tuple[BrokenFile, ...]:
        """The files that could not be parsed as their kind."""
        return tuple(
            BrokenFile(name=file.name, kind=file.kind, error=file.broken)
            for file in self.files
            if file.broken
        )
