"""What the optimizer of a captured script costs: its class and settings to a kind that estimates know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.optimizer import optimizer_of_class
from zerofit.core.strategy import OptimizerName
from zerofit.planning.estimate.device_memory.optimizers import OneState, Stepper

if TYPE_CHECKING:
    from zerofit.core.capture import CapturedOptimizer

_TWO_STATES = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta")
_ONE_STATE = ("SGD", "RMSprop", "Adagrad", "Lion", "Muon", "ASGD", "LARS")
"""Classes by name, those of torch and of bitsandbytes; their step() shows what they keep of a parameter."""
_TWO = {
    (False, False): OptimizerName.ADAMW,
    (False, True): OptimizerName.PAGED_ADAMW,
    (True, False): OptimizerName.ADAMW_8BIT,
    (True, True): OptimizerName.PAGED_ADAMW_8BIT,
}
_BITSANDBYTES = {
    "Adam": _TWO,
    "AdamW": _TWO,
    "Lion": {
        (False, False): OptimizerName.LION,
        (False, True): OptimizerName.LION,
        (True, False): OptimizerName.LION_8BIT,
        (True, True): OptimizerName.PAGED_LION_8BIT,
    },
}
"""bitsandbytes' families: what each is in (8 bit, paged)."""


def own_stepper(optimizer: CapturedOptimizer | None) -> tuple[Stepper, str]:
    """Return the kind that estimates count a script's optimizer as, and what of that is assumed.

    Args:
        optimizer: the one that trains; None where there are several or none was seen.

    Returns:
        The kind, and one sentence; it is empty where nothing is assumed.
    """
    if optimizer is None:
        return None, "the optimizer is counted as AdamW, as none or several were seen"
    settings = optimizer.groups[0].settings if optimizer.groups else {}
    library, _, name = optimizer_of_class(optimizer.class_path).partition(".")
    is_paged, name = name.startswith("Paged"), name.removeprefix("Paged")
    family = name.removesuffix("8bit").removesuffix("32bit")
    has_8_bit = name.endswith("8bit")
    kind: Stepper
    if library == "other" or family not in (*_TWO_STATES, *_ONE_STATE, "Adafactor"):
        shown = optimizer.class_path.rpartition(".")[2]
        if name in ("FusedAdam", "DeepSpeedCPUAdam"):
            return OptimizerName.ADAMW, ""
        return None, f"{shown} is counted as AdamW: what it keeps is not known"
    if family == "Adafactor":
        kind = OptimizerName.ADAFACTOR
    elif library == "bitsandbytes" and family in _BITSANDBYTES:
        kind = _BITSANDBYTES[family][has_8_bit, is_paged]
    elif family in _TWO_STATES:
        kind = OptimizerName.ADAMW if settings.get("fused") is True else None
    elif family == "SGD" and not settings.get("momentum"):
        kind = OptimizerName.SGD
    else:
        kind = OneState.EIGHT_BIT if has_8_bit else OneState.FULL
    if settings.get("amsgrad"):
        return kind, f"{name} is counted without the third state that amsgrad keeps"
    if is_paged and kind is OptimizerName.LION:
        return kind, "the pages of PagedLion are counted as if they stayed on the GPU"
    if is_paged:
        return (
            kind,
            f"the pages of Paged{name} are counted on the host, where the driver may move them",
        )
    return kind, ""
