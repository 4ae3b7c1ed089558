"""Where completions end: seen while they are generated, as the tokens behind the end can look like others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerofit.generation.guarded import Guard


class Ends:
    """A stopping criterion of transformers that asks others, and notes where each sequence ended first.

    Args:
        criteria: the others; end-of-sequence tokens and lengths are not among them.
        guard: runs them; all sequences end when a function of the script's has failed.
        go_on: called after each token.
    """

    def __init__(self, criteria: Sequence[Any], *, guard: Guard, go_on: Callable[[], None]) -> None:
        self._criteria = criteria
        self._guard = guard
        self._go_on = go_on
        self._lengths: Any = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return which sequences end here; transformers calls this after each token."""
        import torch

        self._go_on()
        nothing = torch.zeros(input_ids.shape[0], device=input_ids.device, dtype=torch.bool)
        ended = nothing
        for criterion in self._criteria:
            ended = ended | self._guard.run(criterion, input_ids, scores, otherwise=nothing, **kwargs)
        if self._criteria:
            self._note(ended, input_ids.shape[1])
        return torch.ones_like(ended) if self._guard.has_failed else ended

    def lengths(self, num_sequences: int) -> list[int | None]:
        """Return each sequence's tokens with its prompt's; None where none of these criteria ended it.

        Args:
            num_sequences: in the order in which transformers returns them; not those of beam search, whose
                places change.
        """
        if self._lengths is None:
            return [None] * num_sequences
        return [length if length >= 0 else None for length in self._lengths.tolist()]

    def _note(self, ended: Any, length: int) -> None:
        import torch

        if self._lengths is None or self._lengths.shape != ended.shape:
            self._lengths = torch.full_like(ended, -1, dtype=torch.long)
        self._lengths[ended & (self._lengths < 0)] = length
