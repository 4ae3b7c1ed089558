"""Compares the collectives in which ranks wait: who did not come, and who calls another one."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

_Key = TypeVar("_Key")
_TIMED_OUT = "aught collective operation timeout: WorkNCCL("
_TAKEN_DOWN = ("Some NCCL operations have failed or timed out", "To avoid data inconsistency, we are taking")
_WORK = re.compile(r"SeqNum=(\d{1,18}), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?")
_AT_WORK = re.compile(r" (?:at|NCCL) work(?: sequence id)?: (\d{1,18})\b")
"""torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (torch 2.1 to 2.13) on the collective that a rank waits
in, and on its process group: "[PG ID 0 PG GUID 0(default_pg) Rank 1] Timeout at NCCL work: 808"."""
_RANK = re.compile(r"Rank (\d{1,6})\]")
_DEFAULT_GROUP = re.compile(r"0?\s?\(default_pg\)|0$|$")
"""The group of all ranks: "0(default_pg)", "0 (default_pg)", "0"; "" if it has no name."""
_SAME_SIZES = ("ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHERBASE", "REDUCESCATTERBASE")
"""Operations that take the same number of elements on each rank; others may not."""
_POINT_TO_POINT = frozenset({"SEND", "RECV", "UNKNOWN"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective that a rank has called."""

    group: str | None
    """The process group; None if unknown."""
    number: int
    """Counts the calls of the group."""
    operation: str
    sizes: str | None = None
    """What it is called with, in words, if that has to agree between ranks; None otherwise, or if unknown."""
    is_group_guessed: bool = False
    """True if the rank's own lines do not name the process group, and it waits where others of one do."""

    @property
    def words(self) -> str:
        """Return the operation and its sizes."""
        return self.operation if self.sizes is None else f"{self.operation} of {self.sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks that call different collectives at one place."""

    odd_ranks: tuple[int, ...]
    """Those that differ from most; all if no call is that of most."""
    sentence: str
    is_guessed: bool = False
    """True if it is not certain that they are of one process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfStep:
    """Ranks that wait in another collective than most of their process group."""

    ranks: tuple[int, ...]
    is_behind: bool
    """False if they are ahead."""
    sentence: str

    @property
    def words(self) -> str:
        """Return the ranks in words."""
        return _ranks_words(self.ranks)


def timed_out_rank(text: str, *, log_rank: int | None = None) -> tuple[int, Collective] | None:
    """Return the rank and collective of a line of NCCL's watchdog; None for any other line.

    Args:
        log_rank: the rank that wrote the line, if torch's own prefix names it.
    """
    at = text.find(_TIMED_OUT)
    if at < 0:
        return None
    group = _group_before(text, at)
    work, rank = _WORK.match(text, at + len(_TIMED_OUT)), _rank_before(text, at, log_rank)
    if work is None or rank is None:
        return None
    sizes = work[3] if work[3] == work[4] else f"{work[3]} to {work[4]}"
    return rank, Collective(
        group=group,
        number=int(work[1]),
        operation=work[2],
        sizes=f"{sizes} elements" if work[3] and has_same_sizes(work[2]) else None,
    )


def has_same_sizes(operation: str) -> bool:
    """Return True if an operation, such as ALLREDUCE or nccl:all_reduce, takes as much on each rank."""
    return operation.upper().rpartition(":")[2].replace("_", "") in _SAME_SIZES


def group_of_rank(text: str, *, log_rank: int | None = None) -> tuple[int, int, str] | None:
    """Return rank, number and process group of a line in which NCCL's watchdog names all three.

    Args:
        log_rank: the rank that wrote the line, if torch's own prefix names it.
    """
    at = text.find("[PG ")
    if at < 0 or (work := _AT_WORK.search(text, at)) is None:
        return None
    group = _group_before(text, work.start())
    rank = _rank_before(text, work.start(), log_rank)
    return None if rank is None or group is None else (rank, int(work[1]), group)


def _rank_before(text: str, end: int, log_rank: int | None) -> int | None:
    if log_rank is not None:
        return log_rank  # the text has the rank within the process group
    found = _RANK.match(text, max(0, text.rfind("Rank ", 0, end)))
    return None if found is None else int(found[1])


def _group_before(text: str, end: int) -> str | None:
    """Return the process group that the text names before a place; without its number in its process."""
    start = text.rfind("[PG ", 0, end)
    stop = text.find(" Rank ", start, end)
    return None if start < 0 or stop < 0 else text[start + 4 : stop].rpartition("PG GUID ")[2]


def mismatch_in(at: Mapping[int, Collective]) -> Mismatch | None:
    """Return the first number at which ranks of a process group call different collectives; None without one.

    Args:
        at: by rank, the collective in which it waits.
    """
    for (_, number), ranks in sorted(_by(at, lambda call: (call.group or "", call.number)).items()):
        calls = _by({rank: at[rank] for rank in ranks}, lambda call: (call.operation, call.sizes))
        if len(calls) == 1 or _POINT_TO_POINT.intersection(at[rank].operation for rank in ranks):
            continue
        if len({at[rank].operation for rank in ranks}) == 1 and any(at[rank].sizes is None for rank in ranks):
            continue
        is_guessed = any(at[rank].is_group_guessed for rank in ranks)
        sides = sorted(calls.values(), key=lambda side: (len(side), side))
        said = [
            f"{_ranks_words(side)} call{'s' if len(side) == 1 else ''} {at[side[0]].words}" for side in sides
        ]
        if len(sides[-1]) == len(sides[-2]):
            sentence = f"ranks disagree on collective number {number}: {', '.join(said)}"
            return Mismatch(odd_ranks=tuple(ranks), sentence=sentence, is_guessed=is_guessed)
        return Mismatch(
            odd_ranks=tuple(sorted(rank for side in sides[:-1] for rank in side)),
            sentence=f"{', '.join(said[:-1])} as collective number {number}, where {said[-1]}",
            is_guessed=is_guessed,
        )
    return None


def taken_down_rank(text: str, *, log_rank: int | None = None) -> int | None:
    """Return the rank of a line in which NCCL's watchdog ends its process after a time-out; None otherwise.

    Args:
        log_rank: the rank that wrote the line, if torch's own prefix names it.
    """
    at = max(map(text.find, _TAKEN_DOWN))
    return None if at < 0 else _rank_before(text, at, log_rank)


def waits(
    at: Mapping[int, Collective],
    *,
    seen: Collection[int],
    taken_down: Collection[int] = (),
    failed: Collection[int] = (),
) -> Iterator[str]:
    """Yield sentences on where ranks wait for which others.

    Args:
        at: by rank, the collective in which it waits.
        seen: ranks that have a log of their own, or another failure.
        taken_down: ranks that waited too, where the log does not say in which collective.
        failed: ranks with another failure than a time-out.
    """
    if not at:
        return
    found = mismatch_in(at)
    if found is not None:
        yield found.sentence
    for apart in out_of_step(at):
        yield apart.sentence
    groups = _by(at, lambda call: call.group or "")
    if any(_DEFAULT_GROUP.match(group) is None for group in groups):  # not each rank belongs to it
        return
    last = max(at.values(), key=lambda call: call.number)
    here = _ranks_words(rank for rank in at if at[rank].number == last.number)
    where = f"{here} waited in collective number {last.number}, {last.operation}"
    if ended := sorted(set(failed) - set(at) - set(taken_down)):
        yield f"{_ranks_words(ended)} reported another failure and no time-out, while {where}: look there"
    if silent := sorted(set(seen) - set(at) - set(taken_down) - set(failed)):
        yield f"{_ranks_words(silent)} reported no time-out, while {where}: look there first"
    told = {*at, *seen, *taken_down, *failed}
    if absent := sorted(set(range(max(told))) - told):
        yield (
            f"the log has no failure of {_ranks_words(absent)}, nor of any rank above {max(told)}: "
            "only their own logs tell where they were"
        )


def in_their_groups(at: Mapping[int, Collective]) -> dict[int, Collective]:
    """Return the collectives with the process group of those whose log does not name it.

    NCCL's watchdog names the group on a line of its own, which not every rank comes to print.

    Args:
        at: by rank, the collective in which it waits.
    """
    named = [call for call in at.values() if call.group is not None]
    of_all = {call.group for call in named if _DEFAULT_GROUP.match(call.group or "")}
    found = dict(at)
    for rank, own in at.items():
        if own.group is None:
            same = {call.group for call in named if (call.number, call.words) == (own.number, own.words)}
            # Groups count for themselves: two that are at the same large number are most likely one.
            near = {call.group for call in named if call.number == own.number}
            groups = same or of_all or near
            if len(groups) == 1:
                is_guessed = not same and not of_all
                found[rank] = replace(own, group=next(iter(groups)), is_group_guessed=is_guessed)
    return found


def out_of_step(at: Mapping[int, Collective]) -> Iterator[OutOfStep]:
    """Yield the ranks of each collective in which fewer of a process group wait than in that of most.

    Args:
        at: by rank, the collective in which it waits.
    """
    for of_group in _by(at, lambda call: call.group or "").values():
        places = _by({rank: at[rank] for rank in of_group}, lambda call: call.number)
        counted = Counter({number: len(ranks) for number, ranks in places.items()})
        usual = max(counted, key=lambda number: (counted[number], number))
        for number, ranks in sorted(places.items()):
            if number != usual:
                own, most = at[ranks[0]], at[places[usual][0]]
                yield OutOfStep(
                    ranks=tuple(ranks),
                    is_behind=number < usual,
                    sentence=f"{_ranks_words(ranks)} waited in collective number {number}, {own.operation}, "
                    f"{'behind' if number < usual else 'ahead of'} {_ranks_words(places[usual])} in number "
                    f"{usual}, {most.operation}",
                )


def _by(at: Mapping[int, Collective], key: Callable[[Collective], _Key]) -> dict[_Key, list[int]]:
    """Return the ranks by what `key` returns for their collectives."""
    found: defaultdict[_Key, list[int]] = defaultdict(list)
    for rank in sorted(at):
        found[key(at[rank])].append(rank)
    return dict(found)


def _ranks_words(ranks: Iterable[int]) -> str:
    """Return ranks in words: rank 7; ranks 0-2, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    is_single = len(runs) == 1 and len(runs[0]) == 1
    words = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if is_single else 's'} {', '.join(words)}"
