"""Ranks meet before a call that all of them must make: a rank that comes alone gets an error, not a hang.

The ranks count their calls on the process group's store, without collectives, so that nothing depends on
whether NCCL or gloo still respond. A small thread in each rank reports its script's position when another
rank waits in vain.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.ranks.script_line import is_handled_by_main_thread, main_thread_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_ANSWER_EVERY_S = 1.0
"""How often a rank checks whether another asks for its position. ASSUMPTION: negligible load on the store,
and short compared with any limit."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
"""Between two reads of the store: short at first, since ranks mostly arrive together. ASSUMPTION: below the
time of a generate call."""
_ANSWERS_WITHIN_S = 4.0
"""ASSUMPTION: a rank whose libraries block other threads for longer than this is stuck in them."""
_LEFT_TO_ANOTHER_S = 20.0
"""How long a rank leaves the error to another that raised it first. ASSUMPTION: torchrun checks every 0.1 s
whether a rank has failed, and then ends the others; this is much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Texts for the error of a call that only some ranks have made."""

    rule: str = "generate-not-on-all-ranks"
    why: str
    fix: str
    see: str | None = None


_MODELS = "model.generate"
_ADVICE = {
    "zerofit.generate": Advice(
        why="all ranks share the work and the results",
        fix="call it equally often on all ranks, with per_rank=True and an empty list on ranks without "
        "prompts; if ranks are only slow, raise limit_s=",
    ),
    _MODELS: Advice(
        why="each rank holds a part of the weights and must take part in every forward pass",
        fix="call it equally often on all ranks, or zerofit.generate(), which takes any number of prompts on "
        "each; if ranks are only slow, raise --generate-limit SECONDS of zerofit launch",
        see="https://huggingface.co/docs/transformers/main_classes/deepspeed",
    ),
}
"""By the name of the call; other names are methods of a model."""

_arranged: ContextVar[bool] = ContextVar("zerofit_generation_arranged", default=False)


def meet(
    name: str,
    *,
    line: str,
    limit_s: float,
    ranks: Sequence[int] | None = None,
    advice: Advice | None = None,
) -> None:
    """Wait until all ranks have reached this call; return at once if there are no other ranks.

    Calls are counted by name. A call that ends with the error is not counted, so that a script that catches
    the error may try again.

    Args:
        limit_s: how long to wait for the other ranks, from now; 0 neither waits nor watches.
        ranks: those that must call it together, including this one; None for all.
        advice: for the error; None for that of generation.

    Raises:
        UserError: a rank has not come in this time, or has ended its script.
    """
    if limit_s <= 0:
        return
    watch()
    _this_rank.meet(name, line=line, limit_s=limit_s, ranks=ranks, advice=advice)


def watch() -> None:
    """Let this rank report its script's position, as soon as there is a process group."""
    _this_rank.watch()


def end_when_stuck(leave: Callable[[UserError], None]) -> None:
    """End this process if its script does not end after the error.

    On its way out, in a `finally` or in the `except` that catches the error, a script may wait for the other
    ranks again, forever. It gets the same time limit as the ranks had.

    Args:
        leave: prints the error, and ends the process from another thread than the script's.
    """
    _this_rank.leave = leave


def tell_ended(exit_code: int) -> None:
    """Tell the other ranks that this one's script has ended, so that they don't wait for it."""
    _this_rank.tell_ended(exit_code)


@contextmanager
def arranged() -> Iterator[None]:
    """Exempt the model.generate calls inside: the ranks have agreed on them."""
    token = _arranged.set(True)
    try:
        yield
    finally:
        _arranged.reset(token)


def is_arranged() -> bool:
    """Return True if the ranks have agreed on the model.generate calls made now."""
    return _arranged.get()


