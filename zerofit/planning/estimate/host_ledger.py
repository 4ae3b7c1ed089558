"""HostLedger: the blocks of host memory that a rank allocates and frees, phase by phase."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder, RunPhase

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUNDING = "pinned rounding"
"""Term for what PyTorch's pinned allocator holds beyond the requested bytes."""
CHECKPOINT = "checkpoint"
"""Term for the pages of mapped files, which the kernel reclaims under memory pressure."""
_UNPINNED = {CHECKPOINT: Holder.MAPPED}
"""Terms that are not pageable memory, where they are not pinned."""


class HostLedger:
    """Allocated blocks; pinned ones are rounded up to a power of two and cached when they are freed.

    Source of both: torch 2.13, aten/src/ATen/core/CachingHostAllocator.h, allocate and free.
    """

    def __init__(self) -> None:
        self._largest: dict[RunPhase, Mapping[tuple[str, Holder], int]] = {}
        self._phase: RunPhase | None = None
        self._live: Counter[tuple[str, Holder]] = Counter()
        self._total = 0
        self._peaks: dict[RunPhase, tuple[int, int]] = {}
        """By phase, the bytes at its peak: without those of mapped files, and with them."""
        self._is_at_peak = False
        """True if what lives now is the phase's peak, of which there is no copy yet."""
        self._blocks: list[tuple[tuple[str, Holder], int]] = []
        self._idle: Counter[int] = Counter()  # cached pinned blocks, by size

    @property
    def largest(self) -> Mapping[RunPhase, Mapping[tuple[str, Holder], int]]:
        """By phase, bytes by term and holder at its peak, in which mapped files do not count."""
        self._keep()
        return self._largest

    def begin(self, phase: RunPhase) -> None:
        """Begin a phase; it may come more than once."""
        self._keep()
        self._phase = phase
        self._compare()

    def take(self, num_bytes: int, term: str, *, is_pinned: bool = False) -> int:
        """Allocate a block and return its number."""
        key = term, Holder.PINNED if is_pinned else _UNPINNED.get(term, Holder.PAGEABLE)
        if is_pinned and num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            if self._idle[size]:
                self._idle[size] -= 1
                self._live[ROUNDING, Holder.PINNED] -= num_bytes
                self._total -= num_bytes
            else:
                self._live[ROUNDING, Holder.PINNED] += size - num_bytes
                self._total += size - num_bytes
        self._live[key] += num_bytes
        self._total += num_bytes
        self._blocks.append((key, num_bytes))
        self._compare()
        return len(self._blocks) - 1

    def drop(self, block: int) -> None:
        """Free a block."""
        self._keep()
        key, num_bytes = self._blocks[block]
        self._live[key] -= num_bytes
        self._total -= num_bytes
        if key[1] is Holder.PINNED and num_bytes:
            self._idle[1 << (num_bytes - 1).bit_length()] += 1
            self._live[ROUNDING, Holder.PINNED] += num_bytes
            self._total += num_bytes

    def scratch(self, num_bytes: int, term: str) -> None:
        """Allocate a pageable block and free it at once."""
        self.drop(self.take(num_bytes, term))

    def pin(self, num_bytes: int, term: str, *, pins: bool) -> int:
        """Allocate a pageable block and, if pins, copy it into a pinned one."""
        pageable = self.take(num_bytes, term)
        if not pins:
            return pageable
        pinned = self.take(num_bytes, term, is_pinned=True)
        self.drop(pageable)
        return pinned

    def _compare(self) -> None:
        phase = self._phase
        if phase is None:
            return
        size = self._total - self._live.get((CHECKPOINT, Holder.MAPPED), 0), self._total
        self._is_at_peak = size >= self._peaks.get(phase, (0, 0))
        if self._is_at_peak:
            self._peaks[phase] = size

    def _keep(self) -> None:
        """Copy what lives at the phase's peak, before it changes."""
        if self._is_at_peak and self._phase is not None:
            self._largest[self._phase] = dict(self._live)
            self._is_at_peak = False
