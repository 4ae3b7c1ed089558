"""Files and scripts are judged by the keys of the installed releases, which differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zerofit.checking.check_run import verdict_of
from zerofit.checking.read_targets import read_targets
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.facts import Versions

_SCRIPT = "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments({}=True))\n"
_ZERO = {"train_micro_batch_size_per_gpu": 1}


def _found(folder: Path, name: str, text: str, **versions: str) -> list[tuple[str, str]]:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    installed = Versions(python="3.11", zerofit="0", **versions)
    schemas = load_schemas(installed)
    targets = read_targets((str(path),), schemas=schemas, stdin=lambda: b"", overlay={})
    return [
        (finding.rule, finding.fix)
        for finding in verdict_of(replace(targets, versions=installed)).findings
        if finding.rule.rpartition("-")[2] in ("unknown", "rejected", "ignored", "removed", "misspelt", "key")
    ]


@pytest.mark.parametrize(
    ("field", "transformers", "expected"),
    [
        ("activation_checkpointing", "5.23.0", []),
        ("gradient_checkpointing", "5.23.0", []),
        ("gradient_checkpointing", "5.17.0", []),
        (
            "activation_checkpointing",
            "5.17.0",
            ["write gradient_checkpointing: transformers has activation_checkpointing since 5.23.0"],
        ),
        ("group_by_length", "5.1.0", []),
        ("group_by_length", "5.2.0", ["write train_sampling_strategy=group_by_length"]),
        ("trackio_bucket_id", "5.5.4", ["leave it out, or install transformers 5.6.0 or later"]),
    ],
)
def test_fields_of_training_arguments_are_those_of_the_installed_transformers(
    tmp_path: Path, field: str, transformers: str, expected: list[str]
) -> None:
    found = _found(tmp_path, "train.py", _SCRIPT.format(field), transformers=transformers)
    assert found == [("training-argument-unknown", fix) for fix in expected]


@pytest.mark.parametrize(
    ("file", "deepspeed", "expected"),
    [
        ({"zero_optimization": {"stage": 3, "parameter_alignment": True}}, "0.19.8", []),
        (
            {"zero_optimization": {"stage": 3, "parameter_alignment": True}},
            "0.18.3",
            [("deepspeed-key-rejected", "leave it out, or install deepspeed 0.19.7 or later")],
        ),
        ({"nebula": {"enabled": True}}, "0.18.3", []),
        (
            {"nebula": {"enabled": True}},
            "0.19.8",
            [
                (
                    "deepspeed-key-removed",
                    "remove it: checkpoints go through torch.save, or the checkpoint section's writer",
                )
            ],
        ),
        (
            {"gradient_allreduce_op": "sum"},
            "0.18.3",
            [("deepspeed-key-ignored", "leave it out, or install deepspeed 0.19.6 or later")],
        ),
    ],
)
def test_keys_of_the_deepspeed_file_are_those_of_the_installed_deepspeed(
    tmp_path: Path, file: dict[str, object], deepspeed: str, expected: list[tuple[str, str]]
) -> None:
    found = _found(tmp_path, "ds.json", json.dumps({**_ZERO, **file}), deepspeed=deepspeed)
    assert found == expected


@pytest.mark.parametrize(
    ("key", "accelerate", "expected"),
    [
        ("ipex_config: {ipex: false}", "1.12.0", []),
        (
            "ipex_config: {ipex: false}",
            "1.15.0",
            ["take it out: accelerate has no extension for Intel processors any more"],
        ),
    ],
)
def test_keys_of_the_accelerate_file_are_those_of_the_installed_accelerate(
    tmp_path: Path, key: str, accelerate: str, expected: list[str]
) -> None:
    text = f"compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n{key}\n"
    found = _found(tmp_path, "accelerate.yaml", text, accelerate=accelerate)
    assert found == [("accelerate-unknown-key", fix) for fix in expected]
