"""UserError, the exception for everything that the user can fix, and its printed form."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

EXIT_USAGE = 2
"""Exit code for a wrong command line, file or value."""


class UserError(Exception):
    """A user's mistake: what happened, the value found, why it is wrong, and the fix.

    Args:
        rule: permanent kebab-case id, printed as ``error[rule]``.
        summary: what is wrong, in one line.
        found: the user's own flag, file or value.
        why: the reason.
        fix: what to do.
        see: a link, where there is a page worth reading.
        exit_code: the process's exit code.
    """

    def __init__(
        self,
        rule: str,
        summary: str,
        *,
        found: str,
        why: str,
        fix: str,
        see: str | None = None,
        exit_code: int = EXIT_USAGE,
    ) -> None:
        super().__init__(summary)
        self.rule = rule
        self.summary = summary
        self.found = found
        self.why = why
        self.fix = fix
        self.see = see
        self.exit_code = exit_code
        self.is_on_every_rank = False
        """True if every rank raises it, so that one rank can report it for all."""

    def __str__(self) -> str:
        return format_message(
            f"error[{self.rule}]: {self.summary}", found=self.found, why=self.why, fix=self.fix, see=self.see
        )


def format_message(headline: str, *, found: str, why: str, fix: str, see: str | None = None) -> str:
    """Return an error or warning as printed: a headline and an indented line for each part."""
    lines = [headline, f"  found: {found}", f"  why:   {why}", f"  fix:   {fix}"]
    if see:
        lines.append(f"  see:   {see}")
    return "\n".join(lines)


def message_of(error: BaseException) -> str:
    """Return an exception's message; of one that can't be made, what kept it from being made."""
    try:
        return str(error)
    except BaseException as broken:  # the script's own code, which may raise anything
        return f"<its message can't be made: {type(broken).__name__}>"


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (message_of(error).strip().splitlines() or [type(error).__name__])[0]


def bad_value(flag: str, value: object, *, why: str, fix: str) -> UserError:
    """Return the error for a flag with an invalid value."""
    return UserError(
        "bad-value", f"{flag} can't be {str(value)!r}", found=f"{flag} {value}", why=why, fix=fix
    )


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word most similar to a misspelt one, or None; swapped letters are most likely."""
    matches = difflib.get_close_matches(word, list(valid), n=3, cutoff=0.6)
    swapped = (match for match in matches if sorted(match) == sorted(word))
    return next(swapped, matches[0] if matches else None)


class Unreadable(Exception):  # noqa: N818 - it is about the file, no failure of ours
    """A file that can't be parsed or has unexpected content.

    Args:
        problem: what is wrong, in a few words.
        why: the reason.
        fix: what to do.
        line: from 1.
        column: from 1, in characters.
    """

    def __init__(self, problem: str, why: str, fix: str, line: int = 1, column: int = 1) -> None:
        super().__init__(problem)
        self.problem = problem
        self.why = why
        self.fix = fix
        self.line = line
        self.column = column
