"""Which number formats train: what the change table says of weights, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captures import LOOP, TRAINER, with_model
from small_runs import PLAN

from zerofit.core.capture import Capture, CapturedModule
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.planning.applied_table import applied_rows
from zerofit.planning.number_formats import format_changes
from zerofit.planning.suggestions import Suggestion

_DS: dict[str, Any] = {"engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.GRADIENTS}
_FSDP2: dict[str, Any] = {"engine": Engine.FSDP2}
_OFFLOADED = {**_DS, "optimizer_offload": OffloadDevice.CPU}


def _made_in(dtype: str, capture: Capture, **changes: Any) -> Capture:
    modules = tuple(replace(module, dtype=dtype) for module in capture.model.modules)
    return replace(with_model(capture, weight_dtype=dtype, modules=modules), **changes)


def _with_optimizer(class_path: str, capture: Capture) -> Capture:
    return replace(capture, optimizers=(replace(capture.optimizers[0], class_path=class_path),))


_BF16_BASE_WITH_FP32_ADAPTERS = with_model(
    TRAINER,
    weight_dtype="bfloat16",
    adapters=("LORA",),
    modules=(
        CapturedModule(
            name="base", class_name="Linear", num_parameters=9, num_trainable_parameters=0, dtype="bfloat16"
        ),
        CapturedModule(
            name="lora_A", class_name="Linear", num_parameters=2, num_trainable_parameters=2, dtype="float32"
        ),
    ),
)
_AUTOCAST = "weights: fp32 under autocast -> bf16, with fp32 masters"
_CASES: dict[str, tuple[Capture, Strategy, list[str]]] = {
    "fp32 under autocast, DeepSpeed": (TRAINER, Strategy(**_DS), [_AUTOCAST, "gradients: fp32 -> bf16"]),
    "fp32 under autocast, many micro-batches": (
        TRAINER,
        Strategy(**_DS, gradient_accumulation_steps=8),
        [_AUTOCAST, "gradients: fp32 -> bf16, summed over 8 micro-batches"],
    ),
    "fp32 under autocast, offloaded states": (
        TRAINER,
        Strategy(**_OFFLOADED, precision=Precision.BF16, gradient_accumulation_steps=2),
        [_AUTOCAST, "gradients: fp32 -> bf16, summed over 2 micro-batches"],
    ),
    "fp32 under fp16's autocast": (
        replace(TRAINER, mixed_precision="fp16"),
        Strategy(**_DS),
        ["weights: fp32 under autocast -> fp16, with fp32 masters", "gradients: fp32 -> fp16"],
    ),
    "fp32 under autocast, FSDP2": (TRAINER, Strategy(**_FSDP2), [_AUTOCAST, "gradients: fp32 -> bf16"]),
    "fp32 that the plan runs in bf16": (
        LOOP,
        Strategy(**_DS, precision=Precision.BF16),
        ["weights: fp32 -> bf16, with fp32 masters", "gradients: fp32 -> bf16"],
    ),
    "bf16 gets masters": (
        _made_in("bfloat16", TRAINER),
        Strategy(**_DS),
        ["weights: bf16 alone -> bf16, with fp32 masters", "optimizer states: bf16 -> fp32"],
    ),
    "bf16 gets masters without a named precision": (
        _made_in("bfloat16", LOOP),
        Strategy(**_OFFLOADED, precision=Precision.BF16, gradient_accumulation_steps=4),
        [
            "weights: bf16 alone -> bf16, with fp32 masters",
            "gradients: bf16, summed over 2 micro-batches -> bf16, summed over 4 micro-batches",
            "optimizer states: bf16 -> fp32",
        ],
    ),
    "bf16 weights, more micro-batches alone": (
        _made_in("bfloat16", LOOP),
        Strategy(gradient_accumulation_steps=16),
        ["gradients: bf16, summed over 2 micro-batches -> bf16, summed over 16 micro-batches"],
    ),
    "bf16 weights under an optimizer with 32-bit states of its own": (
        _with_optimizer("bitsandbytes.optim.adamw.AdamW8bit", _made_in("bfloat16", TRAINER)),
        Strategy(**_DS),
        ["weights: bf16 alone -> bf16, with fp32 masters"],
    ),
    "8-bit states replace the script's": (
        _made_in("bfloat16", TRAINER),
        Strategy(**_DS, optimizer=OptimizerName.ADAMW_8BIT),
        ["weights: bf16 alone -> bf16, with fp32 masters"],
    ),
    "fp32 adapters on a bf16 base": (
        _BF16_BASE_WITH_FP32_ADAPTERS,
        Strategy(**_DS),
        [_AUTOCAST, "gradients: fp32 -> bf16"],
    ),
    "the script's own DeepSpeed goes": (
        replace(TRAINER, engine="DeepSpeed ZeRO-3"),
        Strategy(),
        [
            "weights: bf16, with fp32 masters -> fp32 under autocast",
            "gradients: bf16, summed over 2 micro-batches -> fp32",
        ],
    ),
}
_SAME: dict[str, tuple[Capture, Strategy]] = {
    "nothing": (LOOP, Strategy()),
    "fp32 under DeepSpeed": (LOOP, Strategy(**_DS, precision=Precision.FP32)),
    "fp32 under FSDP2": (LOOP, Strategy(**_FSDP2)),
    "fp32 under offload": (LOOP, Strategy(**_OFFLOADED, gradient_accumulation_steps=16)),
    "autocast where the script names none": (LOOP, Strategy(precision=Precision.BF16)),
    "autocast in more micro-batches": (TRAINER, Strategy(gradient_accumulation_steps=16)),
    "bf16 weights as they are": (_made_in("bfloat16", TRAINER), Strategy()),
    "the script's own DeepSpeed": (replace(TRAINER, engine="DeepSpeed ZeRO-2"), Strategy(**_DS)),
    "the script's own FSDP": (replace(TRAINER, engine="FSDP"), Strategy(**_FSDP2)),
    "the script's own FSDP, under DeepSpeed": (replace(TRAINER, engine="FSDP"), Strategy(**_DS)),
    "adapters of the plan": (TRAINER, Strategy(**_DS, lora=Lora(), quantization=Quantization.NF4)),
    "packed weights alone": (_made_in("uint8", TRAINER), Strategy(**_DS)),
}


def _said(capture: Capture, strategy: Strategy) -> list[str]:
    return [
        f"{change.what}: {change.before} -> {change.after}" for change in format_changes(capture, strategy)
    ]


@pytest.mark.parametrize("case", _CASES)
def test_formats_that_change(case: str) -> None:
    capture, strategy, expected = _CASES[case]
    assert _said(capture, strategy) == expected


@pytest.mark.parametrize("case", _SAME)
def test_formats_that_stay(case: str) -> None:
    assert _said(*_SAME[case]) == []


@pytest.mark.parametrize("case", _CASES)
def test_each_change_is_a_row_with_its_reason(case: str) -> None:
    capture, strategy, expected = _CASES[case]
    plan = replace(PLAN, strategy=strategy, topology=Topology(world_size=2), capture=capture)
    rows = {f"{row.what}: {row.script_says} -> {row.runs}": row.why for row in applied_rows(plan)}
    assert all(rows[said] for said in expected)


def test_generation_changes_no_formats_that_train() -> None:
    plan = replace(PLAN, strategy=Strategy(**_DS), topology=Topology(world_size=2), trains=False)
    rows = applied_rows(replace(plan, capture=TRAINER))
    assert not {row.what for row in rows} & {"weights", "gradients", "optimizer states"}


def test_an_engine_that_the_user_set_is_what_formats_are_compared_with() -> None:
    stage_3 = Strategy(**{**_DS, "zero_stage": ZeroStage.PARAMETERS})
    assert format_changes(TRAINER, stage_3, beside=Engine.DEEPSPEED) == ()
    assert [change.what for change in format_changes(TRAINER, stage_3, beside=Engine.NATIVE)] == [
        "weights",
        "gradients",
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "the same results"),
        (
            {"other_formats": ("weights bf16, with fp32 masters",)},
            "rounds otherwise: weights bf16, with fp32 masters",
        ),
        (
            {"rounds_more": ("bf16",), "other_formats": ("gradients fp32 -> bf16",)},
            "rounds more: bf16; rounds otherwise: gradients fp32 -> bf16",
        ),
        (
            {"trains_other": ("adapters alone",), "other_formats": ("gradients fp32 -> bf16",)},
            "changes what is trained: adapters alone; rounds otherwise: gradients fp32 -> bf16",
        ),
        ({"trains_other": ("adapters alone",)}, "changes what is trained: adapters alone"),
    ],
)
def test_a_suggestion_gives_the_same_results_only_in_the_same_formats(
    fields: dict[str, Any], words: str
) -> None:
    nothing: dict[str, Any] = {"trains_other": (), "rounds_more": (), **fields}
    best: Any = None  # the words don't depend on it
    assert Suggestion(change="", changes=(), best=best, is_close=False, **nothing).results == words
