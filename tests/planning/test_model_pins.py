"""What of a script's model and batches can't be changed from outside, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captured_scripts import capture

from zerofit.core.capture import Capture
from zerofit.core.plan import Topology
from zerofit.planning.constraints import constraints_of

_LOADER = capture().loader
_LENGTHS = capture().lengths
assert _LOADER
assert _LENGTHS
_NUM_SEEN = sum(len(batch.lengths) for batch in capture().batches)


@pytest.mark.parametrize(
    ("captured", "field", "values", "why"),
    [
        (
            capture(model_adapters=("LORA",)),
            "lora",
            (None,),
            "the script has adapters of its own (LORA)",
        ),
        (
            capture(num_models=2),
            "freeze",
            ((),),
            "the script prepares 2 models, and a flag names none of them",
        ),
        (
            capture(model_is_quantized=True),
            "quantization",
            (None,),
            "the script quantizes its weights itself, and has no adapters beside them",
        ),
        (
            capture(model_loads_weights=False),
            "quantization",
            (None,),
            "weights are quantized as from_pretrained() reads them, and the script makes its model without",
        ),
        (
            capture(model_is_transformers=False, model_class_path="train.MyNet"),
            "quantization",
            (None,),
            "MyNet is no model of transformers, which would quantize its weights as it loads them",
        ),
        (
            capture(model_is_transformers=False),
            "attention",
            (None,),
            "the script's model has its own attention",
        ),
        (
            capture(model_is_transformers=False, model_class_path="train.MyNet"),
            "liger",
            (False,),
            "Liger's kernels stand in for transformers' modules, and MyNet has none",
        ),
        (
            capture(model_can_checkpoint=False, model_class_path="train.MyNet"),
            "checkpoint_every",
            (1,),
            "MyNet has no gradient checkpointing of transformers",
        ),
        (
            capture(lengths=None),
            "group_by_length",
            (False,),
            "the samples of the script have no tokens to be alike in",
        ),
        (
            capture(loader=replace(_LOADER, num_samples=None)),
            "group_by_length",
            (False,),
            "the script reads its samples as a stream, whose order is not ours to choose",
        ),
        (
            capture(loader=replace(_LOADER, batch_size=None, sampler="MyBatches")),
            "group_by_length",
            (False,),
            "the script makes its batches itself (MyBatches)",
        ),
        (
            capture(loader=replace(_LOADER, sampler="SequentialSampler")),
            "group_by_length",
            (False,),
            "the script does not shuffle: the order of its samples is its own (SequentialSampler)",
        ),
        (
            capture(lengths=replace(_LENGTHS, is_whole=False, num_samples=_NUM_SEEN)),
            "group_by_length",
            (False,),
            "the script's dataset tells no lengths: it has no column input_ids or length, no field lengths",
        ),
    ],
)
def test_what_can_not_be_changed_is_pinned_with_a_reason(
    captured: Capture, field: str, values: tuple[Any, ...], why: str
) -> None:
    pins = constraints_of(captured, topology=Topology(world_size=2)).pins
    assert [(pin.values, pin.why) for pin in pins if pin.field == field] == [(values, why)]


def test_lengths_of_more_samples_than_were_seen_leave_batches_free() -> None:
    captured = capture(lengths=replace(_LENGTHS, is_whole=False, num_samples=_NUM_SEEN + 1))
    pins = constraints_of(captured, topology=Topology(world_size=2)).pins
    assert "group_by_length" not in {pin.field for pin in pins}
