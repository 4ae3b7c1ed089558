"""What a script's own optimizer is counted as."""

from __future__ import annotations

from typing import Any

import pytest
from captured_scripts import optimizer

from zerofit.core.strategy import OptimizerName
from zerofit.planning.estimate.device_memory.optimizers import OneState, Stepper
from zerofit.planning.from_capture import own_stepper


@pytest.mark.parametrize(
    ("class_path", "settings", "kind", "note"),
    [
        ("torch.optim.adamw.AdamW", {}, None, ""),
        ("torch.optim.adamw.AdamW", {"fused": True}, OptimizerName.ADAMW, ""),
        ("torch.optim.adam.Adam", {"fused": None}, None, ""),
        (
            "torch.optim.adamw.AdamW",
            {"amsgrad": True},
            None,
            "AdamW is counted without the third state that amsgrad keeps",
        ),
        ("torch.optim.sgd.SGD", {"momentum": 0}, OptimizerName.SGD, ""),
        ("torch.optim.sgd.SGD", {"momentum": 0.9}, OneState.FULL, ""),
        ("torch.optim.rmsprop.RMSprop", {}, OneState.FULL, ""),
        ("torch.optim.adagrad.Adagrad", {}, OneState.FULL, ""),
        ("torch.optim._adafactor.Adafactor", {}, OptimizerName.ADAFACTOR, ""),
        ("transformers.optimization.Adafactor", {}, OptimizerName.ADAFACTOR, ""),
        ("bitsandbytes.optim.adamw.AdamW", {}, OptimizerName.ADAMW, ""),
        ("bitsandbytes.optim.adamw.AdamW8bit", {}, OptimizerName.ADAMW_8BIT, ""),
        (
            "bitsandbytes.optim.adamw.PagedAdamW8bit",
            {},
            OptimizerName.PAGED_ADAMW_8BIT,
            "the pages of PagedAdamW8bit are counted on the host, where the driver may move them",
        ),
        (
            "bitsandbytes.optim.adam.PagedAdam32bit",
            {},
            OptimizerName.PAGED_ADAMW,
            "the pages of PagedAdam32bit are counted on the host, where the driver may move them",
        ),
        (
            "bitsandbytes.optim.lion.PagedLion",
            {},
            OptimizerName.LION,
            "the pages of PagedLion are counted as if they stayed on the GPU",
        ),
        ("bitsandbytes.optim.lion.Lion8bit", {}, OptimizerName.LION_8BIT, ""),
        ("bitsandbytes.optim.lion.Lion", {}, OptimizerName.LION, ""),
        ("bitsandbytes.optim.rmsprop.RMSprop", {}, OneState.FULL, ""),
        ("bitsandbytes.optim.rmsprop.RMSprop8bit", {}, OneState.EIGHT_BIT, ""),
        ("deepspeed.ops.adam.fused_adam.FusedAdam", {}, OptimizerName.ADAMW, ""),
        ("mine.Sophia", {}, None, "Sophia is counted as AdamW: what it keeps is not known"),
        (
            "bitsandbytes.optim.ademamix.AdEMAMix",
            {},
            None,
            "AdEMAMix is counted as AdamW: what it keeps is not known",
        ),
    ],
)
def test_classes_are_known_by_what_they_keep(
    class_path: str, settings: dict[str, Any], kind: Stepper, note: str
) -> None:
    assert own_stepper(optimizer(class_path, **settings)) == (kind, note)


def test_several_optimizers_are_counted_as_adamw() -> None:
    kind, note = own_stepper(None)
    assert (kind, note) == (None, "the optimizer is counted as AdamW, as none or several were seen")
