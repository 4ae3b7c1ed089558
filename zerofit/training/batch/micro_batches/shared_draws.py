"""SharedDraws: random numbers of a split forward pass, drawn once for all pieces."""

from __future__ import annotations

import sys
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from zerofit.models.pieces import SHARED_DRAWS
from zerofit.training.batch.micro_batches.separability import not_separable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_RECOMPUTES = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")
"""Modules whose functions recompute a layer in the backward pass."""


class SharedDraws:
    """The random numbers that one forward pass of a script draws for all of its samples.

    The first piece draws for the whole batch, and each piece uses its rows. Noise and masks are therefore the
    same as in one pass, and the generators end in the same state.

    Args:
        num_samples: of all pieces.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self._drawn: list[Any] = []
        self._starts: list[int] = []  # of the piece that drew each

    def __len__(self) -> int:
        return len(self._drawn)

    def rows(self, start: int, size: int) -> AbstractContextManager[Any]:
        """Return the context for a run of a piece.

        Args:
            start: the index of its first sample.
            size: its number of samples.
        """
        from torch.overrides import TorchFunctionMode

        shared = self

        class Rows(TorchFunctionMode):  # type: ignore[misc]
            num_drawn = 0

            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                kwargs = dict(kwargs or {})
                name = getattr(function, "__name__", "")
                if name not in SHARED_DRAWS or not _is_by_shape(args, kwargs):
                    return function(*args, **kwargs)
                args = (*args, kwargs.pop("size")) if "size" in kwargs else args
                self.num_drawn += 1
                return shared._of(self.num_drawn - 1, start, size, function, args, kwargs)

        return Rows()

    def _of(
        self, place: int, start: int, size: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a piece's rows of the random numbers drawn by one call of the forward pass."""
        import torch

        if _is_recomputed():
            raise not_separable(
                f"{function.__name__}() in a layer that is recomputed",
                why="random numbers of all samples can't be drawn again for one micro-batch",
            )
        like = args[0] if torch.is_tensor(args[0]) else None
        shape, before = (tuple(like.shape), ()) if like is not None else _shape(args)
        wide = (self.num_samples, *shape[1:]) if shape and shape[0] == size else shape
        is_new = place == len(self._drawn)
        if is_new:
            self._drawn.append(None)
            self._starts.append(start)
        elif self._drawn[place].shape == shape:
            wide = shape
        if is_new or (self._starts[place] == start and kwargs.get("generator") is None):
            # Drawn again if the piece runs again, so that the generators' states match.
            given = (like.new_empty(wide), *args[1:]) if like is not None else (*before, wide)
            self._drawn[place] = function(*given, **kwargs)
        drawn = self._drawn[place]
        if drawn.shape != wide:
            raise not_separable(
                f"{function.__name__}() of shape {tuple(drawn.shape)}, and then of {shape}",
                why="random numbers without one row per sample can't be split over micro-batches",
            )
        rows = drawn if wide == shape else drawn[start : start + size]
        return like.copy_(rows) if function.__name__.endswith("_") and like is not None else rows.clone()


def _is_by_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call only depends on a shape, not on other tensors."""
    import torch

    others = (*args[1:], *kwargs.values())
    is_said = bool(args) or "size" in kwargs
    return is_said and not any(torch.is_tensor(value) for value in others)


def _shape(args: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return the shape of a factory call, which comes last, and the arguments before it."""
    if isinstance(args[-1], (tuple, list)):
        return tuple(args[-1]), args[:-1]
    return args, ()


def _is_recomputed() -> bool:
    """Return True inside a layer under gradient checkpointing, which will be recomputed."""
    return any(frame.f_globals.get("__name__") in _RECOMPUTES for frame, _ in walk_stack(sys._getframe()))
