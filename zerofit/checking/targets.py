"""Targets: what the user asked to check, read: files, a script with its arguments, a launch command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.configs.document import BrokenFile, FileKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.checking.engine import Finding
    from zerofit.configs.document import Document
    from zerofit.configs.schema import Schemas
    from zerofit.core.capture import Capture
    from zerofit.core.command import LaunchCommand, Route
    from zerofit.core.errors import Unreadable
    from zerofit.core.facts import Checkpoint, Machine, Versions
    from zerofit.core.setting import Said


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """One file that was read, or should have been."""

    name: str
    """As the user, or the layer that names it, wrote it; "standard input" for -."""
    kind: FileKind
    document: Document | None = None
    """A configuration, read; None for a script, and for a file that is broken."""
    source: str | None = None
    """A script's text; None for a configuration, and for a file that is broken."""
    broken: Unreadable | None = None
    """Why it could not be read as what it should be."""
    named_by: Said[str] | None = None
    """The line or flag that names the file; None where the user named it as a target."""

    @property
    def is_on_command_line(self) -> bool:
        """True if it is a target, or the value of a flag; any other file is named by a file."""
        return self.named_by is None or self.named_by.place is None


def is_mendable(finding: Finding, files: Iterable[TargetFile]) -> bool:
    """Return True if a finding has edits, and all in files that stand on the command line.

    A file that another one names may be shared, so --fix leaves it alone.
    """
    named = {file.name for file in files if file.is_on_command_line}
    return bool(finding.edits) and all(edit.document in named for edit in finding.edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """All that one `zerofit check` looks at. Files stand in the order in which they were named."""

    files: tuple[TargetFile, ...] = ()
    missing: tuple[Said[str], ...] = ()
    """Files that a layer names and that are not there: the path, and the line or flag that names it."""
    command: LaunchCommand | None = None
    """The launcher's command line; its script is among the files."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments, with a command and without."""
    route: Route | None = None
    """Who reads the DeepSpeed configuration, as the user says; a script that shows it wins."""
    num_processes: int | None = None
    """Ranks on all nodes together, as the user says."""
    on_cpu: bool = False
    """True if the user says that the run is on the CPU."""
    schemas: Schemas | None = None
    checkpoint: Checkpoint | None = None
    """The checkpoint that the script's arguments name."""
    machine: Machine | None = None
    """The node that will run it; None where it is another than this one."""
    versions: Versions | None = None
    """Installed versions."""
    capture: Capture | None = None
    """The capture of the script, where one was asked for."""

    @property
    def deepspeed(self) -> tuple[Document, ...]:
        """The DeepSpeed configurations that could be read."""
        return self._documents(FileKind.DEEPSPEED)

    @property
    def accelerate(self) -> tuple[Document, ...]:
        """The accelerate configurations that could be read."""
        return self._documents(FileKind.ACCELERATE)

    @property
    def scripts(self) -> tuple[tuple[str, str], ...]:
        """Name and source of each script that could be read."""
        return tuple((file.name, file.source) for file in self.files if file.source is not None)

    @property
    def broken(self) -> tuple[BrokenFile, ...]:
        """The files that could not be read as what they should be."""
        return tuple(
            BrokenFile(name=file.name, kind=file.kind, error=file.broken)
            for file in self.files
            if file.broken
        )

    def _documents(self, kind: FileKind) -> tuple[Document, ...]:
        return tuple(file.document for file in self.files if file.document and file.kind is kind)
