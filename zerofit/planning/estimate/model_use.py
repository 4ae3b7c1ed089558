"""ModelUse: how a script makes and feeds the model that it trains, as far as estimates ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.optimizers.lookup import memory_of, optimizer_of_class
from zerofit.core.strategy import DTYPES, Precision
from zerofit.models.weight_formats import format_of

if TYPE_CHECKING:
    from zerofit.core.capture import Capture, CapturedOptimizer
    from zerofit.core.facts import ModelFacts
    from zerofit.models.weight_formats import WeightFormat
    from zerofit.planning.estimate.batch_lengths import BatchLengths
    from zerofit.planning.estimate.device_memory.optimizers import Stepper

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element; packed and 8-bit weights take at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """How a script makes and feeds its model, whatever the strategy."""

    is_own: bool = False
    """True if the model is the script's own, not of the class that its name stands for."""
    weights: Precision = Precision.FP32
    """Format in which most weights are created or loaded."""
    narrowest_weight_bytes: int = 4
    """Bytes per element of the narrowest weights; 0 if they are packed."""
    has_adapters: bool = False
    """True if the script adds adapters itself."""
    can_checkpoint: bool = True
    """False if the class of a named model does not support gradient checkpointing."""
    has_frozen: bool = False
    """True if some parameters don't train."""
    weight_format: WeightFormat | None = None
    """Format of a quantized checkpoint, or that the script quantizes it to; None for plain weights."""
    optimizer: Stepper = None
    """The script's own, used where the strategy names none; None is foreach AdamW."""
    makes_model_first: bool = False
    """True if the script creates its model outside zero.Init, so that stage 3 gets it whole."""
    loads_weights: bool = True
    """True if weights come from a checkpoint; else each rank initializes them in its own host memory."""
    rows_per_sample: int = 1
    """Rows of the model's input per sample: two for a preference pair."""
    other_weight_bytes: int = 0
    """Bytes per GPU of the script's models beside the one that it trains."""
    lengths: BatchLengths | None = None
    """Lengths of the samples where each batch is padded to its own longest; None if all batches are alike,
    or nothing is known of them."""

    @property
    def is_packed(self) -> bool:
        """True if its weights lie packed on the GPU in a format of their own."""
        return self.weight_format is not None and not self.weight_format.is_whole


def use_of_named(
    facts: ModelFacts,
    weights: Precision,
    *,
    weight_format: WeightFormat | None = None,
    makes_model_first: bool = False,
) -> ModelUse:
    """Return how a script uses a model that it loads from a checkpoint.

    Args:
        weights: the format in which it loads them.
        weight_format: that of a quantized checkpoint.
    """
    narrowest = 4 if weights is Precision.FP32 else 2
    return ModelUse(
        weights=weights,
        weight_format=weight_format,
        narrowest_weight_bytes=0 if weight_format is not None and not weight_format.is_whole else narrowest,
        has_frozen=_has_frozen(facts),
        makes_model_first=makes_model_first,
    )


def use_in_script(capture: Capture) -> ModelUse:
    """Return how a captured script uses its model."""
    model = capture.model
    names = {name.strip() for module in model.modules for name in module.dtype.split(",")}
    narrowest = min(_BYTES.get(name, 1) for name in names or {model.weight_dtype})
    return ModelUse(
        is_own=True,
        weights=DTYPES.get(model.weight_dtype, Precision.FP32),
        weight_format=format_of(model.config),
        narrowest_weight_bytes=0 if model.is_quantized else narrowest,
        has_adapters=bool(model.adapters),
        has_frozen=_has_frozen(model.facts),
        optimizer=own_stepper(capture.optimizer)[0],
        makes_model_first=model.is_made_whole or not model.is_transformers,
        loads_weights=model.loads_weights,
        rows_per_sample=capture.rows_per_sample,
        other_weight_bytes=capture.other_weight_bytes,
    )


def own_stepper(optimizer: CapturedOptimizer | None) -> tuple[Stepper, str]:
    """Return the kind as which estimates count a script's optimizer, and the assumption made.

    Args:
        optimizer: None if the script has several or none.

    Returns:
        The kind, and a sentence that is empty if nothing is assumed.
    """
    if optimizer is None:
        return None, "the optimizer is counted as AdamW, as none or several were seen"
    settings = optimizer.groups[0].settings if optimizer.groups else {}
    memory, is_exact = memory_of(optimizer.class_path, settings)
    if optimizer.steps is not None and not is_exact:
        return optimizer.steps, ""
    name = optimizer_of_class(optimizer.class_path).rpartition(".")[2]
    if memory is None:
        return None, f"{name} is counted as AdamW: what it keeps is not known"
    if memory.is_paged:
        return memory, f"the pages of {name} are counted on the host, where the driver may move them"
    if name.startswith("Paged"):
        return memory, f"the pages of {name} are counted as if they stayed on the GPU"
    return memory, ""


def _has_frozen(facts: ModelFacts) -> bool:
    return facts.num_trainable_parameters < facts.num_parameters
