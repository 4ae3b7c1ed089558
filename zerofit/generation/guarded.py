"""Functions of a script that run between forward passes: one that fails leaves no other rank waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Guard:
    """Runs a script's functions during one call of generate, and keeps the first error for its end.

    A rank that raised in the middle of a call would never make the passes that the others wait for.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a function has raised."""
        return self._error is not None

    def run(self, function: Callable[..., Any], *arguments: Any, otherwise: Any, **more: Any) -> Any:
        """Return what a function gives; what is given otherwise where it fails, or one before it has.

        Args:
            function: the script's.
            *arguments: its own.
            otherwise: what lets the call go on.
            **more: further arguments of its own.
        """
        if self._error is not None:
            return otherwise
        try:
            return function(*arguments, **more)
        except Exception as error:
            self._error = error
            return otherwise

    def processors(self, processors: Iterable[Any]) -> list[Any]:
        """Return logits processors that leave the scores as they are where they fail.

        Those of transformers stay themselves: one takes the place of that which a setting asks for.
        """
        return [
            each if type(each).__module__.startswith("transformers.") else _Guarded(self, each)
            for each in processors
        ]

    def allowed(self, allowed: Callable[[int, Any], list[int]], *, token: int) -> Callable[..., list[int]]:
        """Return a prefix_allowed_tokens_fn that allows one token where it fails."""

        def allowed_or_one(batch: int, input_ids: Any) -> list[int]:
            return self.run(allowed, batch, input_ids, otherwise=()) or [token]

        return allowed_or_one

    def check(self) -> None:
        """Raise the error of the function that failed, if one did."""
        if self._error is not None:
            raise self._error


class _Guarded:
    def __init__(self, guard: Guard, processor: Any) -> None:
        self._guard = guard
        self._processor = processor

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return self._guard.run(self._processor, input_ids, scores, otherwise=scores)
