"""What the ranks write up for each other on their process group's store: no collective, no rank waits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

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
