"""Orders lines of several logs in time: by line within a log, by the clock between logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.launching.log_lines import Moment

_MONTHS = 12
_UNKNOWN = (0, 0, 0, 0, 0, 0)
_Key = tuple[bool, "Moment", int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceLine:
    """A line of a log that shows a failure."""

    file: str
    line: int
    text: str
    """With secrets masked."""
    rank: int | None
    moment: Moment | None = None
    """Its time; None if unknown."""


def keys_in_time(places: Sequence[EvidenceLine], *, files: Sequence[str]) -> Mapping[tuple[str, int], _Key]:
    """Return what to sort lines of logs by, for each file and line.

    Args:
        files: all logs, in the order that counts where a log has no times.
    """
    months = {place.moment[0] for place in places if place.moment}
    wraps = {1, _MONTHS} <= months  # logs do not all have the year
    numbers = {file: number for number, file in enumerate(files)}
    latest: dict[str, Moment] = {}
    keys: dict[tuple[str, int], _Key] = {}
    for place in sorted(places, key=lambda place: place.line):
        # Within a log the lines are in order, whatever their times: writers may have different time zones.
        if place.moment is not None:
            moment = _next_year(place.moment) if wraps else place.moment
            latest[place.file] = max(moment, latest.get(place.file, moment))
        at = latest.get(place.file) if len(files) > 1 else None
        keys[place.file, place.line] = at is None, at or _UNKNOWN, numbers[place.file], place.line
    return keys


def _next_year(moment: Moment) -> Moment:
    """Return a moment in the first half of a year as one of the year after."""
    return (moment[0] + _MONTHS, *moment[1:]) if moment[0] <= _MONTHS // 2 else moment