class RankMeetings:
    """One rank's meetings with all others. No method waits for a key that another rank has not written yet.

    Args:
        store: of torch.distributed; a separate connection, which does not block on other uses of the store.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        place: Callable[[], str] = main_thread_line,
        answers_within_s: float = _ANSWERS_WITHIN_S,
        left_to_another_s: float = _LEFT_TO_ANOTHER_S,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._place = place
        self._answers_within_s = answers_within_s
        self._left_to_another_s = left_to_another_s
        self._numbers: Counter[str] = Counter()
        self._meeting: str | None = None
        self._answered = 0

    @property
    def have_met(self) -> bool:
        """True if all ranks have met in a call; equal on all ranks."""
        return self._numbers.total() > 0

    def meet(
        self,
        name: str,
        *,
        line: str,
        limit_s: float,
        ranks: Sequence[int] | None = None,
        advice: Advice | None = None,
    ) -> None:
        """Wait until all ranks, or all of the given ones, have reached this call."""
        advice = advice or _ADVICE.get(name, _ADVICE[_MODELS])
        wanted_ranks = range(self._world_size) if ranks is None else ranks
        counted = name if ranks is None else f"{name} on {_name_ranks(ranks)}"
        number = self._numbers[counted] + 1
        wanted = number * len(wanted_ranks)  # the number of calls of this name on these ranks
        self._meeting = f"{counted} {number}"
        try:
            came = self._store.add(counted, 1) >= wanted or self._all_come(
                counted, wanted, wanted_ranks, limit_s=limit_s
            )
            if not came:
                error = self._not_on_all_ranks(name, wanted_ranks, advice, line=line, limit_s=limit_s)
                self._leave(counted, wanted, error)
            self._numbers[counted] = number
        except RuntimeError as gone:  # every error of torch's stores
            raise UserError(
                advice.rule,
                f"the other ranks have gone before {name}()",
                found=f"{line}, where the ranks' store (TCPStore) does not respond",
                why="rank 0 or the launcher on the first node keeps the store, and has ended",
                fix="look for the error of the rank that ended first in its log",
            ) from gone
        finally:
            self._meeting = None

    def answer(self) -> None:
        """Write this rank's position in the script to the store, if a rank has asked since."""
        question = self._count("question")
        if question > self._answered:
            self._answered = question
            self._store.set(f"answer {self._rank}", json.dumps([question, self._place(), self._meeting]))

    def tell_ended(self, exit_code: int) -> None:
        """Tell the others that this rank's script has ended.

        Not for a failed script: its launcher ends the others, and its own error is the one to read.
        """
        if exit_code == 0:
            self._store.set(f"ended {self._rank}", "yes")
            self._store.add("ended", 1)

    def _count(self, name: str) -> int:
        return int(self._store.add(name, 0))

    def _all_come(self, name: str, wanted: int, ranks: Sequence[int], *, limit_s: float) -> bool:
        """Wait; True when all have arrived, False as soon as one has ended its script."""
        until = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while self._count(name) < wanted:
            if time.monotonic() >= until or self._ended(ranks):
                return self._count(name) >= wanted  # it may have arrived before it ended
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _leave(self, name: str, wanted: int, error: UserError) -> None:
        """Withdraw this call and raise; return if the missing ranks have arrived after all."""
        if self._store.add(name, -1) + 1 >= wanted:
            self._store.add(name, 1)
            return
        if self._store.add(f"told {self._meeting}", 1) > 1:
            time.sleep(self._left_to_another_s)  # one rank's message is enough: it ends this one too
        raise error

    def _not_on_all_ranks(
        self, name: str, ranks: Sequence[int], advice: Advice, *, line: str, limit_s: float
    ) -> UserError:
        """Return the error for a call that only some ranks have made, with the positions of the others."""
        ended = self._ended(ranks)
        others = [rank for rank in ranks if rank not in {self._rank, *ended}]
        answers = self._ask(others)
        came = sorted({self._rank, *(rank for rank in answers if answers[rank][1] == self._meeting)})
        places = {rank: answers[rank][0] if rank in answers else None for rank in others if rank not in came}
        which = f"{_name_ranks(came)} alone" if len(came) == 1 else _name_ranks(came)
        return UserError(
            advice.rule,
            f"{name}() was not called on all ranks",
            found=f"{line} on {which}; {'; '.join(_describe_places(ended, places))}",
            why=advice.why if ended else f"{advice.why}; {_name_ranks(came)} waited {limit_s:g} s",
            fix=advice.fix,
            see=advice.see,
        )

    def _ask(self, ranks: Iterable[int]) -> dict[int, tuple[str, str | None]]:
        """Return the position of each rank that answers, and the call it waits in."""
        question = self._store.add("question", 1)
        until = time.monotonic() + self._answers_within_s
        silent = set(ranks)
        answers: dict[int, tuple[str, str | None]] = {}
        while silent and time.monotonic() < until:
            time.sleep(_LONGEST_PAUSE_S)
            for rank in sorted(silent):
                key = f"answer {rank}"
                if not self._store.check([key]):
                    continue
                answered, place, meeting = json.loads(self._store.get(key))
                if answered >= question:
                    answers[rank] = place, meeting
                    silent.remove(rank)
        return answers

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        if self._count("ended") == 0:
            return []
        return [rank for rank in ranks if self._store.check([f"ended {rank}"])]


