"""The ranks that generate: what they tell one another, errors that all raise, waiting without NCCL."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zerofit.errors import UserError

T = TypeVar("T")

_ITEMS_AT_A_TIME = 1024
"""ASSUMPTION: so many prompts or results a rank are at most some megabytes, which NCCL needs on the GPU."""
_LOOKS_EVERY_S = 0.05
_SAYS_EVERY_S = 1.0
"""How often a rank says that it goes on: far more often than the shortest sensible limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that generate together: all of torch.distributed's world."""

    rank: int
    size: int

    @property
    def are_many(self) -> bool:
        """Whether there is another rank."""
        return self.size > 1

    def share(self, value: T) -> list[T]:
        """Return each rank's value, on every rank; all of them call this."""
        if not self.are_many:
            return [value]
        from torch.distributed import all_gather_object

        values: list[Any] = [None] * self.size
        all_gather_object(values, value)
        return values

    def share_all(self, values: Sequence[T]) -> list[list[T]]:
        """Return each rank's values, a limited number at a time; all ranks call this."""
        if not self.are_many:
            return [list(values)]
        longest = max(self.share(len(values)))
        gathered: list[list[T]] = [[] for _ in range(self.size)]
        for begin in range(0, longest, _ITEMS_AT_A_TIME):
            pieces = self.share(list(values[begin : begin + _ITEMS_AT_A_TIME]))
            for mine, piece in zip(gathered, pieces, strict=True):
                mine += piece
        return gathered

    def agreed(self, work: Callable[[], T]) -> T:
        """Return what this rank's work gives, or raise on every rank where that of one fails.

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
        told = self.share(_told(error))
        if error is not None:
            raise error
        for rank, each in enumerate(told):
            if each is not None:
                raise _raised_by(rank, each)
        return result


def all_ranks() -> Ranks:
    """Return this process among the ranks of torch.distributed; alone where that is not set up."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return Ranks(rank=0, size=1)
    return Ranks(rank=distributed.get_rank(), size=distributed.get_world_size())


class Progress:
    """How far each rank is, in the store of torch.distributed: waiting here has no NCCL time-out.

    Args:
        ranks: all of them.
        name: the same on every rank, and new.
        limit_s: how long a rank may be silent before the others give it up; 0 never does.
    """

    def __init__(self, ranks: Ranks, *, name: str, limit_s: float) -> None:
        self._ranks = ranks
        self._prefix = f"zerofit/generate/{name}"
        self._limit_s = limit_s if limit_s > 0 else math.inf
        self._said_at = 0.0
        self._count = 0

    def go_on(self) -> None:
        """Say that this rank goes on; cheap enough for every token."""
        if self._ranks.are_many and time.monotonic() - self._said_at > _SAYS_EVERY_S:
            self._said_at = time.monotonic()
            self._count += 1
            _store().set(self._key("goes-on", self._ranks.rank), str(self._count))

    def fail(self, error: BaseException) -> None:
        """Say that this rank generates no more."""
        if self._ranks.are_many:
            _store().set(self._key("failed", self._ranks.rank), f"{type(error).__name__}: {error}")

    def wait_for_all(self, name: str) -> None:
        """Return when every rank has come here.

        Args:
            name: of this place, the same on every rank.

        Raises:
            UserError: a rank has failed, or has been silent for longer than the limit.
        """
        if not self._ranks.are_many:
            return
        store = _store()
        store.set(self._key(name, self._ranks.rank), "1")
        for rank in range(self._ranks.size):
            heard, heard_at = b"", time.monotonic()
            while not store.check([self._key(name, rank)]):
                if store.check([self._key("failed", rank)]):
                    raise _failed(rank, store.get(self._key("failed", rank)).decode())
                said = self._last_said(store, rank)
                if said != heard:
                    heard, heard_at = said, time.monotonic()
                elif time.monotonic() - heard_at > self._limit_s:
                    raise _silent(rank, self._limit_s)
                time.sleep(_LOOKS_EVERY_S)

    def _last_said(self, store: Any, rank: int) -> bytes:
        key = self._key("goes-on", rank)
        return bytes(store.get(key)) if store.check([key]) else b""

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _told(error: Exception | None) -> dict[str, Any] | None:
    """Return what the other ranks get of an error."""
    if error is None:
        return None
    if isinstance(error, UserError):
        names = ("rule", "summary", "found", "why", "fix", "see", "exit_code")
        return {name: getattr(error, name) for name in names}
    return {"text": f"{type(error).__name__}: {error}"}


def _raised_by(rank: int, told: dict[str, Any]) -> UserError:
    if "text" in told:
        return _failed(rank, told["text"])
    found = f"{told.pop('found')} (on rank {rank})"
    return UserError(told.pop("rule"), told.pop("summary"), found=found, **told)


def _failed(rank: int, text: str) -> UserError:
    return UserError(
        "generate-failed-on-a-rank",
        f"rank {rank} failed, so that the results are not complete",
        found=text,
        why="every rank generates a part of them",
        fix=f"see the message of rank {rank}",
        exit_code=1,
    )


def _silent(rank: int, limit_s: float) -> UserError:
    return UserError(
        "generate-rank-silent",
        f"rank {rank} has not made a token for {limit_s:g} s",
        found=f"rank {rank} neither ended its share nor failed",
        why="it hangs, or was killed without its launcher ending the others",
        fix="see what became of it; where one token may take that long, pass a larger limit_s",
        exit_code=1,
    )
