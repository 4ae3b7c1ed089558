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
    from collections.abc import Mapping

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
        "loss",
        "model",
        "open",
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
    """Parts of one line; "..." matches anything, ^ and $ the line's ends."""
    ends_traceback: bool = False
    """True if the signs only count in the exception at the end of a traceback."""
    vague: bool = False
    """True if it is so unspecific that any other failure of its role takes precedence."""

    @property
    def is_vague(self) -> bool:
        """True if any other failure of its role takes precedence."""
        return self.vague or self.ends_traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    failure: KnownFailure
    literal: str
    """The longest part."""
    pattern: re.Pattern[str]
    length: int


@functools.cache
def failures() -> Mapping[str, KnownFailure]:
    """Return all known failures by id."""
    with open(_FILE, "rb") as file:
        tables = tomllib.load(file)
    return {
        name: KnownFailure(id=name, **{**table, "role": Role(table["role"]), "signs": tuple(table["signs"])})
        for name, table in tables.items()
    }


@functools.cache
def _signs() -> tuple[_Sign, ...]:
    """Return the signs of all failures."""
    return tuple(_sign(failure, sign) for failure in failures().values() for sign in failure.signs)


def _sign(failure: KnownFailure, sign: str) -> _Sign:
    parts = [part.strip() for part in sign.removeprefix("^").removesuffix("$").split("...")]
    if len(parts) == 1:
        parts = [sign.removeprefix("^").removesuffix("$")]
    pattern = ".*?".join(re.escape(part) for part in parts)
    if sign.startswith("^"):
        pattern = f"^{pattern}"
    if sign.endswith("$"):
        pattern = f"{pattern}$"
    return _Sign(
        failure=failure,
        literal=max(parts, key=len),
        pattern=re.compile(pattern),
        length=sum(map(len, parts)),
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


def failure_of(text: str, *, ends_traceback: bool) -> KnownFailure | None:
    """Return the failure that a line shows, by its longest sign, unspecific ones last; None if there is none.

    Args:
        text: without leading rank and time.
        ends_traceback: True if it is the exception at the end of a traceback.
    """
    by_word = _signs_by_word()
    found = [
        sign
        for word in by_word.keys() & set(_WORD.findall(text))
        for sign in by_word[word]
        if (ends_traceback or not sign.failure.ends_traceback) and sign.pattern.search(text)
    ]
    best = max(
        found, key=lambda sign: (not sign.failure.is_vague, sign.length, sign.failure.id), default=None
    )
    return best.failure if best else None


def shows(name: str, text: str) -> bool:
    """Return True if an exception's message shows the failure with this id."""
    return any(sign.failure.id == name and sign.pattern.search(text) for sign in _signs())
