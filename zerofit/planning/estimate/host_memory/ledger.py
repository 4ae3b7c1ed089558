"""HostLedger: what one rank holds in host memory, block by block, and the largest moment of each phase."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.estimates import RunPhase

ROUNDING = "pinned rounding"
"""Term for what PyTorch's pinned allocator holds beyond what was asked for."""


CHECKPOINT = "checkpoint"
"""Term for the pages of mapped files, which the kernel drops where it needs them."""


class HostLedger:
    """Blocks that come and go; pinned ones are rounded up to a power of two and kept when they are let go.

    Source of both: torch 2.13, aten/src/ATen/core/CachingHostAllocator.h, allocate and free.
    """

    def __init__(self) -> None:
        self.largest: dict[RunPhase, Mapping[tuple[str, Holder], int]] = {}
        """By phase, bytes by term and holder at its largest moment, for which mapped files do not count."""
        self._phase: RunPhase | None = None
        self._live: Counter[tuple[str, Holder]] = Counter()
        self._blocks: list[tuple[tuple[str, Holder], int]] = []
        self._idle: Counter[int] = Counter()  # pinned blocks without a user, by size

    def begin(self, phase: RunPhase) -> None:
        """Note that a phase begins; it may come more than once."""
        self._phase = phase
        self._compare()

    def take(self, num_bytes: int, term: str, *, is_pinned: bool = False) -> int:
        """Note a block's birth and return its number."""
        key = term, Holder.PINNED if is_pinned else Holder.PAGEABLE
        if is_pinned and num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            if self._idle[size]:
                self._idle[size] -= 1
                self._live[ROUNDING, Holder.PINNED] -= num_bytes
            else:
                self._live[ROUNDING, Holder.PINNED] += size - num_bytes
        self._live[key] += num_bytes
        self._blocks.append((key, num_bytes))
        self._compare()
        return len(self._blocks) - 1

    def drop(self, block: int) -> None:
        """Note a block's death."""
        key, num_bytes = self._blocks[block]
        self._live[key] -= num_bytes
        if key[1] is Holder.PINNED and num_bytes:
            self._idle[1 << (num_bytes - 1).bit_length()] += 1
            self._live[ROUNDING, Holder.PINNED] += num_bytes

    def flash(self, num_bytes: int, term: str) -> None:
        """Note a pageable block that is gone as soon as it was used."""
        self.drop(self.take(num_bytes, term))

    def pin(self, num_bytes: int, term: str, *, pins: bool) -> int:
        """Note a block that is made pageable, and, if it is to be pinned, copied into a pinned one."""
        pageable = self.take(num_bytes, term)
        if not pins:
            return pageable
        pinned = self.take(num_bytes, term, is_pinned=True)
        self.drop(pageable)
        return pinned

    @property
    def num_bytes(self) -> int:
        """What is held now."""
        return self._live.total()

    def _compare(self) -> None:
        phase = self._phase
        if phase is not None and _size(self._live) >= _size(self.largest.get(phase, {})):
            self.largest[phase] = dict(self._live)


def _size(held: Mapping[tuple[str, Holder], int]) -> tuple[int, int]:
    total = sum(held.values())
    return total - held.get((CHECKPOINT, Holder.PAGEABLE), 0), total
