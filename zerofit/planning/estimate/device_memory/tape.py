"""Tape: everything that one GPU allocates and frees over a run, in order, each block under its term."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.core.estimates import RunPhase


class Tape:
    """The growing list of a run's allocations, which engines write and the allocator replays.

    Blocks are numbered by birth. ``sizes[block]`` and ``terms[block]`` say what each is; ``entries`` holds
    block + 1 for a birth and -(block + 1) for a death; ``marks`` holds (entry index, phase) where a phase
    begins, ``emptied`` the entry indices before which the allocator's cache is given back, and ``streams``
    the CUDA stream of each block that is not on the default one: what a stream has cached serves no other.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.terms: list[str] = []
        self.entries: list[int] = []
        self.marks: list[tuple[int, RunPhase]] = []
        self.emptied: list[int] = []
        self.streams: dict[int, int] = {}

    def allocate(self, num_bytes: int, term: str, *, stream: int = 0) -> int:
        """Note a block's birth and return its number.

        Args:
            num_bytes: its size as asked for, before the allocator rounds it.
            term: the name of the Term that it belongs to.
            stream: the CUDA stream that runs where it is asked for; 0 is the default one.
        """
        block = len(self.sizes)
        self.sizes.append(num_bytes)
        self.terms.append(term)
        self.entries.append(block + 1)
        if stream:
            self.streams[block] = stream
        return block

    def free(self, block: int) -> None:
        """Note a block's death."""
        self.entries.append(-(block + 1))

    def begin(self, phase: RunPhase) -> None:
        """Note that a phase begins; it may come more than once."""
        self.marks.append((len(self.entries), phase))

    def empty_cache(self) -> None:
        """Note that torch.cuda.empty_cache is called: what is reserved and holds no block goes back."""
        self.emptied.append(len(self.entries))
