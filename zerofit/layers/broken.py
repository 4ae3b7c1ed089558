"""A file that is not what it should be, in the form that the rules read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.document import BrokenFile

if TYPE_CHECKING:
    from zerofit.document import FileKind
    from zerofit.documents import Unreadable


def broken_file(name: str, kind: FileKind, error: Unreadable) -> BrokenFile:
    """Return what is wrong with a file.

    Args:
        name: the file, as the user named it.
        kind: what it was meant for.
        error: what reading it raised.
    """
    return BrokenFile(
        name=name,
        kind=kind,
        problem=error.problem,
        why=error.why,
        fix=error.fix,
        line=error.line,
        column=error.column,
    )
