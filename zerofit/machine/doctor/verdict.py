"""CheckupLine: one thing that doctor looked at, and whether it is well."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How one thing stands."""

    OK = "ok"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckupLine:
    """One thing that was looked at."""

    status: Status
    topic: str
    """What was looked at, in a word or two."""
    found: str
    """What is there."""
    why: str | None = None
    """Why that is a warning; None where it is none."""
    fix: str | None = None
    """What to do about it; None where there is nothing to do."""


def ok(topic: str, found: str) -> CheckupLine:
    """Return the line of a thing that is well."""
    return CheckupLine(status=Status.OK, topic=topic, found=found)


def warning(topic: str, found: str, *, why: str, fix: str) -> CheckupLine:
    """Return the line of a thing that stands in the way of some run."""
    return CheckupLine(status=Status.WARNING, topic=topic, found=found, why=why, fix=fix)
