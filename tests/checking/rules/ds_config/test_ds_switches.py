"""Switches in ds_config.json that exclude or need one another, and spellings that only DeepSpeed knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Verdict
from zerofit.configs.document import RemoveKey, RenameKey, SetValue
from zerofit.core.command import Route

_ON = {"enabled": True}
_GATHER = "stage3_gather_16bit_weights_on_model_save"


def _zero(stage: Any = 2, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**_zero(), "fp16": _ON}, []),
        (
            {**_zero(), "fp16": {"enabled": "True"}, "bf16": {"enabled": 1}},
            ["deepspeed-fp16-and-bf16: fp16.enabled=True with bf16.enabled=1"],
        ),
        (
            {**_zero(), "fp16": _ON, "bfloat16": _ON},
            ["deepspeed-fp16-and-bf16: fp16.enabled=true with bfloat16.enabled=true"],
        ),
        # The old section counts only where the new one is missing.
        ({**_zero(), "fp16": _ON, "bfloat16": _ON, "bf16": {"enabled": False}}, []),
        (
            {**_zero(), "fp16": {**_ON, "loss_scale_window": 0}},
            ["deepspeed-loss-scale-limits: fp16.loss_scale_window=0"],
        ),
        ({**_zero(), "fp16": {**_ON, "loss_scale": 128, "min_loss_scale": 0}}, []),
        (
            _zero(3, compute_grad_norm=False),
            [
                "no-grad-norm-needs-zero1-or-2: zero_optimization.compute_grad_norm=false "
                "with zero_optimization.stage=3"
            ],
        ),
        (_zero(1, compute_grad_norm=False), []),
        (
            _zero(0, offload_optimizer={"device": "none", "ratio": 0.5}),
            [
                "partial-offload-needs-zero3: zero_optimization.offload_optimizer.ratio=0.5 "
                "with zero_optimization.stage=0"
            ],
        ),
        (
            {**_zero(0), "fp16": {"fp16_master_weights_and_grads": True}},
            [
                "low-precision-masters-need-zero: fp16.fp16_master_weights_and_grads=true "
                "with zero_optimization.stage=0"
            ],
        ),
        (
            {**_zero(1), "bf16": {"bf16_optimizer_states": True}},
            [
                "bf16-states-need-bf16-masters: bf16.bf16_optimizer_states=true "
                "with no bf16.bf16_master_weights_and_grads"
            ],
        ),
        (
            {**_zero(1), "gradient_allreduce_op": "SUM", "compile": {"deepcompile": True}},
            ["summed-gradients-below-zero3: gradient_allreduce_op=SUM with compile.deepcompile=true"],
        ),
        ({**_zero(1), "gradient_allreduce_op": "sum"}, []),
        (
            {**_zero(2), "gradient_predivide_factor": 2.0},
            ["prescaled-gradients-with-zero2: gradient_predivide_factor=2.0 with zero_optimization.stage=2"],
        ),
        ({**_zero(2, reduce_scatter=False), "prescale_gradients": True}, []),
        ({**_zero(1), "prescale_gradients": True}, []),
        (
            _zero(2, zero_quantized_weights=True, zero_hpz_partition_size=8),
            [
                "zeropp-needs-zero3: zero_optimization.zero_quantized_weights=true "
                "with zero_optimization.stage=2",
                "zeropp-needs-zero3: zero_optimization.zero_hpz_partition_size=8 "
                "with zero_optimization.stage=2",
            ],
        ),
        (_zero(2, zero_quantized_gradients=False, zero_hpz_partition_size=1), []),
        (_zero(3, zero_quantized_gradients=True, zero_hpz_partition_size=8), []),
        ({**_zero(), "gradient_clipping": -1}, ["negative-norm-clips-nothing: gradient_clipping=-1"]),
        ({**_zero(), "gradient_clipping": 0}, []),
    ],
    ids=str,
)
def test_switches(config: dict[str, Any], expected: list[str], found: Callable[..., list[str]]) -> None:
    assert found(config, route=Route.NATIVE) == expected


@pytest.mark.parametrize(
    ("config", "route", "expected"),
    [
        (_zero(3), Route.TRAINER, [f"zero_optimization.stage=3 with no zero_optimization.{_GATHER}"]),
        (
            _zero(3, **{_GATHER: False}),
            Route.ACCELERATE,
            [f"zero_optimization.stage=3 with zero_optimization.{_GATHER}=false"],
        ),
        (_zero(3, **{_GATHER: True}), Route.TRAINER, []),
        # DeepSpeed knows the alias, and accelerate asks DeepSpeed.
        (_zero(3, gather_16bit_weights_on_model_save=True), Route.ACCELERATE, []),
        (_zero(2), Route.TRAINER, []),
        (_zero(3), Route.NATIVE, []),
    ],
    ids=str,
)
def test_whole_weights_at_zero3(
    config: dict[str, Any], route: Route, expected: list[str], verdict: Callable[..., Verdict]
) -> None:
    findings = verdict(config, route=route).findings
    assert [(f.rule, f.found) for f in findings] == [("zero3-weights-need-gather", text) for text in expected]


@pytest.mark.parametrize(
    ("stage", "route", "is_found"),
    [
        ("3", Route.ACCELERATE, True),
        (" 3", Route.TRAINER, True),
        ("3", Route.NATIVE, False),
        (3, Route.TRAINER, False),
        ("2", Route.TRAINER, False),  # compared with 3 only
    ],
)
def test_zero3_as_a_text(stage: Any, route: Route, is_found: bool, verdict: Callable[..., Verdict]) -> None:
    findings = verdict(_zero(stage, **{_GATHER: True}), route=route).findings
    edit = SetValue(document="ds_config.json", path=("zero_optimization", "stage"), value=3)
    expected = [("zero-stage-is-a-number", f'zero_optimization.stage="{stage}", a text', (edit,))]
    assert [(f.rule, f.found, f.edits) for f in findings] == (expected if is_found else [])


def test_auto_for_gathering_asks_for_the_command_line(verdict: Callable[..., Verdict]) -> None:
    said = verdict(_zero(3, **{_GATHER: "auto"}), route=Route.ACCELERATE)
    assert [(u.rule, u.fact) for u in said.unknown] == [("zero3-weights-need-gather", "the launch command")]


def test_the_old_name_of_bf16(verdict: Callable[..., Verdict]) -> None:
    config = {**_zero(), "bfloat16": _ON}
    for route in (Route.ACCELERATE, Route.TRAINER):
        (finding,) = verdict(config, route=route).findings
        assert (finding.rule, finding.found) == ("bfloat16-is-bf16", "bfloat16.enabled=true")
        assert finding.edits == (RenameKey(document="ds_config.json", path=("bfloat16",), key="bf16"),)
    assert verdict(config, route=Route.NATIVE).findings == ()


def test_the_old_switch_of_offload(found: Callable[..., list[str]]) -> None:
    config = _zero(cpu_offload=True)
    expected = "zero_optimization.cpu_offload=true"
    assert found(config, route=Route.TRAINER) == [f"cpu-offload-is-offload-optimizer: {expected}"]
    assert found(config) == [f"deepspeed-key-deprecated: {expected}"]
    assert found({**config, "optimizer": {"type": "AdamW"}}, route=Route.TRAINER) == [
        f"deepspeed-key-deprecated: {expected}"
    ]


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (_zero(offload_optimizer=None), [("zero_optimization", "offload_optimizer")]),
        ({**_zero(), "bf16": None}, [("bf16",)]),
        # accelerate looks there for an optimizer of the script only.
        ({**_zero(offload_optimizer=None), "optimizer": {"type": "AdamW"}}, []),
        (_zero(offload_param=None), []),
    ],
    ids=str,
)
def test_sections_that_are_null(
    config: dict[str, Any], paths: list[tuple[str, ...]], verdict: Callable[..., Verdict]
) -> None:
    findings = verdict(config, route=Route.TRAINER).findings
    assert [(f.rule, f.found, f.edits) for f in findings] == [
        (
            "deepspeed-section-is-null",
            f"{'.'.join(path)}=null",
            (RemoveKey(document="ds_config.json", path=path),),
        )
        for path in paths
    ]
    assert verdict(config, route=Route.NATIVE).findings == ()


@pytest.mark.parametrize(
    ("text", "route", "expected"),
    [
        ('{"a": 1', Route.NATIVE, "deepspeed-syntax"),
        ('{"train_batch_size": 8, "zero_optimization": {},}', Route.TRAINER, "deepspeed-hjson-needs-native"),
        ('{"train_batch_size": 8, "zero_optimization": {},}', Route.NATIVE, None),
        ('{"train_batch_size": 8}', Route.TRAINER, "deepspeed-zero-section-missing"),
        (
            '{"train_batch_size": 8, "zero_optimization": true}',
            Route.TRAINER,
            "deepspeed-zero-section-missing",
        ),
        ('{"train_batch_size": 8, "zero_optimization": true}', Route.NATIVE, None),
        ('{"train_batch_size": 8}', Route.NATIVE, None),
    ],
)
def test_files(text: str, route: Route, expected: str | None, verdict: Callable[..., Verdict]) -> None:
    findings = verdict(text, route=route).findings
    assert [f.rule for f in findings] == ([expected] if expected else [])
