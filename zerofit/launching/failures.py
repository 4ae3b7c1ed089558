"""The failure catalog zerofit/catalog/failures.toml, and matching of log lines."""

from __future__ import annotations

import enum
import functools
import os
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.catalog_folder import CATALOG_FOLDER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.launching.frames import Frame

_OF_ANY = ("script", "data")
"""Places of signs that count without a frame, too."""
_FILE = os.path.join(CATALOG_FOLDER, "failures.toml")

GPU_IS_FULL, HOST_IS_FULL = "gpu-out-of-memory", "host-out-of-memory"
_WORD = re.compile("[A-Za-z]{2,}")
_HEALTHY_WORDS = frozenset(
    {
        "but",
        "code",
        "error",
        "file",
        "files",
        "found",
        "index",
        "launcher",
        "loss",
        "model",
        "open",
        "optimizer",
        "step",
        "torch",
        "total",
        "train",
        "training",
    }
)
"""Words common in healthy logs, which don't help a fast search."""
_TRACEBACK_WORDS = (
    "Traceback",
    "Error",
    "Exception",
    "Interrupt",
    "Exit",
    "Timeout",
    "During handling",
    "the direct cause of",
)


class Role(enum.StrEnum):
    """The role of a failure in a run."""

    ROOT = "root"
    CONFIRMATION = "confirmation"
    """Confirms that a run failed, without the reason."""
    CASCADE = "cascade"
    """A consequence of another rank's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """A known failure, as logs show it."""

    id: str
    role: Role
    cause: str
    why: str
    fix: str
    evidence: str
    signs: tuple[str, ...]
    """Parts of one line; "..." matches anything, ^ and $ the line's ends, @ names where it was raised."""
    ends_traceback: bool = False
    """True if the signs only count in the exception at the end of a traceback."""
    vague: bool = False
    """True if it is so unspecific that any other failure of its role takes precedence."""
    explains: tuple[str, ...] = ()
    """Failures of which it is the cause if it came first: what hung is ended by the time limit later."""

    @property
    def is_vague(self) -> bool:
        """True if any other failure of its role takes precedence."""
        return self.vague or self.ends_traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    failure: KnownFailure
    parts: tuple[str, ...]
    at_start: bool
    at_end: bool
    raised_in: str | None = None
    """Where it must have been raised, as Frame.is_at() takes it; None for anywhere."""

    @property
    def literal(self) -> str:
        """The longest part."""
        return max(self.parts, key=len)

    @property
    def length(self) -> int:
        return sum(map(len, self.parts))

    @property
    def needs_exception(self) -> bool:
        """True if it only counts in the exception at the end of a traceback."""
        return self.failure.ends_traceback or self.raised_in is not None

    def matches(self, text: str) -> bool:
        """Return True if a text has all parts in their order: in one pass, however hostile the text is."""
        end = len(text)
        if self.at_end:
            end -= len(self.parts[-1])
            if end < 0 or not text.endswith(self.parts[-1]):
                return False
        at = 0
        for number, part in enumerate(self.parts[:-1] if self.at_end else self.parts):
            found = text.find(part, at, end)
            if found < 0 or (number == 0 and self.at_start and found > 0):
                return False
            at = found + len(part)
        return not (self.at_start and self.at_end and len(self.parts) == 1) or end == 0

    def is_raised_in(self, frames: Sequence[Frame], text: str) -> bool:
        """Return True if an exception, with this text, was raised where the sign must come from."""
        place = self.raised_in
        if place is None:
            return True
        return place in _OF_ANY if not frames else any(frame.is_at(place, text) for frame in frames)


@functools.cache
def failures() -> Mapping[str, KnownFailure]:
    """Return all known failures by id."""
    with open(_FILE, "rb") as file:
        tables = tomllib.load(file)
    return {
        name: KnownFailure(
            id=name,
            **{
                **table,
                "role": Role(table["role"]),
                "signs": tuple(table["signs"]),
                "explains": tuple(table.get("explains", ())),
            },
        )
        for name, table in tables.items()
    }


@functools.cache
def _signs() -> tuple[_Sign, ...]:
    """Return the signs of all failures."""
    return tuple(_sign(failure, sign) for failure in failures().values() for sign in failure.signs)


def _sign(failure: KnownFailure, sign: str) -> _Sign:
    said, _, raised_in = sign.partition(" @ ")
    bare = said.removeprefix("^").removesuffix("$")
    return _Sign(
        failure=failure,
        parts=tuple(part.strip() for part in bare.split("...")) if "..." in bare else (bare,),
        at_start=said.startswith("^"),
        at_end=said.endswith("$"),
        raised_in=raised_in or None,
    )


@functools.cache
def _signs_by_word() -> Mapping[str, tuple[_Sign, ...]]:
    """Return the signs by a word that a text must contain to match them."""
    found: dict[str, tuple[_Sign, ...]] = {}
    for sign in _signs():
        words = _WORD.findall(sign.literal)
        word = max(words, key=lambda text: (text.lower() not in _HEALTHY_WORDS, len(text)))
        found[word] = (*found.get(word, ()), sign)
    return found


def shows_nothing(text: str) -> bool:
    """Return True if a text shows no failure and no traceback: a fast check for most of a log."""
    if any(word in text for word in _TRACEBACK_WORDS):
        return False
    return _signs_by_word().keys().isdisjoint(_WORD.findall(text))


def failure_of(text: str, *, ends_traceback: bool, raised_in: Sequence[Frame] = ()) -> KnownFailure | None:
    """Return the failure that a line shows, by its longest sign, unspecific ones last; None if there is none.

    Args:
        text: without leading rank and time.
        ends_traceback: True if it is the exception at the end of a traceback.
        raised_in: the innermost frame of that traceback, and the one that called it if it is Python's own.
    """
    by_word = _signs_by_word()
    found = [
        sign
        for word in by_word.keys() & set(_WORD.findall(text))
        for sign in by_word[word]
        if (ends_traceback or not sign.needs_exception)
        and sign.matches(text)
        and sign.is_raised_in(raised_in, text)
    ]
    best = max(
        found, key=lambda sign: (not sign.failure.is_vague, sign.length, sign.failure.id), default=None
    )
    return best.failure if best else None


def shows(name: str, text: str) -> bool:
    """Return True if an exception's message shows the failure with this id."""
    return any(sign.failure.id == name and sign.matches(text) for sign in _signs())
