"""Splitter: runs a prepared model's training forward passes in micro-batches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from zerofit.models.pieces import Inputs, batch_of, taken
from zerofit.training.batch.micro_batches.joiner import flat
from zerofit.training.batch.micro_batches.outputs import Outputs
from zerofit.training.batch.micro_batches.pending_backward import Early, GradientWitness, Piece, SplitPass
from zerofit.training.batch.micro_batches.random_state import (
    AutocastState,
    RandomState,
    unchanged_random_state,
)
from zerofit.training.batch.micro_batches.separability import (
    Buffers,
    check_separable,
    evaluation_mode,
    halves_of,
    not_separable,
    observe_gradient_hooks,
    refuse_batch_norm,
)
from zerofit.training.batch.micro_batches.shared_draws import SharedDraws
from zerofit.training.batch.micro_batches.weights import BY_SAMPLES, weightings

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.models.pieces import SampleBatch
    from zerofit.models.trees import Path
    from zerofit.training.batch.micro_batches.pending_backward import PendingBackward
    from zerofit.training.batch.micro_batches.separability import HeldWeightings
    from zerofit.training.batch.micro_batches.split_model import SplitModel
    from zerofit.training.batch.micro_batches.weights import Weights
    from zerofit.training.changes import Changes

_MAX_CHECKS = 4
"""Maximum number of checks of one kind of call while several weightings fit; then the most likely is used.
ASSUMPTION."""
_PASSES_KEPT = 16
"""Number of passes of one kind of call whose outputs are all stored in host memory, if a rank can't recompute
them alone. ASSUMPTION: by then a script has read every output that it ever reads (such as every tenth
step)."""


class Splitter:
    """Splits the training forward passes of one model.

    Args:
        model: as returned by Accelerator.prepare(), with its original forward.
        micro_batch_size: maximum samples in one forward and backward pass.
        changes: receives changes.
        pending: shared by all models of one Accelerator, since losses may depend on several.
    """

    def __init__(
        self, model: SplitModel, *, micro_batch_size: int, changes: Changes, pending: PendingBackward
    ) -> None:
        self.pending = pending
        self._model = model
        self._base = model.base
        self._micro_batch_size = micro_batch_size
        self._changes = changes
        self._is_noted = False
        self._has_trained = False
        self._found: dict[Any, HeldWeightings] = {}
        self._num_checks: dict[Any, int] = {}
        self._draws = False
        self._num_passes: dict[Any, int] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, in micro-batches if it trains on more samples than that."""
        import torch

        if not torch.is_grad_enabled():
            return self._model.original_forward(*args, **kwargs)
        inputs = Inputs(args=args, kwargs=kwargs)
        batch = batch_of(inputs)
        if not self._may_train(batch):
            return self._model.original_forward(*args, **kwargs)
        self.pending.settle(only_dropped=True)
        pieces = self._pieces(inputs, batch)
        is_split = len(pieces) > 1
        if not (is_split or self._model.is_collective):
            return self._model.original_forward(*args, **kwargs)
        self._model.note_devices()
        weights: dict[str, Weights] = {BY_SAMPLES: (1.0,)}
        if is_split:
            weights = weightings([(piece.inputs, piece.size) for piece in pieces], self._base)
        kind = (frozenset(kwargs), len(args))
        is_open = is_split and self._is_open(kind, weights)
        num_runs, is_check_due = self._model.max_over_ranks([len(pieces), int(is_open)])
        if num_runs == 1:
            return self._model.original_forward(*args, **kwargs)
        refuse_batch_norm(self._base)
        observe_gradient_hooks(self._base)
        if is_check_due:
            self._check(kind, inputs, batch)
        return self._split(pieces, self._chosen(kind, weights), num_runs, kind)

    def _may_train(self, batch: SampleBatch) -> bool:
        """Return True if a forward pass with gradients may be one of training.

        Models from from_pretrained() are in evaluation mode until the script calls train(), and some scripts
        train in it: until a pass in training mode was seen, all count where ranks need not run in step.
        """
        if self._base.training:
            self._has_trained = True
            return True
        if self._has_trained:
            return False
        if self._model.is_collective:  # an evaluation on one rank alone would wait for the others
            if batch.size > self._micro_batch_size:
                self._changes.add(
                    "forward passes in evaluation mode are not split into micro-batches: if the script "
                    "trains in it, call model.train() before the first step"
                )
            return False
        return True

    def _pieces(self, inputs: Inputs, batch: SampleBatch) -> tuple[Piece, ...]:
        size, most = batch.size, self._micro_batch_size
        if batch.whole_because is not None:
            if size > most or not batch.is_countable:
                self._changes.add(f"forward passes are not split into micro-batches: {batch.whole_because}")
            return (Piece(inputs=inputs, start=0, size=size),)
        return tuple(
            Piece(
                inputs=taken(inputs, slice(start, start + most), of=size) if size > most else inputs,
                start=start,
                size=min(most, size - start),
            )
            for start in range(0, size, most)
        )

    def _is_open(self, kind: Any, weights: dict[str, Weights]) -> bool:
        """Return True if another check could determine how this call's losses are weighted."""
        if self._num_checks.get(kind, 0) >= _MAX_CHECKS:
            return False
        found = self._found.get(kind)
        return found is None or any(
            len({_rounded(weights[name]) for name in names if name in weights}) != 1
            for names in found.values()
        )

    def _check(self, kind: Any, inputs: Inputs, batch: SampleBatch) -> None:
        import torch

        self._num_checks[kind] = self._num_checks.get(kind, 0) + 1
        halves = halves_of(
            inputs,
            size=batch.size,
            at_most=self._micro_batch_size,
            can_split=batch.whole_because is None,
            model=self._base,
        )
        draws = SharedDraws(halves.num_samples)

        def call(some: Inputs, start: int, size: int) -> Any:
            with unchanged_random_state(self._model.devices), draws.rows(start, size):
                return self._model.call(some, with_gradient=False)

        # Without torch.compile, which would compile evaluation mode and the hooks for a few passes.
        with torch.compiler.set_stance("force_eager"), evaluation_mode(self._base):
            found = check_separable(
                halves,
                call,
                model=self._base,
                is_half=self._model.is_half,
                max_over_ranks=self._model.max_over_ranks,
            )
        self._draws |= len(draws) > 0
        if self._draws and self._model.is_compiled:
            raise not_separable(
                "a compiled model that draws random numbers",
                why="compiled code draws once per micro-batch instead of once per batch",
            )
        if found is None:
            return
        before = self._found.get(kind, {})
        for path, names in found.items():
            both = tuple(name for name in before.get(path, names) if name in names)
            if not both:
                raise not_separable(f"{path} is weighted differently from batch to batch")
            found[path] = both
        self._found[kind] = before | found

    def _chosen(self, kind: Any, weights: dict[str, Weights]) -> Callable[[Path], Weights]:
        found = self._found.get(kind, {})

        def weights_of(path: Path) -> Weights:
            names = found.get(path, tuple(weights) if path in self._model.scalars else ())
            return next((weights[name] for name in names if name in weights), weights[BY_SAMPLES])

        return weights_of

    def _split(
        self,
        pieces: tuple[Piece, ...],
        weights_of: Callable[[Path], Weights],
        num_runs: int,
        kind: Any,
    ) -> Any:
        if len(pieces) > 1:
            self._note(pieces)
        draws = SharedDraws(sum(piece.size for piece in pieces)) if self._draws else None
        for piece in pieces:
            piece.draws = draws
        num_passes = self._num_passes[kind] = self._num_passes.get(kind, 0) + 1
        trusted = self._trusted(pieces, weights_of, num_runs)
        loss_weights = weights_of(trusted[0]) if trusted is not None else (1.0,) * len(pieces)
        split_pass = SplitPass(
            model=self._model,
            pieces=pieces,
            weights_of=weights_of,
            checked_scalars=self._found.get(kind),
            autocast=AutocastState.now(self._model.devices),
            order=tuple(sorted(range(len(pieces)), key=lambda place: loss_weights[place] != 0)),
            num_runs=num_runs,
            syncs=self._model.syncs_gradients,
        )
        outputs = Outputs(
            split_pass, stores_unread=not self._model.can_run_alone and num_passes <= _PASSES_KEPT
        )
        buffers = Buffers(self._base) if num_passes == 1 else None
        for _ in range(num_runs - len(pieces)):
            with unchanged_random_state(self._model.devices):
                self._model.call(pieces[0].inputs, with_gradient=False)
        if trusted is None:
            for place in split_pass.order:
                pieces[place].random_state = RandomState.now(self._model.devices)
                outputs.keep(place, pieces[place].run(self._model, with_gradient=False))
                if buffers is not None:
                    buffers.look()
        else:
            self._run_early(split_pass, outputs, buffers, *trusted)
        return outputs.detached_outputs(self.pending)

    def _trusted(
        self, pieces: tuple[Piece, ...], weights_of: Callable[[Path], Weights], num_runs: int
    ) -> tuple[Path, float] | None:
        trusted = self._model.guess.trusted
        may = self._model.may_run_early and self.pending.run is not None and not self.pending.is_due
        if self._model.is_collective:
            all_count = trusted is not None and all(weights_of(trusted[0]))
            may_not = not (may and all_count and len(pieces) == num_runs)
            may = not self._model.max_over_ranks([int(may_not)])[0]
        return trusted if may else None

    def _run_early(
        self, split_pass: SplitPass, outputs: Outputs, buffers: Buffers | None, path: Path, gradient: float
    ) -> None:
        """Run all pieces but the last also backward, with the gradient that the script is expected to use."""
        import torch

        done: list[int] = []
        live, is_early = None, True
        run = self.pending.run
        weights = split_pass.weights_of(path)
        for place in split_pass.order:
            piece, is_last = split_pass.pieces[place], place == split_pass.order[-1]
            piece.random_state = RandomState.now(self._model.devices)
            goes_backward = (
                is_early and weights[place] != 0 and not (is_last and self._model.parallel is not None)
            )
            with contextlib.nullcontext() if is_last else self._model.no_sync():
                result = piece.run(self._model, with_gradient=goes_backward)
                outputs.keep(place, result)
                if buffers is not None:
                    buffers.look()
                if is_last:
                    live = result if goes_backward else None
                    continue
                loss = flat(result)[path]
                del result  # frees its logits before the next piece
                if not goes_backward:
                    continue
                # A loss that is NaN on any rank can't be undone, and scripts skip such steps.
                is_early = not self._model.max_over_ranks([int(not torch.isfinite(loss))])[0]
                if is_early and run is not None:
                    run(loss * (weights[place] * gradient), False)
                    done.append(place)
        witness = GradientWitness.among(self._base.parameters())
        split_pass.early = Early(path=path, gradient=gradient, done=tuple(done), live=live, witness=witness)

    def _note(self, pieces: tuple[Piece, ...]) -> None:
        if not self._is_noted:
            self._is_noted = True
            most, size = self._micro_batch_size, sum(piece.size for piece in pieces)
            of = f"of {most}" if size % most == 0 else f"of at most {most}"
            self._changes.add(f"each forward pass of {size} samples runs as {len(pieces)} micro-batches {of}")


def _rounded(weights: Weights) -> Weights:
    return tuple(round(weight, 9) for weight in weights)
