"""One rank's side of the meetings: come, wait, ask where the others stand, answer, tell the end."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from zerofit.generation.ranks.errors import Absence, not_on_all_ranks, store_has_gone

if TYPE_CHECKING:
    from collections.abc import Callable


_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02
"""Between two looks at the store: short at first, as ranks mostly come together. ASSUMPTION: below what a
call of generate takes."""
_ANSWERS_WITHIN_S = 4.0
"""Ranks look for questions every second (zerofit/generation/ranks/meeting.py). ASSUMPTION: a rank whose libraries
do not let other threads run for longer than this is stuck in them."""
_LEFT_TO_ANOTHER_S = 20.0
"""How long a rank leaves the error to another that raised it first. ASSUMPTION: torchrun looks every 0.1 s
whether a rank has failed, and then ends the others; this is much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Where a rank stands."""

    question: int
    """The newest question that it has seen."""
    place: str
    meeting: str | None
    """The meeting in which it waits."""


class RankMeetings:
    """One rank's meetings with all others.

    Args:
        board: where the ranks write.
        place: says where this rank's script stands.
        answers_within_s: how long to wait for where the others stand.
        left_to_another_s: how long to leave an error to another rank that has raised it first.
    """

    def __init__(
        self,
        board: Board,
        *,
        place: Callable[[], str],
        answers_within_s: float = _ANSWERS_WITHIN_S,
        left_to_another_s: float = _LEFT_TO_ANOTHER_S,
    ) -> None:
        self._board = board
        self._answers_within_s = answers_within_s
        self._left_to_another_s = left_to_another_s
        self._place = place
        self._numbers: Counter[str] = Counter()
        self._meeting: str | None = None
        self._answered = 0

    @property
    def have_met(self) -> bool:
        """Whether all ranks have come to a call, so that this is so on each of them."""
        return self._numbers.total() > 0

    def meet(self, name: str, *, line: str, limit_s: float) -> None:
        """Wait until all ranks have come to this call.

        Raises:
            UserError: a rank has not come in this time, or has ended its script.
        """
        number = self._numbers[name] + 1
        wanted = number * self._board.world_size  # the count of all calls of this name on all ranks
        self._meeting = f"{name} {number}"
        try:
            came = self._board.add(name, 1) >= wanted or self._all_come(name, wanted, limit_s=limit_s)
            if not came:
                self._leave(name, wanted, line=line, limit_s=limit_s)
            self._numbers[name] = number
        except RuntimeError as gone:  # every error of torch's stores
            raise store_has_gone(name, line=line) from gone
        finally:
            self._meeting = None

    def _all_come(self, name: str, wanted: int, *, limit_s: float) -> bool:
        """Wait, and return whether all have come; not, as soon as one has ended its script."""
        until = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while self._board.count(name) < wanted:
            if time.monotonic() >= until or self._ended():
                return self._board.count(name) >= wanted  # it may have come before it ended
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _leave(self, name: str, wanted: int, *, line: str, limit_s: float) -> None:
        """Take this call back and raise; return where the missing ranks came after all."""
        absence = self._absence(name, line=line, limit_s=limit_s)
        if self._board.add(name, -1) + 1 >= wanted:
            self._board.add(name, 1)
            return
        if self._board.add(f"told {self._meeting}", 1) > 1:
            time.sleep(self._left_to_another_s)  # one rank's message is enough: it ends this one too
        raise not_on_all_ranks(absence)

    def _absence(self, name: str, *, line: str, limit_s: float) -> Absence:
        ended = self._ended()
        answers = self._ask(frozenset(range(self._board.world_size)) - {self._board.rank, *ended})
        came = {rank for rank, answer in answers.items() if answer.meeting == self._meeting}
        places: dict[int, str | None] = {
            rank: answers[rank].place if rank in answers else None
            for rank in range(self._board.world_size)
            if rank not in came and rank not in ended and rank != self._board.rank
        }
        return Absence(
            name=name,
            line=line,
            came=tuple(sorted({self._board.rank, *came})),
            ended=tuple(sorted(ended)),
            places=places,
            limit_s=limit_s,
        )

    def _ask(self, ranks: frozenset[int]) -> dict[int, _Answer]:
        """Return where ranks stand, those that answer."""
        question = self._board.add("question", 1)
        until = time.monotonic() + self._answers_within_s
        answers: dict[int, _Answer] = {}
        while (silent := ranks - answers.keys()) and time.monotonic() < until:
            time.sleep(_LONGEST_PAUSE_S)
            for rank in silent:
                text = self._board.read(f"answer {rank}")
                answer = _Answer(**json.loads(text)) if text else None
                if answer is not None and answer.question >= question:
                    answers[rank] = answer
        return answers

    def answer(self) -> None:
        """Say where this rank stands, if a rank has asked since the last time."""
        question = self._board.count("question")
        if question > self._answered:
            self._answered = question
            answer = _Answer(question=question, place=self._place(), meeting=self._meeting)
            self._board.put(f"answer {self._board.rank}", json.dumps(asdict(answer)))

    def tell_ended(self, exit_code: int) -> None:
        """Tell the others that this rank's script has ended.

        One that has failed is no reason to raise: its launcher ends the others, and its own error is the one
        to be read.
        """
        if exit_code != 0:
            return
        self._board.put(f"ended {self._board.rank}", "yes")
        self._board.add("ended", 1)

    def _ended(self) -> frozenset[int]:
        if self._board.count("ended") == 0:
            return frozenset()
        ranks = range(self._board.world_size)
        return frozenset(rank for rank in ranks if self._board.read(f"ended {rank}") is not None)


_PREFIX = "zerofit-meetings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The store, as far as it is ours. No method waits for what another rank has not written yet."""

    store: Any
    """Of torch.distributed; a connection of its own, so that nothing waits for what others do with theirs."""
    rank: int
    world_size: int
    source: object = None
    """The process group's own store."""

    def add(self, name: str, amount: int) -> int:
        """Add to a number that begins at 0, and return what it is then."""
        return int(self.store.add(name, amount))

    def count(self, name: str) -> int:
        """Return a number."""
        return self.add(name, 0)

    def put(self, name: str, text: str) -> None:
        """Write a text in place of the one before."""
        self.store.set(name, text)

    def read(self, name: str) -> str | None:
        """Return a text, or None where there is none yet."""
        if not self.store.check([name]):
            return None
        text: bytes = self.store.get(name)
        return text.decode("utf-8")


def open_board(before: Board | None, *, number: int = 0) -> Board | None:
    """Return the board of the process group that there is; None without one, or with one rank.

    Args:
        before: what this function has returned last, which stays while the process group does, and after it.
        number: of this process group: process groups may share a store, on which an earlier one's keys stay.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    # A thread asks too, while the script may be importing torch, or destroying its process group.
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return before
    try:
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        backend = distributed.get_backend()
        source = distributed.distributed_c10d._get_default_store()
    except ValueError:  # it has gone meanwhile
        return before
    if world_size == 1 or backend == "fake":  # ranks of the fake one are alone
        return None
    if before is not None and before.source is source:
        return before
    own = source.clone() if hasattr(source, "clone") else source  # older versions of torch have none
    store = distributed.PrefixStore(f"{_PREFIX}-{number}", own)
    return Board(store=store, rank=rank, world_size=world_size, source=source)
