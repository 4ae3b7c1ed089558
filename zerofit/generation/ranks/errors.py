"""What a rank says that waited in vain for others: which came, which did not, and where those stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OURS = "zerofit.generate"
"""The name of our own call, whatever the model is; every other is of transformers, and under ZeRO-3."""
_OF_OURS = (
    "all ranks share the work and the results",
    "call it equally often on all ranks, with per_rank=True and no prompts where one has none; ranks that "
    "are only slow get longer by limit_s=",
)
_OF_TRANSFORMERS = (
    "each rank holds a part of the weights and must take part in every forward pass",
    "call it equally often on all ranks, or zerofit.generate(), which takes any number of prompts on each; "
    "ranks that are only slow get longer by --generate-limit SECONDS of zerofit launch",
)
_SEE = "https://huggingface.co/docs/transformers/main_classes/deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A call that not all ranks have come to."""

    name: str
    """The call."""
    line: str
    """Where it stands in the script, as the rank sees it that waited."""
    came: tuple[int, ...]
    """Ranks that made it."""
    ended: tuple[int, ...]
    """Ranks whose scripts have ended."""
    places: Mapping[int, str | None]
    """Where each other rank stands; None for one that does not answer."""
    limit_s: float
    """How long the rank was to wait."""


def not_on_all_ranks(absence: Absence) -> UserError:
    """Return the error of a call that some ranks alone have made."""
    which = f"{ranks_said(absence.came)} alone" if len(absence.came) == 1 else f"{ranks_said(absence.came)}"
    waited = "" if absence.ended else f"; {ranks_said(absence.came)} waited {absence.limit_s:g} s"
    why, fix = _OF_OURS if absence.name == OURS else _OF_TRANSFORMERS
    return UserError(
        "generate-not-on-all-ranks",
        f"{absence.name}() was not called on all ranks",
        found=f"{absence.line} on {which}; {'; '.join(_standing(absence))}",
        why=f"{why}{waited}",
        fix=fix,
        see=None if absence.name == OURS else _SEE,
    )


def store_has_gone(name: str, *, line: str) -> UserError:
    """Return the error of a rank that can't hear of the others any more."""
    return UserError(
        "generate-not-on-all-ranks",
        f"the other ranks have gone before {name}()",
        found=f"{line}, where the ranks' store (TCPStore) does not answer",
        why="rank 0 or the launcher on the first node keeps the store, and has ended",
        fix="look for the error of the rank that ended first: its log says more",
    )


def ranks_said(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {said}"


def _standing(absence: Absence) -> list[str]:
    """Return where the missing ranks are, those of one place together."""
    parts = []
    if absence.ended:
        are = "scripts of {} have" if len(absence.ended) > 1 else "script of {} has"
        parts.append(f"the {are.format(ranks_said(absence.ended))} ended")
    at: dict[str | None, list[int]] = {}
    for rank, place in absence.places.items():
        at.setdefault(place, []).append(rank)
    for place, ranks in at.items():
        are = "are" if len(ranks) > 1 else "is"
        answer = "do" if len(ranks) > 1 else "does"
        said = ranks_said(ranks)
        parts.append(f"{said} {are} at {place}" if place is not None else f"{said} {answer} not answer")
    return parts
