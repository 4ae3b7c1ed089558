"""Said: a setting's value with the user's text and its position."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Confidence(StrEnum):
    """How certain a fact is. Files and flags are certain; what is inferred from a script's source is not."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said(Generic[T_co]):
    """A setting's effective value and where the user set it."""

    value: T_co
    text: str
    """As the user wrote it: "--zero-stage 2", "zero_optimization.stage=2"; for a default, the name of the
    missing setting."""
    place: Place | None = None
    """Its position in a file; None for a flag or a default."""
    confidence: Confidence = Confidence.CERTAIN

    @property
    def where(self) -> str:
        """Its file and line, or what the user wrote."""
        return self.text if self.place is None else str(self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position in a file."""

    file: str
    """The file, as the user named it."""
    line: int
    """From 1; 0 for the file as a whole."""
    column: int = 1
    """From 1, in characters."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file
