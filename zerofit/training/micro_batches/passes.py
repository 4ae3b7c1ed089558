"""One forward pass of the script that ran as micro-batches: what its backward pass will need."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerofit.training.micro_batches.joiner import flat, gradient_term

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.models.pieces import Inputs
    from zerofit.models.trees import Path
    from zerofit.training.micro_batches.random_state import AutocastState, RandomState
    from zerofit.training.micro_batches.split_model import SplitModel

Gradients = dict["Path", Any]
"""Of the script's loss with respect to the outputs that it used."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """One micro-batch."""

    inputs: Inputs
    start: int
    """Its first sample's place."""
    size: int
    """Samples."""
    random_state: RandomState | None = None
    """That its first run found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A gradient as the early pieces left it."""

    parameter: Any
    """One of the model's."""
    gradient: weakref.ref[Any]
    version: int
    """Raised by torch whenever the tensor is changed in place."""

    @classmethod
    def among(cls, parameters: Iterable[Any]) -> Witness | None:
        """Return the first parameter with a gradient; None where gradients are kept elsewhere (ZeRO)."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                return cls(parameter=parameter, gradient=weakref.ref(gradient), version=gradient._version)
        return None

    @property
    def was_cleared(self) -> bool:
        """True if the gradient is gone, or zero; one that others have added to is neither."""
        gradient: Any = self.parameter.grad
        known: Any = self.gradient()
        if gradient is None or gradient is not known:
            return True
        return gradient._version != self.version and not bool(gradient.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """Pieces that went backward in the forward pass, on a guess."""

    path: Path
    """The scalar output that the script was thought to use."""
    gradient: float
    """With respect to it."""
    done: tuple[int, ...]
    """The pieces' places."""
    live: Any
    """Outputs of the last piece, with their graph; None where it runs again."""
    witness: Witness | None
    """One parameter's gradient, by which to see whether the script has cleared them since."""


class Token:
    """Lives as long as the graph of the outputs that were handed out."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class SplitPass:
    """One forward pass of the script."""

    model: SplitModel
    pieces: tuple[Piece, ...]
    weights_of: Callable[[Path], tuple[float, ...]]
    """The weight of each piece's scalar output in the whole batch's."""
    autocast: AutocastState
    order: tuple[int, ...]
    """Places of the pieces in the order in which they run: the last one's loss counts."""
    num_runs: int
    """Micro-batches that every rank runs, where ranks must run as many; else those of this pass."""
    syncs: bool
    """True if the script wanted gradients to be exchanged after this pass."""
    early: Early | None = None
    is_done: bool = False
    """True if its backward pass has come."""
    gradients: Gradients = field(default_factory=dict)
    """Those that are being collected."""
    anchor: Any = None
    """A leaf that all outputs that were handed out lead to."""
    token: weakref.ref[Token] | None = None

    def jobs(self, gradients: Gradients, *, is_guess_wrong: bool) -> list[Callable[[], Any]]:
        """Return what must run so that all pieces have gone backward: each job returns one piece's loss.

        Where the guess was wrong, what went backward early is put right.
        """
        early, self.early = self.early, None
        places = [place for place in self.order if self._counts(place, gradients)]
        jobs = []
        for place in places:
            if early is not None and place in early.done:
                if is_guess_wrong:
                    change = gradients | {early.path: gradients.get(early.path, 0.0) - early.gradient}
                    jobs.append(self._job(place, change))
            elif early is not None and early.live is not None and place == self.order[-1]:
                jobs.append(self._job(place, gradients, live=early.live))
            else:
                jobs.append(self._job(place, gradients))
        if self.model.is_in_step and (early is None or is_guess_wrong):
            # Runs that count nothing come first, so that every rank runs as many.
            nothing = self._job(places[-1], gradients, factor=0.0)
            jobs = [nothing] * (self.num_runs - len(jobs)) + jobs
        return jobs

    def undo_early(self) -> list[Callable[[], Any]]:
        """Return what takes back the pieces that went backward early."""
        early, self.early = self.early, None
        if early is None:
            return []
        return [self._job(place, {early.path: -early.gradient}) for place in early.done]

    def _counts(self, place: int, gradients: Gradients) -> bool:
        return any(self._weight(path, place) != 0 for path in gradients)

    def _weight(self, path: Path, place: int) -> float:
        """Return what a piece's output counts; tensors with a batch dimension always count."""
        return self.weights_of(path)[place] if path in self.model.scalars else 1.0

    def _job(
        self, place: int, gradients: Gradients, *, factor: float = 1.0, live: Any = None
    ) -> Callable[[], Any]:
        def run() -> Any:
            outputs = flat(live if live is not None else self.run_again(place, with_gradient=True))
            loss = self._loss_of(place, outputs, gradients)
            return loss if factor == 1.0 else loss * factor

        return run

    def _loss_of(self, place: int, outputs: dict[Path, Any], gradients: Gradients) -> Any:
        """Return the scalar whose backward is this piece's part of the script's."""
        piece = self.pieces[place]
        rows = slice(piece.start, piece.start + piece.size)
        terms = [
            gradient_term(outputs[path], gradient, weight=self.weights_of(path)[place], rows=rows)
            for path, gradient in gradients.items()
            if self._weight(path, place) != 0
        ]
        return sum(terms[1:], start=terms[0])

    def run_again(self, place: int, *, with_gradient: bool) -> Any:
        """Return the outputs of one piece, from the random state and the autocast of its first run."""
        piece = self.pieces[place]
        if piece.random_state is not None:
            piece.random_state.restore()
        with self.autocast.again():
            return self.model.call(piece.inputs, with_gradient=with_gradient)
