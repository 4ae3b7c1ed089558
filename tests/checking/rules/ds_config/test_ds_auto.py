""" "auto" in ds_config.json, by who reads the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Verdict
from zerofit.core.command import Route

_UNRESOLVED = "deepspeed-auto-unresolved"
_SWITCHES_OFF = "deepspeed-auto-switches-off"


def _nested(path: str) -> dict[str, Any]:
    value: Any = "auto"
    for name in reversed(path.split(".")):
        value = {name: value}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    for name, below in value.items():
        config[name] = {**config.get(name, {}), **below} if isinstance(below, dict) else below
    if "optimizer" in config:
        config["optimizer"].setdefault("type", "AdamW")
    if "scheduler" in config:
        config["scheduler"].setdefault("type", "WarmupDecayLR")
    return config


@pytest.mark.parametrize(
    ("path", "accelerate", "trainer", "native"),
    [
        ("train_micro_batch_size_per_gpu", None, None, _UNRESOLVED),
        ("train_batch_size", None, None, _UNRESOLVED),
        ("gradient_accumulation_steps", None, None, _UNRESOLVED),
        ("gradient_clipping", None, None, _UNRESOLVED),
        ("zero_optimization.stage", None, None, _SWITCHES_OFF),
        ("zero_optimization.offload_optimizer.device", None, None, _SWITCHES_OFF),
        ("fp16.enabled", None, None, _SWITCHES_OFF),
        ("bf16.enabled", None, None, _SWITCHES_OFF),
        ("zero_optimization.reduce_bucket_size", None, None, None),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", None, None, None),
        ("zero_optimization.overlap_comm", _UNRESOLVED, _UNRESOLVED, None),
        ("zero_optimization.allgather_bucket_size", _UNRESOLVED, _UNRESOLVED, None),
        ("zero_optimization.prefetch_bucket_size", _UNRESOLVED, _UNRESOLVED, None),
        ("fp16.loss_scale", _UNRESOLVED, _UNRESOLVED, None),
        ("optimizer.params.lr", None, None, _UNRESOLVED),
        ("optimizer.params.betas", _UNRESOLVED, None, _UNRESOLVED),
        ("optimizer.params.eps", _UNRESOLVED, None, _UNRESOLVED),
        ("optimizer.params.torch_adam", _UNRESOLVED, _UNRESOLVED, _UNRESOLVED),
        ("scheduler.params.total_num_steps", None, None, _UNRESOLVED),
        ("steps_per_print", None, None, _UNRESOLVED),
        ("wall_clock_breakdown", _UNRESOLVED, _UNRESOLVED, _UNRESOLVED),
        ("activation_checkpointing", _UNRESOLVED, _UNRESOLVED, _UNRESOLVED),
        ("data_types.keep_in_fp32_modules", _UNRESOLVED, _UNRESOLVED, None),
    ],
)
def test_auto(
    path: str,
    accelerate: str | None,
    trainer: str | None,
    native: str | None,
    verdict: Callable[..., Verdict],
) -> None:
    config = _nested(path)
    expected = {Route.ACCELERATE: accelerate, Route.TRAINER: trainer, Route.NATIVE: native}
    for route, rule in expected.items():
        findings = verdict(config, route=route).findings
        assert [(f.rule, f.found) for f in findings] == ([(rule, f"{path}=auto")] if rule else []), route


def test_without_a_route_only_what_no_route_resolves_is_found(verdict: Callable[..., Verdict]) -> None:
    for path, found, is_unknown in (
        ("optimizer.params.torch_adam", ["optimizer.params.torch_adam=auto"], False),
        ("optimizer.params.betas", [], True),
        ("zero_optimization.reduce_bucket_size", [], False),
    ):
        said = verdict(_nested(path))
        assert [f.found for f in said.findings] == found
        assert (_UNRESOLVED in {u.rule for u in said.unknown}) is is_unknown


def test_an_unknown_key_is_the_business_of_another_rule(found: Callable[..., list[str]]) -> None:
    config = {**_nested("zero_optimization.stage"), "micro_batch_size_per_gpu": "auto"}
    assert found(config, route=Route.ACCELERATE) == ["deepspeed-key-misspelt: micro_batch_size_per_gpu=auto"]
