"""Bars of memory: the terms of an estimate in six groups, each with a letter that reads without colour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.estimates import PhaseMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Terms that are drawn as one."""

    letter: str
    name: str
    terms: frozenset[str]


GROUPS = (
    Group(letter="W", name="weights", terms=frozenset({"weights", "16-bit weight copies", "buffers"})),
    Group(
        letter="O",
        name="optimizer",
        terms=frozenset({"optimizer states", "master weights", "optimizer temporaries"}),
    ),
    Group(
        letter="G",
        name="gradients",
        terms=frozenset({"gradients", "gradient bucket", "gradient copy", "gradient partition"}),
    ),
    Group(
        letter="A",
        name="activations",
        terms=frozenset(
            {
                "activations",
                "recomputed activations",
                "activation gradients",
                "inputs",
                "outputs",
                "kernel workspaces",
            }
        ),
    ),
    Group(letter="B", name="engine's buffers", terms=frozenset()),
    Group(
        letter="C",
        name="context and cache",
        terms=frozenset({"allocator cache", "CUDA context", "NCCL"}),
    ),
)
"""In the order in which they are drawn. A term that no group names is a buffer of the engine's."""
_REST = next(group for group in GROUPS if not group.terms)


def group_of(term: str) -> Group:
    """Return the group of a term, by its name."""
    return next((group for group in GROUPS if term in group.terms), _REST)


def grouped(phase: PhaseMemory) -> tuple[tuple[Group, int], ...]:
    """Return each group's bytes in one phase, without those that hold nothing."""
    totals = dict.fromkeys(GROUPS, 0)
    for term in phase.terms:
        totals[group_of(term.name)] += term.num_bytes
    return tuple((group, num_bytes) for group, num_bytes in totals.items() if num_bytes)


def bar(phase: PhaseMemory, *, limit_bytes: int, width: int) -> str:
    """Return a phase as letters: WWOOGGAAAC..., each worth limit_bytes / width.

    What is free is dots; what goes beyond the limit ends in ">".
    """
    cells, done, drawn = "", 0, 0
    for group, num_bytes in grouped(phase):
        done += num_bytes
        end = round(done / limit_bytes * width)
        cells += group.letter * (end - drawn)
        drawn = max(drawn, end)
    if drawn > width:
        return cells[: width - 1] + ">"
    return cells + "." * (width - drawn)
