"""Params of the optimizer and scheduler sections: unknown and missing ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Verdict
from zerofit.configs.document import Edit, RenameKey
from zerofit.core.command import Route


def _zero(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, **more}}


def _rename(*path: str, key: str) -> RenameKey:
    return RenameKey(document="ds_config.json", path=path, key=key)


_CASES: list[tuple[dict[str, Any], list[tuple[str, str, str, tuple[Edit, ...]]]]] = [
    # Params are held against the type beside them, where DeepSpeed has it itself.
    ({**_zero(), "optimizer": {"type": "SomethingOfTorch", "params": {"anything": 1}}}, []),
    (
        {**_zero(), "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decays": 0.1}}},
        [
            (
                "deepspeed-key-rejected",
                "optimizer.params.weight_decays=0.1",
                "write weight_decay",
                (_rename("optimizer", "params", "weight_decays", key="weight_decay"),),
            )
        ],
    ),
    (
        {**_zero(), "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
        [("deepspeed-key-rejected", "scheduler.params.warmup_steps=10", "write warmup_num_steps", ())],
    ),
    (
        {**_zero(), "optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1}}},
        [
            (
                "deepspeed-key-rejected",
                "optimizer.params.learning_rate=0.1",
                "write lr",
                (_rename("optimizer", "params", "learning_rate", key="lr"),),
            )
        ],
    ),
    # What a scheduler lacks.
    (
        {**_zero(), "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
        [
            (
                "deepspeed-params-incomplete",
                "scheduler.type=WarmupDecayLR without scheduler.params.total_num_steps",
                "set scheduler.params.total_num_steps",
                (),
            )
        ],
    ),
    (
        {**_zero(), "scheduler": {"type": "OneCycle"}},
        [
            (
                "deepspeed-params-incomplete",
                "scheduler.type=OneCycle without scheduler.params.cycle_min_lr "
                "and scheduler.params.cycle_max_lr",
                "set scheduler.params.cycle_min_lr and scheduler.params.cycle_max_lr",
                (),
            )
        ],
    ),
    (
        {**_zero(), "scheduler": {"type": "StepLR"}},
        [
            (
                "deepspeed-params-incomplete",
                "scheduler.type=StepLR without scheduler.params",
                "set scheduler.params",
                (),
            )
        ],
    ),
    # Refused before it is missed, and perhaps the missing one itself.
    (
        {**_zero(), "scheduler": {"type": "WarmupDecayLR", "params": {"total_steps": 10}}},
        [("deepspeed-key-rejected", "scheduler.params.total_steps=10", "write total_num_steps", ())],
    ),
    ({**_zero(), "scheduler": {"type": "WarmupLR", "params": {}}}, []),
    ({**_zero(), "scheduler": {}}, []),
    ({**_zero(), "optimizer": {"type": "AdamW"}}, []),
]


@pytest.mark.parametrize(("config", "expected"), _CASES, ids=str)
def test_params(
    config: dict[str, Any],
    expected: list[tuple[str, str, str, tuple[Edit, ...]]],
    verdict: Callable[..., Verdict],
) -> None:
    findings = verdict(config, route=Route.NATIVE).findings
    assert [(f.rule, f.found, f.fix, f.edits) for f in findings] == expected


@pytest.mark.parametrize(
    ("route", "confidence"),
    [(None, "likely"), (Route.NATIVE, "likely"), (Route.ACCELERATE, "certain"), (Route.TRAINER, "certain")],
)
def test_a_script_of_its_own_may_add_the_steps(
    route: Route | None, confidence: str, verdict: Callable[..., Verdict]
) -> None:
    config = {**_zero(), "scheduler": {"type": "WarmupDecayLR", "params": {}}}
    (finding,) = verdict(config, route=route).findings
    assert (finding.rule, finding.confidence) == ("deepspeed-params-incomplete", confidence)
    config["scheduler"]["params"]["total_num_steps"] = "auto"
    assert "deepspeed-params-incomplete" not in {f.rule for f in verdict(config, route=route).findings}


def test_params_are_refused_for_a_reason_of_their_own(verdict: Callable[..., Verdict]) -> None:
    config = {**_zero(overlap=True), "optimizer": {"type": "AdamW", "params": {"weight_decays": 0.1}}}
    whys = {finding.found: finding.why for finding in verdict(config, route=Route.NATIVE).findings}
    assert whys == {
        "zero_optimization.overlap=true": "these sections are declared whole, and an unknown key in them "
        "ends the run",
        "optimizer.params.weight_decays=0.1": "params are the arguments of a constructor, and Python ends "
        "the run where it takes no such one",
    }