class _ThisRank:
    """This process's meetings, and the thread that answers for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._source: Any = None
        """The store of the process group in which this rank meets the others."""
        self._meetings: RankMeetings | None = None
        self._num_earlier = 0  # process groups in which the ranks have met: the same number on each rank
        self._raised: UserError | None = None
        self._ends_at = math.inf
        self.leave: Callable[[UserError], None] | None = None

    def meet(self, name: str, **call: Any) -> None:
        self._raised = None  # the script has caught it, and continues
        meetings = self._opened()
        if meetings is None:
            return
        try:
            meetings.meet(name, **call)
        except UserError as error:
            self._raised, self._ends_at = error, time.monotonic() + call["limit_s"]
            raise

    def _opened(self) -> RankMeetings | None:
        """Return the meetings in the current or last process group; None without other ranks."""
        with self._lock:
            group = _process_group()
            if group is None or group[0] is self._source:
                return self._meetings
            self._num_earlier += self._meetings is not None and self._meetings.have_met
            self._source, rank, world_size = group
            if world_size == 1:
                self._meetings = None
            else:
                store = _own_store(self._source, number=self._num_earlier)
                self._meetings = RankMeetings(store, rank=rank, world_size=world_size)
            return self._meetings

    def watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="zerofit-meetings", daemon=True)
            self._thread.start()
            # Not left to the interpreter's exit: a thread in torch's C++ code then aborts the process.
            atexit.register(self._end_thread)

    def tell_ended(self, exit_code: int) -> None:
        with contextlib.suppress(RuntimeError):  # every error of torch's stores: the others have gone already
            meetings = self._opened() if self._thread is not None else None
            if meetings is not None:
                meetings.tell_ended(exit_code)

    def _look(self) -> None:
        has_store = True
        while not self._stop.wait(_ANSWER_EVERY_S):
            error = self._raised
            if (
                error
                and self.leave
                and time.monotonic() >= self._ends_at
                and is_handled_by_main_thread(error)
            ):
                self.leave(error)
            try:
                meetings = self._opened() if has_store else None
                if meetings is not None:
                    meetings.answer()
            except RuntimeError:  # it is gone, with rank 0 or with the launcher
                has_store = False

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=_ANSWER_EVERY_S)


_this_rank = _ThisRank()


def _process_group() -> tuple[Any, int, int] | None:
    """Return the default process group's store, this rank and the number of ranks; None without one."""
    distributed: Any = sys.modules.get("torch.distributed")
    # A thread calls this too, while the script may be importing torch, or destroying its process group.
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
        are_alone = distributed.get_backend() == "fake"
        return store, distributed.get_rank(), 1 if are_alone else distributed.get_world_size()
    except ValueError:  # it was destroyed meanwhile
        return None


def _own_store(source: Any, *, number: int) -> Any:
    """Return a separate connection to a group's store; groups may share one, which keeps earlier keys."""
    from torch.distributed import PrefixStore

    own = source.clone() if hasattr(source, "clone") else source  # older versions of torch have none
    return PrefixStore(f"zerofit-meetings-{number}", own)


def _name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {said}"


def _describe_places(ended: list[int], places: Mapping[int, str | None]) -> Iterator[str]:
    """Yield the positions of the missing ranks, grouped."""
    if ended:
        are = "scripts of {} have" if len(ended) > 1 else "script of {} has"
        yield f"the {are.format(_name_ranks(ended))} ended"
    for place in dict.fromkeys(places.values()):
        ranks = [rank for rank in places if places[rank] == place]
        are, answer = ("are", "do") if len(ranks) > 1 else ("is", "does")
        yield (
            f"{_name_ranks(ranks)} {answer} not answer"
            if place is None
            else f"{_name_ranks(ranks)} {are} at {place}"
        )
