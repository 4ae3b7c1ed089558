"""This process among all ranks: values that all exchange, errors raised on all, waiting without NCCL."""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from zerofit.core.errors import UserError
from zerofit.core.units import MIB

T = TypeVar("T")

_BYTES_AT_A_TIME = 64 * MIB
"""Of all ranks together, on each of them; NCCL needs it on the GPU. ASSUMPTION: small compared with a GPU."""
_LEAST_BYTES = MIB // 16
"""Minimum per rank. ASSUMPTION: large compared with a collective's overhead."""
_ALL_FINISHED = "all"
_LOOKS_EVERY_S = 0.05
_LOOKS_AFTER_A_PART = 0.02
"""Fraction of the time waited so far, so that many ranks don't keep the store busy."""
_REPORTS_EVERY_S = 1.0
"""How often a rank reports new tokens: far more often than the shortest sensible limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that generate together: all ranks of torch.distributed."""

    rank: int
    size: int

    @property
    def are_many(self) -> bool:
        """True if there are other ranks."""
        return self.size > 1

    def share(self, value: T) -> list[T]:
        """Return each rank's value, on every rank; a collective call."""
        if not self.are_many:
            return [value]
        from torch.distributed import all_gather_object

        values: list[Any] = [None] * self.size
        all_gather_object(values, value)
        return values

    def share_all(self, values: Sequence[T]) -> list[list[T]]:
        """Return each rank's values, a limited number of bytes at a time; a collective call."""
        if not self.are_many:
            return [list(values)]
        mine = pickle.dumps(list(values))
        longest = max(self.share(len(mine)))
        piece = max(_LEAST_BYTES, _BYTES_AT_A_TIME // self.size)
        gathered = [bytearray() for _ in range(self.size)]
        for begin in range(0, longest, piece):
            for whole, part in zip(gathered, self.share(mine[begin : begin + piece]), strict=True):
                whole += part
        return [pickle.loads(whole) for whole in gathered]

    def agreed(self, work: Callable[[], T]) -> T:
        """Return the result of this rank's work; raise on every rank if it fails on one.

        Args:
            work: without collectives; all ranks call this.

        Raises:
            UserError: this rank's own, or that of the first rank that has one.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        for rank, each in enumerate(self.share(_message_of(error))):
            if each is not None:
                raised_here = error or _raised_by(rank, each)
                if isinstance(raised_here, UserError):
                    raised_here.is_on_every_rank = True
                raise raised_here
        return result


def all_ranks() -> Ranks:
    """Return this process among the ranks of torch.distributed; alone if that is not initialized."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return Ranks(rank=0, size=1)
    return Ranks(rank=distributed.get_rank(), size=distributed.get_world_size())


def say(line: str) -> None:
    """Print a line on stderr, on rank 0 only."""
    if all_ranks().rank == 0:
        print(f"zerofit: {line}", file=sys.stderr, flush=True)


class Progress:
    """The end of each rank's share, in torch.distributed's store: waiting here has no NCCL timeout.

    Args:
        name: equal on every rank, and not used before.
        limit_s: how long all ranks may make no token before unfinished ones are given up; 0 is never.
    """

    def __init__(self, ranks: Ranks, *, name: str, limit_s: float) -> None:
        from torch.distributed import HashStore, PrefixStore

        self._ranks = ranks
        self._store = PrefixStore(
            f"zerofit/generate/{name}", all_ranks_store() if ranks.are_many else HashStore()
        )
        self._ended = [f"ended/{rank}" for rank in range(ranks.size)]
        self._limit_s = limit_s if limit_s > 0 else math.inf
        self._reported_at = 0.0

    def on_token(self) -> None:
        """Report that this rank is still generating; cheap enough for every token."""
        if time.monotonic() - self._reported_at > _REPORTS_EVERY_S:
            self._reported_at = time.monotonic()
            self._store.add("tokens", 1)

    def fail(self, error: BaseException) -> None:
        """Report that this rank has failed."""
        with suppress(RuntimeError):  # the store is gone with rank 0; the error matters more
            self._decide(self._failure(error))

    def wait_for_all(self) -> None:
        """Return when every rank has finished its share.

        Raises:
            UserError: a rank has failed, or none has made a token for longer than the limit.
        """
        self._store.set(self._ended[self._ranks.rank], "1")
        begin = heard_at = time.monotonic()
        heard = -1
        while not self._store.check(self._ended) and not self._store.check(["verdict"]):
            now, num_reports = time.monotonic(), self._store.add("tokens", 0)
            if num_reports != heard:
                heard, heard_at = num_reports, now
            elif now - heard_at > self._limit_s:
                silent = (rank for rank, ended in enumerate(self._ended) if not self._store.check([ended]))
                self._give_up(next(silent, self._ranks.rank))
                break
            time.sleep(min(max(_LOOKS_EVERY_S, _LOOKS_AFTER_A_PART * (now - begin)), 1.0))
        verdict = self._decide(_ALL_FINISHED)
        if verdict != _ALL_FINISHED:
            raise _failed(*verdict.split(" ", 1))

    def end(self) -> None:
        """Remove this rank's keys from the store, after wait_for_all() has returned on all ranks."""
        self._store.delete_key(self._ended[self._ranks.rank])
        if self._ranks.rank == 0:
            self._store.delete_key("verdict")
            self._store.delete_key("tokens")

    def _give_up(self, rank: int) -> None:
        """Raise the error for a silent rank, unless another rank has decided otherwise meanwhile."""
        error = _silent(rank, self._limit_s)
        failure = self._failure(error)
        if self._decide(failure) == failure:
            raise error

    def _decide(self, verdict: str) -> str:
        """Return the decision that holds for all ranks: the first one made."""
        return str(self._store.compare_set("verdict", "", verdict).decode())

    def _failure(self, error: BaseException) -> str:
        text = error.summary if isinstance(error, UserError) else error
        return f"{self._ranks.rank} {type(error).__name__}: {text}"


def all_ranks_store() -> Any:
    """Return the store of torch.distributed's rendezvous."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _message_of(error: Exception | None) -> dict[str, Any] | None:
    """Return an error as sent to the other ranks."""
    if isinstance(error, UserError):
        names = ("rule", "summary", "found", "why", "fix", "see", "exit_code")
        return {name: getattr(error, name) for name in names}
    return None if error is None else {"text": f"{type(error).__name__}: {error}"}


def _raised_by(rank: int, message: dict[str, Any]) -> UserError:
    if "text" in message:
        return _failed(rank, message["text"])
    return UserError(**{**message, "found": f"{message['found']} (on rank {rank})"})


def _failed(rank: int | str, text: str) -> UserError:
    return UserError(
        "generate-failed-on-a-rank",
        f"rank {rank} failed, so the results are incomplete",
        found=text,
        why="every rank generates a part of them",
        fix=f"see the message of rank {rank}",
        exit_code=1,
    )


def _silent(rank: int, limit_s: float) -> UserError:
    return UserError(
        "generate-rank-silent",
        f"rank {rank} has not made a token for {limit_s:g} s",
        found=f"rank {rank} neither finished its share nor failed",
        why="it hangs, or was killed without its launcher ending the others",
        fix="check its state; if a token can take that long, pass a larger limit_s",
        exit_code=1,
    )
