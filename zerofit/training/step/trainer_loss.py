"""Corrects a Trainer's loss if the model accepts num_items_in_batch but ignores it.

Trainer passes the number of labels in all batches of a step to models that accept keyword arguments, and then
neither divides the loss by the accumulation steps nor omits the factor of the ranks (transformers/trainer.py,
training_step and compute_loss). A model that ignores the number, as BertForTokenClassification does, gets
gradients that are too large by accumulation steps times ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.transformers import COUNTS_ITEMS, loss_shifts_labels
from zerofit.models.pieces import Inputs, batch_of, taken
from zerofit.training.batch.micro_batches.random_state import devices_of, unchanged_random_state
from zerofit.training.batch.micro_batches.separability import evaluation_mode

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_LOOP = ("compute_loss", "get_batch_samples", "train", "training_step", COUNTS_ITEMS)
"""Trainer's methods that decide the weight of a batch's loss in a step (transformers 5.23, trainer.py)."""
_NUM_ITEMS = "num_items_in_batch"
_SAME = 1e-3
"""Relative: losses closer than this count as equal. The other case is a factor of 2."""


def overridden(trainer_class: Any) -> tuple[str, ...]:
    """Return the overridden methods among those that decide the weight of a batch's loss."""
    return tuple(name for name in _LOOP if not is_transformers_own(getattr(trainer_class, name)))


def is_transformers_own(method: Any) -> bool:
    """Return True if a method of a class is defined by transformers, even with a hook around it."""
    return (method.__module__ or "").split(".")[0] == "transformers"


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Weight each batch's loss by its share of the step's labels if the model does not."""
    if not is_transformers_own(trainer_class.compute_loss):
        return {}  # the explicit API hooks a subclass: a script's own loss is unchanged

    def compute_loss(
        original: Any,
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        share = None
        if _is_part_of_more(self, model, inputs, num_items_in_batch) and _ignores_num_items(
            self, model, inputs, num_items_in_batch, at_most=settings.strategy.micro_batch_size
        ):
            share = _num_items(self, inputs) / num_items_in_batch
            changes.add(
                f"each batch's loss counts by its share of the step's labels: {type(self.model).__name__} "
                f"takes {_NUM_ITEMS} and ignores it, and Trainer would make loss and gradients too large by "
                "accumulation steps times ranks"
            )
        result = original(
            self, model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if share is None:
            return result
        return (result[0] * share, *result[1:]) if return_outputs else result * share

    return {"compute_loss": compute_loss}


def _is_part_of_more(trainer: Any, model: Any, inputs: Any, num_items: Any) -> bool:
    """Return True if the counted labels are of more batches than this one, and are passed to the model."""
    if num_items is None or "labels" not in inputs or not trainer.model_accepts_loss_kwargs:
        return False
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None or trainer.args.n_gpu > 1:
        return False
    # A Trainer that only evaluates counts no steps, and DeepSpeed's engine may then be in training mode.
    num_steps = getattr(trainer, "current_gradient_accumulation_steps", 1)
    accumulates = model.training and num_steps > 1
    averages = trainer.args.average_tokens_across_devices and trainer.accelerator.num_processes > 1
    return bool(accumulates or averages)


def _num_items(trainer: Any, inputs: Any) -> Any:
    """Return the labels of one batch, counted as Trainer counts those of a step."""
    labels = inputs["labels"]
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif loss_shifts_labels(trainer):
        labels = labels[..., 1:]
    return labels.ne(-100).sum()


def _ignores_num_items(trainer: Any, model: Any, inputs: Any, num_items: Any, *, at_most: int | None) -> bool:
    """Return True if the model's loss is unchanged when the number of labels is doubled.

    Tested once, with at most the samples of one forward pass. All ranks do this together with the same number
    of forward passes, as ZeRO-3 requires.
    """
    known: bool | None = getattr(trainer, "_zerofit_ignores_num_items", None)
    if known is None:
        import torch

        some = _first(inputs, at_most)
        once = _probed_loss(model, {**some, _NUM_ITEMS: num_items})
        twice = _probed_loss(model, {**some, _NUM_ITEMS: num_items * 2})
        is_clear = math.isfinite(once) and once != 0
        answer = (1 if abs(once - twice) <= _SAME * abs(once) else 0) if is_clear else -1
        answers = trainer.accelerator.gather(torch.tensor([answer], device=trainer.args.device)).tolist()
        if 0 in answers or 1 in answers:
            known = trainer._zerofit_ignores_num_items = 0 not in answers
    return bool(known)


def _first(inputs: Any, at_most: int | None) -> dict[str, Any]:
    """Return the first samples of a batch: all if there is no limit, or they can't be separated."""
    whole = Inputs(args=(), kwargs=dict(inputs))
    batch = batch_of(whole)
    if at_most is None or batch.whole_because is not None or batch.size <= at_most:
        return whole.kwargs
    return taken(whole, slice(at_most), of=batch.size).kwargs


def _probed_loss(model: Any, inputs: dict[str, Any]) -> float:
    """Return the loss of a forward pass without side effects on gradients, random state or running means."""
    import torch

    # A compiled model would be compiled for this pass alone, and once more for its training.
    eager = torch.compiler.set_stance("force_eager")
    with eager, unchanged_random_state(devices_of(model)), evaluation_mode(model):
        outputs = model(**inputs)
    torch.clear_autocast_cache()  # otherwise weights cast here would have no gradient later
    return float(outputs["loss"] if isinstance(outputs, dict) else outputs[0])
