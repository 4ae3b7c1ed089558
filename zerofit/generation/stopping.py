"""Where completions end: seen while they are generated, as the tokens behind the end can look like others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerofit.core.errors import UserError


class Ends:
    """A stopping criterion of transformers that asks others, and notes where each sequence ended first.

    Args:
        criteria: the others; end-of-sequence tokens and lengths are not among them.
        go_on: called after each token.
    """

    def __init__(self, criteria: Sequence[Any], *, go_on: Callable[[], None]) -> None:
        self._criteria = criteria
        self._go_on = go_on
        self._lengths: Any = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return which sequences end here; transformers calls this after each token."""
        import torch

        self._go_on()
        ended = torch.zeros(input_ids.shape[0], device=input_ids.device, dtype=torch.bool)
        for criterion in self._criteria:
            ended = ended | _checked(criterion(input_ids, scores, **kwargs), ended, criterion)
        if self._criteria:
            self._note(ended, input_ids.shape[1])
        return ended

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


def _checked(answer: Any, ended: Any, criterion: Any) -> Any:
    """Return a criterion's answer, where it is one: for all sequences together, or for each."""
    import torch

    if isinstance(answer, bool):
        return answer
    is_tensor = isinstance(answer, torch.Tensor)
    if not is_tensor or answer.shape not in (ended.shape, torch.Size()) or answer.dtype != torch.bool:
        what = f"{answer.dtype} of shape {list(answer.shape)}" if is_tensor else type(answer).__name__
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise UserError(
            "generate-bad-criterion",
            "a stopping criterion did not say which sequences end",
            found=f"{name} returned {what}, for {len(ended)} sequences",
            why="it is asked after each token, and each sequence goes on or ends",
            fix="return a tensor of one bool for each sequence, or one bool for all",
        )
    return answer.to(ended.device)
