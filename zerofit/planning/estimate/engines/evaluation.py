"""play_evaluation: the batches that a Trainer evaluates, after an engine's optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.estimates import RunPhase
from zerofit.planning.estimate.engines.engine import hooks_of, sizes_of, terms_of

if TYPE_CHECKING:
    from zerofit.core.allocation_log import AllocationLog
    from zerofit.planning.estimate.engines.engine import SimulatedEngine

KEPT = TensorKind.KEPT.value
_PLAYED_BATCHES = 256
"""Batches whose predictions are copied behind each other on the tape, at most: the last ones. ASSUMPTION:
what the allocator caches of earlier ones is no longer there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The batches that a Trainer evaluates before it moves their predictions to the host."""

    log: AllocationLog
    """Of one batch; what is left of it is kept."""
    batch_size: int
    """Samples per rank in one batch."""
    num_batches: int
    """Batches whose predictions come together on each rank."""
    num_ranks: int
    """Ranks whose predictions each rank gathers."""
    concatenates: bool = True
    """True if each batch's are copied behind those of the batches before."""
    num_lacking: int = 0
    """Samples by which the last batch of all ranks is not full. Ranks evaluate and gather a full one, with
    samples repeated, which are not kept (accelerate/accelerator.py, gather_for_metrics)."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage of the log."""
        return sizes_of(self.log, self.batch_size)

    @property
    def kept_sizes(self) -> list[int]:
        """Bytes of each tensor that one rank keeps of a batch."""
        return [
            size
            for size, kind in zip(self.sizes, self.log.storages.kinds, strict=True)
            if kind is TensorKind.KEPT and size
        ]


def play_evaluation(engine: SimulatedEngine, evaluation: Evaluation) -> None:
    """Play the batches on the engine's tape, up to the copy of the predictions to the host.

    A single batch is taken for one of many whose predictions do not come together, and is played twice.
    Trainer holds a batch's predictions through the next forward pass, gathers them over the ranks, and copies
    them behind those that it has, which are there as long as the copy is made.
    Source: transformers 5.23, trainer.py, evaluation_loop; trainer_pt_utils.py, EvalLoopContainer.
    """
    tape = engine.tape
    tape.begin(RunPhase.EVALUATE)
    gathered = [size * evaluation.num_ranks for size in evaluation.kept_sizes]
    in_a_batch = evaluation.batch_size * evaluation.num_ranks
    if evaluation.num_batches <= 1:  # ZeRO-3 leaves weights gathered, which a later batch finds
        engine.drop(_play_batch(engine, evaluation))
    earlier = max(0, evaluation.num_batches - _PLAYED_BATCHES)
    held = [tape.allocate(size * earlier, KEPT) for size in gathered if earlier]
    batch: list[int] = []
    """Of the last batch, where they are not the same tensors as those held."""
    for number in range(earlier, max(1, evaluation.num_batches)):
        if number in (earlier, evaluation.num_batches - 1) or evaluation.num_batches <= 1:
            own = _play_batch(engine, evaluation)
        else:
            own = [tape.allocate(size, KEPT) for size in evaluation.kept_sizes]
        engine.drop(batch)
        batch = own
        if evaluation.num_ranks > 1:
            batch = [tape.allocate(size, KEPT) for size in gathered]
            engine.drop(own)
        if not held:
            held, batch = batch, []
        elif not evaluation.concatenates:
            held, batch = [*held, *batch], []
        else:
            is_last = number == evaluation.num_batches - 1
            num_samples = (number + 1) * in_a_batch - (evaluation.num_lacking if is_last else 0)
            longer = [tape.allocate(size * num_samples // in_a_batch, KEPT) for size in gathered]
            engine.drop(held)
            held = longer
    engine.drop([*batch, *held])


def _play_batch(engine: SimulatedEngine, evaluation: Evaluation) -> list[int]:
    """Play the forward pass of a batch, and return the blocks of what Trainer keeps of it."""
    log, sizes, blocks = evaluation.log, evaluation.sizes, dict[int, int]()
    engine.tape.write_events(
        zip(log.codes, log.arguments, strict=True),
        blocks,
        sizes=sizes,
        terms=terms_of(log),
        hooks=hooks_of(engine),
        streams=log.storages.streams,
    )
    kept = {storage for storage in blocks if log.storages.kinds[storage] is TensorKind.KEPT}
    engine.drop(block for storage, block in blocks.items() if storage not in kept)
    return [blocks[storage] for storage in sorted(kept) if sizes[storage]]
