"""Keys of ds_config.json: unknown, misplaced, repeated, removed and deprecated ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Verdict
from zerofit.configs.document import Edit, RemoveKey, RenameKey
from zerofit.core.command import Route

_M = {"train_micro_batch_size_per_gpu": 4}
_DS = "ds_config.json"


def _zero(**more: Any) -> dict[str, Any]:
    return {**_M, "zero_optimization": {"stage": 2, **more}}


def _rename(*path: str, key: str) -> RenameKey:
    return RenameKey(document=_DS, path=path, key=key)


def _remove(*path: str) -> RemoveKey:
    return RemoveKey(document=_DS, path=path)


_CASES: list[tuple[dict[str, Any], list[tuple[str, str, str, tuple[Edit, ...]]]]] = [
    (_zero(), []),
    (
        {**_M, "zero_optimisation": {"stage": 3}},
        [
            (
                "deepspeed-key-misspelt",
                'zero_optimisation={"stage": 3}',
                "write zero_optimization",
                (_rename("zero_optimisation", key="zero_optimization"),),
            )
        ],
    ),
    (
        {**_zero(), "Zero-Optimization": {"stage": 3}},  # the right key is there too: which of them counts?
        [("deepspeed-key-misspelt", 'Zero-Optimization={"stage": 3}', "write zero_optimization", ())],
    ),
    (
        _zero(Overlap_Comm=True),
        [
            (
                "deepspeed-key-rejected",
                "zero_optimization.Overlap_Comm=true",
                "write overlap_comm",
                (_rename("zero_optimization", "Overlap_Comm", key="overlap_comm"),),
            )
        ],
    ),
    (
        {**_zero(), "stage3_param_persistence_threshold": 0},
        [
            (
                "deepspeed-key-misspelt",
                "stage3_param_persistence_threshold=0",
                "move it into zero_optimization, or remove it",
                (),
            )
        ],
    ),
    (
        _zero(gradient_clipping=1.0),
        [
            (
                "deepspeed-key-rejected",
                "zero_optimization.gradient_clipping=1.0",
                "move it to the top level, or remove it",
                (),
            )
        ],
    ),
    (
        _zero(offload_optimizer={"device": "cpu", "max_in_cpu": 1e9}),
        [
            (
                "deepspeed-key-rejected",
                "zero_optimization.offload_optimizer.max_in_cpu=1000000000.0",
                "move it into zero_optimization.offload_param, or remove it",
                (),
            )
        ],
    ),
    # Whoever reads the file in a script may keep keys in it, and people keep notes.
    ({**_zero(), "_comment": "for 8 GPUs", "//": 1, "comment": "x", "description": "y"}, []),
    (
        {**_zero(), "learning_rate_of_mine": 1, "seed": 1},
        [
            (
                "deepspeed-key-ignored",
                "learning_rate_of_mine, seed",
                "remove it, or look up the key that is meant",
                (),
            )
        ],
    ),
    (
        {**_zero(), **{f"mine{n}": n for n in range(8)}},
        [
            (
                "deepspeed-key-ignored",
                "mine0, mine1, mine2, mine3, mine4 and 3 more",
                "remove it, or look up the key that is meant",
                (),
            )
        ],
    ),
    # A name without an underscore tells where it belongs only if nothing else is called so.
    (
        {**_M, "stage": 3},
        [("deepspeed-key-misspelt", "stage=3", "move it into zero_optimization, or remove it", ())],
    ),
    (
        _zero(hysteresis=2),
        [("deepspeed-key-rejected", "zero_optimization.hysteresis=2", "move it into fp16, or remove it", ())],
    ),
    # What integrations read is not unknown.
    ({**_zero(), "msamp": {"enabled": True}, "inference": {}, "sequence_parallel_size": 1}, []),
    # optimizer.name is no key: DeepSpeed would have no optimizer.
    (
        {**_zero(), "optimizer": {"name": "AdamW", "params": {"lr": 0.1}}},
        [
            (
                "deepspeed-key-ignored",
                "optimizer.name=AdamW",
                "remove it, or look up the key that is meant",
                (),
            )
        ],
    ),
    (
        {**_zero(), "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        [
            (
                "deepspeed-key-removed",
                "optimizer.params.max_grad_norm=1.0",
                "set gradient_clipping at the top level instead",
                (),
            )
        ],
    ),
    (
        {**_zero(), "amp": {"enabled": False}},
        [
            (
                "deepspeed-key-removed",
                'amp={"enabled": false}',
                "remove it: it is switched off anyway",
                (_remove("amp"),),
            )
        ],
    ),
    (
        {**_zero(), "amp": {"enabled": True}},
        [("deepspeed-key-removed", 'amp={"enabled": true}', "use bf16, fp16 or torch_autocast", ())],
    ),
    (
        {**_zero(), "compression_training": {"layer_reduction": {"enabled": True}}},
        [
            (
                "deepspeed-key-removed",
                'compression_training={"layer_reduction": {"enabled": true}}',
                "remove it: DeepSpeed no longer compresses models while they train",
                (),
            )
        ],
    ),
    (
        {**_zero(), "sparse_gradients": False},
        [
            (
                "deepspeed-key-removed",
                "sparse_gradients=false",
                "remove it: it is switched off anyway",
                (_remove("sparse_gradients"),),
            )
        ],
    ),
    (
        _zero(mics_shard_size=8),
        [
            (
                "deepspeed-key-removed",
                "zero_optimization.mics_shard_size=8",
                "use zero_hpz_partition_size to keep the shards within a node",
                (),
            )
        ],
    ),
    (
        _zero(stage3_gather_fp16_weights_on_model_save=True),
        [
            (
                "deepspeed-key-deprecated",
                "zero_optimization.stage3_gather_fp16_weights_on_model_save=true",
                "write stage3_gather_16bit_weights_on_model_save",
                (
                    _rename(
                        "zero_optimization",
                        "stage3_gather_fp16_weights_on_model_save",
                        key="stage3_gather_16bit_weights_on_model_save",
                    ),
                ),
            )
        ],
    ),
    (
        _zero(cpu_offload=True),
        [
            (
                "deepspeed-key-deprecated",
                "zero_optimization.cpu_offload=true",
                'write "offload_optimizer": {"device": "cpu"}',
                (),
            )
        ],
    ),
    (
        _zero(cpu_offload=False),
        [
            (
                "deepspeed-key-deprecated",
                "zero_optimization.cpu_offload=false",
                "remove it: it is switched off anyway",
                (_remove("zero_optimization", "cpu_offload"),),
            )
        ],
    ),
    (
        _zero(cpu_offload=False, offload_optimizer={"device": "none"}),
        [
            (
                "deepspeed-key-under-two-names",
                "zero_optimization.cpu_offload=false "
                'with zero_optimization.offload_optimizer={"device": "none"}',
                "remove cpu_offload",
                (),
            )
        ],
    ),
    (
        _zero(max_live_parameters=1, stage3_max_live_parameters=2),
        [
            (
                "deepspeed-key-under-two-names",
                "zero_optimization.max_live_parameters=1 with zero_optimization.stage3_max_live_parameters=2",
                "remove max_live_parameters",
                (),
            )
        ],
    ),
    (_zero(max_live_parameters=1), []),
]


@pytest.mark.parametrize(("config", "expected"), _CASES, ids=str)
def test_keys(
    config: dict[str, Any],
    expected: list[tuple[str, str, str, tuple[Edit, ...]]],
    verdict: Callable[..., Verdict],
) -> None:
    findings = verdict(config, route=Route.NATIVE).findings
    assert [(f.rule, f.found, f.fix, f.edits) for f in findings] == expected


@pytest.mark.parametrize(
    ("text", "route", "expected", "unknown"),
    [
        ('{"train_batch_size": 4, "train_batch_size": 8}', None, ["train_batch_size twice: 4 and 8"], False),
        ('{"train_batch_size": 8, "train_batch_size": 8}', None, [], True),
        (
            '{"train_batch_size": 8, "train_batch_size": 8}',
            Route.NATIVE,
            ["train_batch_size twice: 8 and 8"],
            False,
        ),
        ('{"train_batch_size": 8, "train_batch_size": 8}', Route.TRAINER, [], False),
        (
            '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage": "3"}}',
            Route.TRAINER,
            ['zero_optimization.stage twice: 3 and "3"'],
            False,
        ),
        (
            '{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}}',
            Route.TRAINER,
            ["fp16.enabled twice: true and false"],
            False,
        ),
    ],
)
def test_repeated_keys(
    text: str, route: Route | None, expected: list[str], unknown: bool, verdict: Callable[..., Verdict]
) -> None:
    said = verdict(text, route=route)
    assert [f.found for f in said.findings if f.rule == "deepspeed-key-repeated"] == expected
    assert ("deepspeed-key-repeated" in {u.rule for u in said.unknown}) is unknown


def test_a_finding_stands_where_the_key_stands(verdict: Callable[..., Verdict]) -> None:
    text = '{\n  "train_batch_size": 8,\n  "zero_optimization": {\n    "stages": 2\n  }\n}\n'
    (finding,) = verdict(text, route=Route.NATIVE).findings
    assert (str(finding.place), finding.place.column if finding.place else None) == (f"{_DS}:4", 5)
