"""The pending backward passes of an Accelerator's split forward passes."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.training.batch.micro_batches.joiner import flat, gradient_term
from zerofit.training.batch.micro_batches.random_state import unchanged_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from zerofit.models.pieces import Inputs
    from zerofit.models.trees import Path
    from zerofit.training.batch.micro_batches.random_state import AutocastState, RandomState
    from zerofit.training.batch.micro_batches.shared_draws import SharedDraws
    from zerofit.training.batch.micro_batches.split_model import SplitModel


Gradients = dict["Path", Any]
"""Gradients of the script's loss with respect to the outputs that it used, by path."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """One micro-batch."""

    inputs: Inputs
    start: int
    """The index of its first sample."""
    size: int
    """Samples."""
    draws: SharedDraws | None = None
    """Random numbers shared with the other pieces; None if each draws its own."""
    random_state: RandomState | None = None
    """The random state before its first run."""

    def run(self, model: SplitModel, *, with_gradient: bool) -> Any:
        """Return the model's outputs for this piece."""
        with self.draws.rows(self.start, self.size) if self.draws is not None else contextlib.nullcontext():
            return model.call(self.inputs, with_gradient=with_gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientWitness:
    """A parameter's gradient after the early pieces, to detect whether the script clears gradients."""

    parameter: Any
    gradient: weakref.ref[Any]
    version: int
    """Incremented by torch whenever the tensor is changed in place."""

    @classmethod
    def among(cls, parameters: Iterable[Any]) -> GradientWitness | None:
        """Return one for the first parameter with a gradient; None if gradients are elsewhere (ZeRO)."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                return cls(parameter=parameter, gradient=weakref.ref(gradient), version=gradient._version)
        return None

    @property
    def was_cleared(self) -> bool:
        """True if the gradient is gone or zero, but not if more was added to it."""
        gradient: Any = self.parameter.grad
        known: Any = self.gradient()
        if gradient is None or gradient is not known:
            return True
        return gradient._version != self.version and not bool(gradient.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """Pieces that already ran backward during the forward pass, with a guessed gradient."""

    path: Path
    """The scalar output that the script was expected to use."""
    gradient: float
    """The guessed gradient with respect to it."""
    done: tuple[int, ...]
    """The indices of the pieces that ran backward."""
    live: Any
    """Outputs of the last piece, with graph; None if it must run again."""
    witness: GradientWitness | None
    """Shows whether the script has cleared gradients since; None if unknown."""


class Token:
    """Lives as long as the graph of the returned outputs."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class SplitPass:
    """One forward pass of the script."""

    model: SplitModel
    pieces: tuple[Piece, ...]
    weights_of: Callable[[Path], tuple[float, ...]]
    """The weight of each piece's scalar output in the whole."""
    checked_scalars: Container[Path] | None
    """Scalar outputs whose weighting was checked; None without a check."""
    autocast: AutocastState
    order: tuple[int, ...]
    """Indices of the pieces in execution order; the last one's loss has a weight."""
    num_runs: int
    """Pieces that every rank runs if ranks must run the same number; else those of this pass."""
    syncs: bool
    """True if the script wants gradients to be synchronized after this pass."""
    early: Early | None = None
    is_done: bool = False
    """True after its backward pass."""
    gradients: Gradients = field(default_factory=dict)
    """Those being collected."""
    anchor: Any = None
    """The leaf of all returned outputs' graphs."""
    token: weakref.ref[Token] | None = None

    def jobs(self, gradients: Gradients, *, is_guess_wrong: bool) -> list[Callable[[], Any]]:
        """Return jobs that compute each piece's loss, to be run backward.

        If the guess was wrong, early pieces are corrected.
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
        if self.model.is_collective and (early is None or is_guess_wrong):
            # Padded by runs without effect, so that every rank runs the same number.
            nothing = self._job(places[-1], gradients, factor=0.0)
            jobs = [nothing] * (self.num_runs - len(jobs)) + jobs
        return jobs

    def undo_early(self) -> list[Callable[[], Any]]:
        """Return jobs that undo the pieces that ran backward early."""
        early, self.early = self.early, None
        if early is None:
            return []
        return [self._job(place, {early.path: -early.gradient}) for place in early.done]

    def _counts(self, place: int, gradients: Gradients) -> bool:
        return any(self._weight(path, place) != 0 for path in gradients)

    def _weight(self, path: Path, place: int) -> float:
        """Return the weight of a piece's output; tensors with a batch dimension have weight 1."""
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
        """Return the scalar whose backward pass is this piece's part of the script's."""
        piece = self.pieces[place]
        rows = slice(piece.start, piece.start + piece.size)
        terms = [
            gradient_term(outputs[path], gradient, weight=self.weights_of(path)[place], rows=rows)
            for path, gradient in gradients.items()
            if self._weight(path, place) != 0
        ]
        return sum(terms[1:], start=terms[0])

    def run_again(self, place: int, *, with_gradient: bool) -> Any:
        """Return the outputs of one piece, with the random state and autocast of its first run."""
        piece = self.pieces[place]
        if piece.random_state is not None:
            piece.random_state.restore()
        with self.autocast.again():
            return piece.run(self.model, with_gradient=with_gradient)


class _State(Enum):
    IDLE = "idle"
    COLLECTING = "collecting"
    RUNNING = "running"


class PendingBackward:
    """The passes whose outputs the script still references.

    The graph of the returned outputs keeps a pass alive.
    """

    def __init__(self) -> None:
        self._passes: list[weakref.ref[SplitPass]] = []
        self._early: list[SplitPass] = []
        """Passes with pieces that ran backward before the script's backward pass."""
        self._state = _State.IDLE
        self.run: Callable[[Any, bool], None] | None = None
        """Runs the backward pass of one piece as the last backward call did; None before the first."""

    @property
    def is_any(self) -> bool:
        """True if the script has outputs whose backward pass may still run, even for a second time."""
        return bool(self._alive())

    @property
    def is_due(self) -> bool:
        """True if the script has outputs whose backward pass has not run yet."""
        return any(not split_pass.is_done for split_pass in self._alive())

    def add(self, split_pass: SplitPass, token: Token) -> None:
        """Register a pass whose outputs are about to be returned."""
        split_pass.token = weakref.ref(token)
        self._passes = [known for known in self._passes if known() is not None]
        self._passes.append(weakref.ref(split_pass))
        if split_pass.early is not None:
            self._early.append(split_pass)

    def receive(self, split_pass: SplitPass, paths: Sequence[Path], gradients: Sequence[Any]) -> None:
        """Receive the gradients of one pass's outputs from autograd.

        In a script's own loss.backward(), without Accelerator.backward, the pieces run here.
        """
        import torch

        if self._state is _State.RUNNING:
            return
        given = {
            path: gradient for path, gradient in zip(paths, gradients, strict=True) if gradient is not None
        }
        if self._state is _State.COLLECTING:
            split_pass.gradients |= given
            return
        if given:
            with torch.enable_grad():
                self._go([(split_pass, given)], None, lambda loss, _: loss.backward(), is_boundary=True)

    def backward(self, loss: Any, *, run: Callable[[Any, bool], None], is_boundary: bool) -> None:
        """Run the backward pass of a loss that the script computed from the outputs.

        Args:
            loss: the script's scalar.
            run: runs the actual backward pass of one piece's loss, given whether it is the step's last. Later
                forward passes may also call it.
            is_boundary: whether an optimizer step follows.
        """
        self.run = run
        passes = self._alive()
        if not loss.requires_grad or not passes:
            run(loss, is_boundary)
            return
        hit = self._collect(loss, passes)
        anchors = {id(split_pass.anchor) for split_pass in passes}
        # Other terms of the script's loss than the returned outputs.
        rest = loss if not hit or any(leaf not in anchors for leaf in _leaves(loss)) else None
        self._learn(hit, has_rest=rest is not None)
        self._go(hit, rest, run, is_boundary=is_boundary)

    def settle(self, *, only_dropped: bool = False, except_for: Any | None = None) -> None:
        """Undo early backward passes whose outputs the script never used.

        To be called before an optimizer step, and before gradients are unscaled, clipped or cleared.

        Args:
            only_dropped: skip passes whose outputs the script still references.
            except_for: a loss whose backward pass is about to run; passes that it depends on are skipped.
        """
        run, early = self.run, [split_pass for split_pass in self._early if split_pass.early is not None]
        if run is None:
            return
        self._early = []
        needed = set() if except_for is None else set(_leaves(except_for))
        for split_pass in early:
            is_held = only_dropped and split_pass.token is not None and split_pass.token() is not None
            if is_held or id(split_pass.anchor) in needed:
                self._early.append(split_pass)
                continue
            witness = split_pass.early.witness if split_pass.early is not None else None
            was_cleared = witness is not None and witness.was_cleared
            jobs = split_pass.undo_early()
            split_pass.model.guess.was_wrong()
            if not was_cleared:
                with unchanged_random_state(split_pass.model.devices):
                    for job in jobs:
                        with split_pass.model.no_sync():
                            run(job(), False)

    def _alive(self) -> list[SplitPass]:
        return [split_pass for known in self._passes if (split_pass := known()) is not None]

    def _collect(self, loss: Any, passes: list[SplitPass]) -> list[tuple[SplitPass, Gradients]]:
        """Return the passes that the loss depends on, with the gradients of their outputs."""
        import torch

        self._state = _State.COLLECTING
        try:
            # The script's own graph is small, and its backward pass may run again.
            torch.autograd.grad(
                loss, [split_pass.anchor for split_pass in passes], retain_graph=True, allow_unused=True
            )
        finally:
            self._state = _State.IDLE
        hit = [(split_pass, split_pass.gradients) for split_pass in passes if split_pass.gradients]
        for split_pass, _ in hit:
            split_pass.gradients = {}
        return hit

    def _learn(self, hit: list[tuple[SplitPass, Gradients]], *, has_rest: bool) -> None:
        for split_pass, gradients in hit:
            if has_rest or len(hit) > 1 or any(gradient.dim() for gradient in gradients.values()):
                split_pass.model.guess.record(None)
            else:
                split_pass.model.guess.record({path: float(gradient) for path, gradient in gradients.items()})

    def _go(
        self,
        hit: list[tuple[SplitPass, Gradients]],
        rest: Any,
        run: Callable[[Any, bool], None],
        *,
        is_boundary: bool,
    ) -> None:
        """Run all pieces backward, the last one together with the rest of the script's graph."""
        jobs = [(split_pass, job) for split_pass, gradients in hit for job in _jobs(split_pass, gradients)]
        if not jobs:
            if rest is not None:
                run(rest, is_boundary)
            return
        last_of_model = {id(split_pass.model): place for place, (split_pass, _) in enumerate(jobs)}
        devices = frozenset[Any]().union(*(split_pass.model.devices for split_pass, _ in hit))
        state, self._state = self._state, _State.RUNNING
        try:
            with unchanged_random_state(devices):
                for place, (split_pass, job) in enumerate(jobs):
                    is_last = place == len(jobs) - 1
                    syncs = split_pass.syncs or split_pass.model.is_triggered
                    is_synced = is_boundary and syncs and last_of_model[id(split_pass.model)] == place
                    with contextlib.nullcontext() if is_synced else split_pass.model.no_sync():
                        loss = job()
                        run(loss if rest is None or not is_last else loss + rest, is_boundary and is_last)
        finally:
            self._state = state
        for split_pass, _ in hit:
            split_pass.is_done = True
        self._early = [split_pass for split_pass in self._early if split_pass.early is not None]


def _jobs(split_pass: SplitPass, gradients: Gradients) -> list[Callable[[], Any]]:
    early, guess = split_pass.early, split_pass.model.guess
    if early is None:
        return split_pass.jobs(gradients, is_guess_wrong=False)
    is_wrong = set(gradients) != {early.path} or float(gradients[early.path]) != early.gradient
    if early.witness is not None and early.witness.was_cleared:
        split_pass.early = replace(early, done=())
        is_wrong = True
        guess.give_up()
    is_wrong_somewhere = bool(split_pass.model.max_over_ranks([int(is_wrong)])[0])
    if is_wrong_somewhere:
        guess.was_wrong()
    return split_pass.jobs(gradients, is_guess_wrong=is_wrong_somewhere)


def _leaves(loss: Any) -> Iterator[int]:
    """Yield the ids of the leaf tensors that a loss depends on."""
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield id(leaf)
        pending += [following for following, _ in node.next_functions]
