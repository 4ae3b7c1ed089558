"""The backward pass of forward passes that were split: all models of one Accelerator together."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.training.micro_batches.passes import SplitPass, Token
from zerofit.training.micro_batches.random_state import unchanged_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerofit.models.trees import Path
    from zerofit.training.micro_batches.passes import Gradients


class _State(Enum):
    IDLE = "idle"
    COLLECTING = "collecting"
    RUNNING = "running"


class PendingBackward:
    """The passes whose outputs the script holds.

    The graph of the handed out outputs keeps a pass alive: outputs that are thrown away take it with them.
    """

    def __init__(self) -> None:
        self._passes: list[weakref.ref[SplitPass]] = []
        self._early: list[SplitPass] = []
        """Passes with pieces that went backward before the script asked for it."""
        self._state = _State.IDLE
        self.run: Callable[[Any, bool], None] | None = None
        """Runs the backward pass of one piece, as the last backward call asked; None before it."""

    @property
    def is_any(self) -> bool:
        """True if the script holds outputs whose backward may come, be it for a second time."""
        return bool(self._alive())

    @property
    def is_due(self) -> bool:
        """True if the script holds outputs whose backward has not come yet."""
        return any(not one.is_done for one in self._alive())

    def add(self, one: SplitPass, token: Token) -> None:
        """Take in a pass whose outputs are about to be handed out."""
        one.token = weakref.ref(token)
        self._passes = [known for known in self._passes if known() is not None]
        self._passes.append(weakref.ref(one))
        if one.early is not None:
            self._early.append(one)

    def receive(self, one: SplitPass, paths: Sequence[Path], gradients: Sequence[Any]) -> None:
        """Take the gradients of one pass's outputs, as autograd comes by.

        Without Accelerator.backward (a script's own loss.backward()) the pieces run here.
        """
        import torch

        if self._state is _State.RUNNING:
            return
        given = {
            path: gradient for path, gradient in zip(paths, gradients, strict=True) if gradient is not None
        }
        if self._state is _State.COLLECTING:
            one.gradients |= given
            return
        if given:
            with torch.enable_grad():
                self._go([(one, given)], None, lambda loss, _: loss.backward(), is_boundary=True)

    def backward(self, loss: Any, *, run: Callable[[Any, bool], None], is_boundary: bool) -> None:
        """Run the backward pass of a loss that the script made of the outputs.

        Args:
            loss: the script's scalar.
            run: does the real backward of one piece's loss; is told whether it is the step's last. It may be
                called in later forward passes too, until the next backward.
            is_boundary: whether an optimizer step follows.
        """
        self.run = run
        passes = self._alive()
        if not loss.requires_grad or not passes:
            run(loss, is_boundary)
            return
        hit = self._collect(loss, passes)
        anchors = {id(one.anchor) for one in passes}
        # What the script's loss depends on beside the handed out outputs.
        rest = loss if not hit or any(leaf not in anchors for leaf in _leaves(loss)) else None
        self._learn(hit, has_rest=rest is not None)
        self._go(hit, rest, run, is_boundary=is_boundary)

    def settle(self, *, only_dropped: bool = False, except_for: Any | None = None) -> None:
        """Take back what went backward early for outputs whose backward never came.

        Call it before an optimizer step, and before gradients are unscaled, clipped or cleared.

        Args:
            only_dropped: leave those whose outputs the script still holds.
            except_for: a loss whose backward is about to come; those that it depends on are left.
        """
        run, early = self.run, [one for one in self._early if one.early is not None]
        if run is None:
            return
        self._early = []
        needed = set() if except_for is None else set(_leaves(except_for))
        for one in early:
            is_held = only_dropped and one.token is not None and one.token() is not None
            if is_held or id(one.anchor) in needed:
                self._early.append(one)
                continue
            witness = one.early.witness if one.early is not None else None
            was_cleared = witness is not None and witness.was_cleared
            jobs = one.undo_early()
            one.model.guess.was_wrong()
            if not was_cleared:
                with unchanged_random_state(one.model.devices):
                    for job in jobs:
                        with one.model.no_sync():
                            run(job(), False)

    def _alive(self) -> list[SplitPass]:
        return [one for known in self._passes if (one := known()) is not None]

    def _collect(self, loss: Any, passes: list[SplitPass]) -> list[tuple[SplitPass, Gradients]]:
        """Return the passes that the loss depends on, with the gradients of their outputs."""
        import torch

        self._state = _State.COLLECTING
        try:
            # The script's own graph is small, and backward may come by a second time.
            torch.autograd.grad(loss, [one.anchor for one in passes], retain_graph=True, allow_unused=True)
        finally:
            self._state = _State.IDLE
        hit = [(one, one.gradients) for one in passes if one.gradients]
        for one, _ in hit:
            one.gradients = {}
        return hit

    def _learn(self, hit: list[tuple[SplitPass, Gradients]], *, has_rest: bool) -> None:
        for one, gradients in hit:
            if has_rest or len(hit) > 1 or any(gradient.dim() for gradient in gradients.values()):
                one.model.guess.see(None)
            else:
                one.model.guess.see({path: float(gradient) for path, gradient in gradients.items()})

    def _go(
        self,
        hit: list[tuple[SplitPass, Gradients]],
        rest: Any,
        run: Callable[[Any, bool], None],
        *,
        is_boundary: bool,
    ) -> None:
        """Run all pieces; the rest of the script's graph goes with the last of them."""
        jobs = [(one, job) for one, gradients in hit for job in _jobs(one, gradients)]
        if not jobs:
            run(rest, is_boundary) if rest is not None else None
            return
        last_of_model = {id(one.model): place for place, (one, _) in enumerate(jobs)}
        devices = frozenset[Any]().union(*(one.model.devices for one, _ in hit))
        state, self._state = self._state, _State.RUNNING
        try:
            with unchanged_random_state(devices):
                for place, (one, job) in enumerate(jobs):
                    is_last = place == len(jobs) - 1
                    syncs = one.syncs or one.model.is_triggered
                    is_synced = is_boundary and syncs and last_of_model[id(one.model)] == place
                    with contextlib.nullcontext() if is_synced else one.model.no_sync():
                        loss = job()
                        run(loss if rest is None or not is_last else loss + rest, is_boundary and is_last)
        finally:
            self._state = state
        for one, _ in hit:
            one.is_done = True
        self._early = [one for one in self._early if one.early is not None]


def _jobs(one: SplitPass, gradients: Gradients) -> list[Callable[[], Any]]:
    early, guess = one.early, one.model.guess
    if early is None:
        return one.jobs(gradients, is_guess_wrong=False)
    is_wrong = set(gradients) != {early.path} or float(gradients[early.path]) != early.gradient
    if early.witness is not None and early.witness.was_cleared:
        one.early = replace(early, done=())
        is_wrong = True
        guess.is_useless()
    is_wrong_somewhere = bool(one.model.agreed([int(is_wrong)])[0])
    if is_wrong_somewhere:
        guess.was_wrong()
    return one.jobs(gradients, is_guess_wrong=is_wrong_somewhere)


def _leaves(loss: Any) -> Iterator[int]:
    """Yield the ids of the leaves that a loss depends on."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield id(leaf)
        waiting += [following for following, _ in node.next_functions]
