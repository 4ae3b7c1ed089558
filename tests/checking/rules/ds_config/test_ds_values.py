"""Single values in ds_config.json: types, choices and limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Verdict
from zerofit.configs.document import SetValue
from zerofit.core.command import Route

_M = {"train_micro_batch_size_per_gpu": 4}
_NO_EDIT = ("no edit",)


def _zero(**more: Any) -> dict[str, Any]:
    return {**_M, "zero_optimization": {"stage": 2, **more}}


_REFUSED: list[tuple[dict[str, Any], str, str, Any]] = [
    (_zero(stage=4), "zero_optimization.stage=4", "give 0, 1, 2 or 3", _NO_EDIT),
    (_zero(stage="two"), "zero_optimization.stage=two", "give 0, 1, 2 or 3", _NO_EDIT),
    (
        _zero(reduce_bucket_size="5e8"),
        "zero_optimization.reduce_bucket_size=5e8",
        "give a whole number greater than 0",
        500_000_000,
    ),
    (
        _zero(reduce_bucket_size=0),
        "zero_optimization.reduce_bucket_size=0",
        "give a whole number greater than 0",
        _NO_EDIT,
    ),
    (
        _zero(reduce_bucket_size=None),
        "zero_optimization.reduce_bucket_size=null",
        "give a whole number greater than 0",
        _NO_EDIT,
    ),
    (
        _zero(contiguous_gradients="maybe"),
        "zero_optimization.contiguous_gradients=maybe",
        "give true or false",
        _NO_EDIT,
    ),
    (_zero(offload_optimizer="cpu"), "zero_optimization.offload_optimizer=cpu", "give a mapping", _NO_EDIT),
    (
        _zero(offload_optimizer={"device": "CPU"}),
        "zero_optimization.offload_optimizer.device=CPU",
        "give none, cpu or nvme",
        "cpu",
    ),
    (
        _zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 1.5}),
        "zero_optimization.offload_optimizer.ratio=1.5",
        "give a number of at least 0 and of at most 1",
        _NO_EDIT,
    ),
    (
        {**_zero(), "gradient_accumulation_steps": "8"},
        "gradient_accumulation_steps=8",
        "give a whole number of at least 1",
        8,
    ),
    (
        {**_zero(), "gradient_accumulation_steps": 0},
        "gradient_accumulation_steps=0",
        "give a whole number of at least 1",
        _NO_EDIT,
    ),
    ({**_zero(), "gradient_clipping": "1.0"}, "gradient_clipping=1.0", "give a number", 1),
    ({**_zero(), "wall_clock_breakdown": "false"}, "wall_clock_breakdown=false", "give true or false", False),
    (
        {**_zero(), "communication_data_type": "float16"},
        "communication_data_type=float16",
        "give fp16, bf16 or fp32",
        _NO_EDIT,
    ),
    (
        {**_zero(), "activation_checkpointing": None},
        "activation_checkpointing=null",
        "give a mapping",
        _NO_EDIT,
    ),
    (
        {**_zero(), "checkpoint": {"tag_validation": "maybe"}},
        "checkpoint.tag_validation=maybe",
        "give Warn, Ignore or Fail",
        _NO_EDIT,
    ),
    (
        {**_zero(), "fp16": {"min_loss_scale": 0.5}},
        "fp16.min_loss_scale=0.5",
        "give a whole number",
        _NO_EDIT,
    ),
    (
        {**_zero(), "fp16": {"loss_scale": "dynamic"}},
        "fp16.loss_scale=dynamic",
        "give a number of at least 0",
        _NO_EDIT,
    ),
    (
        {**_zero(), "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        "scheduler.params.warmup_num_steps=0",
        "give a whole number greater than 0",
        _NO_EDIT,
    ),
    (
        {**_zero(), "optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}},
        "optimizer.params.lr=1e-3",
        "give a number",
        0.001,
    ),
]


@pytest.mark.parametrize(("config", "found", "fix", "value"), _REFUSED, ids=lambda case: str(case)[:60])
def test_refused_values(
    config: dict[str, Any], found: str, fix: str, value: Any, verdict: Callable[..., Verdict]
) -> None:
    (finding,) = verdict(config, route=Route.NATIVE).findings
    path = tuple(found.partition("=")[0].split("."))
    edits = () if value is _NO_EDIT else (SetValue(document="ds_config.json", path=path, value=value),)
    assert (finding.rule, finding.found, finding.fix) == ("deepspeed-value-refused", found, fix)
    assert finding.edits == edits


@pytest.mark.parametrize(
    "config",
    [
        _zero(stage="2"),
        _zero(reduce_bucket_size=5e8),
        _zero(reduce_bucket_size="500000000"),
        _zero(overlap_comm=None),
        _zero(contiguous_gradients="Yes"),
        _zero(offload_optimizer=None),
        _zero(leaf_module={"classes": "Block"}),
        {**_zero(), "gradient_accumulation_steps": 2.0},
        {**_zero(), "gradient_clipping": 0},
        {**_zero(), "wall_clock_breakdown": 0},
        {**_zero(), "communication_data_type": "FP16"},
        {**_zero(), "checkpoint": {"tag_validation": "WARN", "writer": None}},
        {**_zero(), "aio": None},
        {**_zero(), "flops_profiler": {"profile_step": "x"}},  # not looked at before the profiler is on
        # While DeepSpeed tunes, a list holds the values to try.
        {**_zero(stage=[1, 2]), "autotuning": {"enabled": True}},
    ],
    ids=str,
)
def test_values_that_deepspeed_takes(config: dict[str, Any], found: Callable[..., list[str]]) -> None:
    assert found(config, route=Route.NATIVE) == []


def test_what_accelerate_overwrites_counts_natively_only(verdict: Callable[..., Verdict]) -> None:
    config = {**_zero(), "steps_per_print": 0}
    (finding,) = verdict(config, route=Route.NATIVE).findings
    assert (finding.found, finding.fix) == ("steps_per_print=0", "give a number greater than 0")
    assert verdict(config, route=Route.ACCELERATE).findings == ()
    unknown = [(u.rule, u.fact) for u in verdict(config).unknown]
    assert ("deepspeed-value-refused", "who reads the file") in unknown


def test_an_open_question_keeps_no_certain_finding_back(found: Callable[..., list[str]]) -> None:
    config = {"steps_per_print": 0, **_zero(stage=4)}
    assert found(config) == ["deepspeed-value-refused: zero_optimization.stage=4"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dump_state": "false"}, ['deepspeed-text-is-true: dump_state="false"']),
        ({"dump_state": "true"}, []),
        ({"aio": {"single_submit": "No"}}, ['deepspeed-text-is-true: aio.single_submit="No"']),
        ({"zero_optimization": {"stage": 2, "overlap_comm": "false"}}, []),
    ],
)
def test_texts_for_booleans(
    config: dict[str, Any], expected: list[str], found: Callable[..., list[str]]
) -> None:
    assert found({**_zero(), **config}, route=Route.NATIVE) == expected
