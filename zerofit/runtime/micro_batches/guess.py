"""Guesses the gradient that a script will ask for, from those that it asked for before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.runtime.micro_batches.trees import Path

_FIRST_TRUST = 2
"""Equal gradients in a row after which the next is taken to be the same. ASSUMPTION: a script that scales by
a constant does so from its first step on."""


class Guess:
    """The gradient of a script's loss with respect to the one scalar output that it uses."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._value = 0.0
        self._times_seen = 0
        self._trusted_after = _FIRST_TRUST

    def see(self, gradients: dict[Path, float]) -> None:
        """Take in what one backward pass asked for.

        Args:
            gradients: of each output with a gradient; only those of scalars are looked at.
        """
        if len(gradients) != 1:
            self.forget()
            return
        ((path, value),) = gradients.items()
        is_same = path == self._path and value == self._value
        self._times_seen = self._times_seen + 1 if is_same else 1
        self._path, self._value = path, value

    def forget(self) -> None:
        """Start anew: something else than one scalar was used."""
        self._path, self._times_seen = None, 0

    def was_wrong(self) -> None:
        """Trust later than before: each wrong guess costs the forward and backward passes that repair it."""
        self.forget()
        self._trusted_after *= 2

    def is_useless(self) -> None:
        """Trust never again: the script clears gradients between its forward and backward passes."""
        self._trusted_after = sys.maxsize

    @property
    def trusted(self) -> tuple[Path, float] | None:
        """(the output, its gradient) that the next backward pass will ask for; None without grounds."""
        if self._path is None or self._times_seen < self._trusted_after:
            return None
        return self._path, self._value
