"""The failures of zerofit/catalog/failures.toml, and which of them a line of a log shows."""

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


class Role(enum.StrEnum):
    """Where a failure stands among those of a run."""

    ROOT = "root"
    CONFIRMATION = "confirmation"
    """Says that a run failed, and hardly why."""
    CASCADE = "cascade"
    """A consequence of another rank's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure as logs show it."""

    id: str
    role: Role
    cause: str
    why: str
    fix: str
    evidence: str
    signs: tuple[str, ...]
    """Parts of one line; "..." stands for anything, ^ and $ for the line's ends."""
    ends_traceback: bool = False
    """True if the signs count in the exception that ends a traceback alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    failure: Failure
    literal: str
    """The longest part, looked for first, as that is fast."""
    pattern: re.Pattern[str]
    length: int


@functools.cache
def failures() -> Mapping[str, Failure]:
    """Return all known failures by id."""
    with open(_FILE, "rb") as file:
        tables = tomllib.load(file)
    return {
        name: Failure(
            id=name, **{**table, "role": Role(table["role"]), "signs": tuple(table["signs"])}
        )
        for name, table in tables.items()
    }


@functools.cache
def _signs() -> tuple[_Sign, ...]:
    """Return the signs of all failures, the longest first: it says most."""
    found = [_sign(failure, sign) for failure in failures().values() for sign in failure.signs]
    return tuple(sorted(found, key=lambda one: -one.length))


def _sign(failure: Failure, sign: str) -> _Sign:
    parts = [part.strip() for part in sign.removeprefix("^").removesuffix("$").split("...")]
    if len(parts) == 1:
        parts = [sign.removeprefix("^").removesuffix("$")]
    pattern = ".*?".join(re.escape(part) for part in parts)
    return _Sign(
        failure=failure,
        literal=max(parts, key=len),
        pattern=re.compile(f"{'^' * sign.startswith('^')}{pattern}{'$' * sign.endswith('$')}"),
        length=sum(map(len, parts)),
    )


def failure_of(text: str, *, ends_traceback: bool) -> Failure | None:
    """Return the failure that a line shows, that with the longest sign; None where it shows none.

    Args:
        text: without the rank and the time in front of it.
        ends_traceback: True if it is the exception that a traceback ends with.
    """
    for sign in _signs():
        if sign.literal in text and sign.pattern.search(text):
            if sign.failure.ends_traceback and not ends_traceback:
                continue
            return sign.failure
    return None
