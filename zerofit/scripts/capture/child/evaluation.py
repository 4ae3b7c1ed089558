"""What a Trainer evaluates on: its batches, and what it keeps of their predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import CapturedEvaluation
from zerofit.scripts.capture.child import batches as reading
from zerofit.scripts.capture.child.model_record import padding_of
from zerofit.scripts.capture.child.script_source import called_methods, own_sources

if TYPE_CHECKING:
    from zerofit.scripts.capture.child.observations import Observations


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A Trainer's evaluation, with a batch to trace."""

    captured: CapturedEvaluation
    inputs: Any
    """The first batch."""


def evaluated_by(trainer: Any, seen: Observations) -> Evaluated | None:
    """Return what a Trainer evaluates on; None if it does not, or its batches can't be read."""
    args, dataset = trainer.args, trainer.eval_dataset
    is_certain = _strategy(args) != "no"
    if dataset is None or not (is_certain or called_methods(own_sources().values()).evaluates):
        return None
    try:
        loader = trainer.get_eval_dataloader(_largest(dataset))
    except Exception as error:  # from the script's own dataset
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        seen.note(f"memory of evaluation is not counted: {said}")
        return None
    read = reading.first_batches(loader, seen.spec.num_batches, seen.note)
    if not read:
        return None
    padding = padding_of(trainer.accelerator.unwrap_model(trainer.model))
    batches = tuple(reading.captured_batch(batch, padding=padding) for batch in read)
    most = getattr(args, "max_length", None)
    takes_batches = bool(getattr(args, "batch_eval_metrics", False))
    captured = CapturedEvaluation(
        batch_size=int(args.per_device_eval_batch_size),
        num_samples=_length(loader.dataset),
        batches=batches,
        lengths=reading.captured_lengths(loader, batches, most=most if isinstance(most, int) else None),
        keeps_predictions=_keeps_predictions(trainer),
        moves_every=1 if takes_batches else args.eval_accumulation_steps,
        concatenates=bool(getattr(args, "eval_do_concat_batches", True)),
        takes_batches=takes_batches,
        is_certain=is_certain,
    )
    return Evaluated(captured=captured, inputs=read[0])


def _strategy(args: Any) -> str:
    """Return when training evaluates; transformers up to 4.45 has another name for it."""
    value = getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", "no")
    return str(getattr(value, "value", value))


def _largest(dataset: Any) -> Any:
    """Return the name of the largest of several datasets, each of which Trainer evaluates by itself.

    None for a single dataset, as get_eval_dataloader() takes it.
    """
    if not isinstance(dataset, Mapping):
        return None
    return max(dataset, key=lambda name: _length(dataset[name]) or 0)


def _keeps_predictions(trainer: Any) -> bool:
    """Return True if predictions of a batch, of all ranks, stay on the GPU after its forward pass.

    Source: transformers 5.23, trainer.py, evaluate() and evaluation_loop().
    """
    return trainer.compute_metrics is not None and not trainer.args.prediction_loss_only


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
