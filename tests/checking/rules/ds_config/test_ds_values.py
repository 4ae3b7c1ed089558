"""The batch sizes in ds_config.json, and "auto" by the library that reads the file."""

from __future__ import annotations

from typing import Any

import pytest
from ds_config_findings import found_in, verdict

from zerofit.core.command import Route
from zerofit.core.plan import Topology

_RULE = "deepspeed-batch-sizes-disagree"
_RANKS = "the number of ranks"
_ROUTE = "the library that reads it"


def _sizes(train: object = None, micro: object = None, steps: object = None, **more: Any) -> dict[str, Any]:
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    return {
        **{name: size for name, size in sizes.items() if size is not None},
        "zero_optimization": {},
        **more,
    }


@pytest.mark.parametrize(
    ("config", "num_ranks", "route", "found", "unknown"),
    [
        # All three: exactly the product.
        (_sizes(16, 4, 2), 2, None, None, None),
        (
            _sizes(16, 4, 2),
            4,
            None,
            "train_batch_size=16 with train_micro_batch_size_per_gpu=4 and gradient_accumulation_steps=2 "
            "on 4 ranks",
            None,
        ),
        (
            _sizes(10, 4, 2),  # wrong for any number of ranks
            None,
            None,
            "train_batch_size=10 with train_micro_batch_size_per_gpu=4 and gradient_accumulation_steps=2",
            None,
        ),
        (_sizes(16, 4, 2), None, None, None, _RANKS),
        # Two: DeepSpeed computes the third; accelerate takes one step of accumulation where none is given.
        (_sizes(32, 4), 2, Route.NATIVE, None, None),
        (
            _sizes(32, 4),
            2,
            Route.ACCELERATE,
            "train_batch_size=32 with train_micro_batch_size_per_gpu=4 on 2 ranks",
            None,
        ),
        (_sizes(32, 4), 2, None, None, _ROUTE),
        (_sizes(8, 4), 2, None, None, None),
        (
            _sizes(20, 4),
            2,
            Route.NATIVE,
            "train_batch_size=20 with train_micro_batch_size_per_gpu=4 on 2 ranks",
            None,
        ),
        (_sizes(16, None, 2), 4, None, None, None),
        (
            _sizes(16, None, 2),
            3,
            None,
            "train_batch_size=16 with gradient_accumulation_steps=2 on 3 ranks",
            None,
        ),
        # One.
        (_sizes(16), 4, None, None, None),
        (_sizes(16), 3, None, "train_batch_size=16 on 3 ranks", None),
        (_sizes(16), 1, None, None, None),
        (_sizes(None, 4), None, None, None, None),
        # What is filled in later, and what is no size, is for others to say.
        (_sizes("auto", 4, 2), None, None, None, None),
        (_sizes(10, "auto", 4), None, None, None, None),
        (_sizes(10, "4", 4), None, None, None, None),
        # Ranks that share samples.
        (_sizes(16, 4, 2, sequence_parallel_size=2), 4, None, None, "the data-parallel size"),
        (
            _sizes(16, 4, 2, tensor_parallel={"autotp_size": 2}),
            4,
            None,
            None,
            "the data-parallel size",
        ),
    ],
)
def test_sizes(
    config: dict[str, Any], num_ranks: int | None, route: Route | None, found: str | None, unknown: str | None
) -> None:
    topology = Topology(world_size=num_ranks) if num_ranks else None
    said = verdict(config, route=route, topology=topology)
    assert [f.found for f in said.findings if f.rule == _RULE] == ([found] if found else [])
    assert [u.fact for u in said.unknown if u.rule == _RULE] == ([unknown] if unknown else [])


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        (_sizes(16, 4, 2), "leave out train_batch_size, or set it to 32"),
        (_sizes(10, 4, 2), "leave out train_batch_size, or set it to the product"),
    ],
)
def test_the_fix_names_the_product(config: dict[str, Any], fix: str) -> None:
    said = verdict(config, topology=Topology(world_size=4))
    assert [finding.fix for finding in said.findings if finding.rule == _RULE] == [fix]


def test_a_missing_batch_size_is_certain_where_nobody_can_add_it() -> None:
    config = _sizes(None, None, 2)
    said = "ds_config.json with no train_batch_size and no train_micro_batch_size_per_gpu"
    for route, severity in ((Route.TRAINER, "error"), (Route.NATIVE, "warning"), (None, "warning")):
        findings = [f for f in verdict(config, route=route).findings if "batch" in f.rule]
        assert [(f.rule, f.severity, f.found) for f in findings] == [
            ("deepspeed-batch-size-missing", severity, said)
        ]


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
def test_auto(path: str, accelerate: str | None, trainer: str | None, native: str | None) -> None:
    config = _nested(path)
    expected = {Route.ACCELERATE: accelerate, Route.TRAINER: trainer, Route.NATIVE: native}
    for route, rule in expected.items():
        findings = verdict(config, route=route).findings
        assert [(f.rule, f.found) for f in findings] == ([(rule, f"{path}=auto")] if rule else []), route


def test_without_a_route_only_what_no_route_resolves_is_found() -> None:
    for path, found, is_unknown in (
        ("optimizer.params.torch_adam", ["optimizer.params.torch_adam=auto"], False),
        ("optimizer.params.betas", [], True),
        ("zero_optimization.reduce_bucket_size", [], False),
    ):
        said = verdict(_nested(path))
        assert [f.found for f in said.findings] == found
        assert (_UNRESOLVED in {u.rule for u in said.unknown}) is is_unknown


def test_an_unknown_key_is_the_business_of_another_rule() -> None:
    config = {**_nested("zero_optimization.stage"), "micro_batch_size_per_gpu": "auto"}
    assert found_in(config, route=Route.ACCELERATE) == [
        "deepspeed-key-misspelt: micro_batch_size_per_gpu=auto"
    ]
