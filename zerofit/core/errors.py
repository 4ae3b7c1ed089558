"""UserError, the exception for everything that the user can fix, and its printed form."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

EXIT_USAGE = 2
"""Exit code for a wrong command line, file or value."""
_LEAST_RATIO = 0.6
"""Of two words that are alike (difflib); its own default."""
_WORDS_OF = re.compile(r"[_.-]+")
_FEWEST_WORDS = 3
"""Of a name that is recognized by its other words."""


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
    """Return the valid word most similar to a misspelt one, or None; swapped letters are most likely.

    Of a name of several words the last one says what the value is: main_training_ip is meant to be
    main_process_ip, not main_training_function.
    """
    names = list(valid)
    matches = difflib.get_close_matches(word, names, n=3, cutoff=_LEAST_RATIO)
    swapped = next((match for match in matches if sorted(match) == sorted(word)), None)
    if swapped or (matches and _ends_alike(word, matches[0])):
        return swapped or matches[0]
    with_one_other = [name for name in names if _differ_in_one_before_the_last(word, name)]
    matches = difflib.get_close_matches(word, with_one_other, n=1, cutoff=0.0) or matches
    return matches[0] if matches else None


def _ends_alike(word: str, name: str) -> bool:
    last, meant = _WORDS_OF.split(word)[-1], _WORDS_OF.split(name)[-1]
    return difflib.SequenceMatcher(None, last, meant).ratio() >= _LEAST_RATIO


def _differ_in_one_before_the_last(word: str, name: str) -> bool:
    """Return True if two names of three words or more differ in one word that is not the last."""
    written, meant = _WORDS_OF.split(word), _WORDS_OF.split(name)
    if len(written) != len(meant) or len(written) < _FEWEST_WORDS or written[-1] != meant[-1]:
        return False
    return len([word for word, other in zip(written, meant, strict=True) if word != other]) == 1


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
