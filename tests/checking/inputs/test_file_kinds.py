"""The kind of a file, by its suffix and its keys."""

from __future__ import annotations

import pytest

from zerofit.checking.inputs.file_kinds import kind_of
from zerofit.configs.document import FileKind, Format
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import format_of, read_document

_SCHEMAS = load_schemas()
_ELSE = "something else: none of its keys is DeepSpeed's or accelerate's, or similar"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ds_config.json", "", Format.JSON),
        ("DS_CONFIG.JSON", "", Format.JSON),
        ("ds_config.hjson", "", Format.HJSON),
        ("ds_config.json.template", "", Format.JSON),
        ("accelerate.yaml", "", Format.YAML),
        ("accelerate.yml", "", Format.YAML),
        ("v1.2/ds_config", '\n{"bf16": {}}', Format.JSON),
        ("hostfile", "node0 slots=8", None),
        ("launch.sh", "#!/bin/sh", None),
    ],
)
def test_language(name: str, text: str, expected: Format | None) -> None:
    assert format_of(name, text) is expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 3}}', FileKind.DEEPSPEED),
        ("ds.json", "{}", FileKind.DEEPSPEED),
        ("ds.json", '{"zero_optimisation": {"stage": 3}}', FileKind.DEEPSPEED),
        ("ds.json", '{"bf16": {"enabled": true}}', FileKind.DEEPSPEED),
        ("ds.json", '{"gradient_accumulation_steps": 4}', FileKind.DEEPSPEED),
        ("ds.hjson", "{bf16: {enabled: true}, train_batch_size: 8}", FileKind.DEEPSPEED),
        ("acc.yaml", "distributed_type: DEEPSPEED", FileKind.ACCELERATE),
        ("acc.yaml", "distributed_tpye: DEEPSPEED", FileKind.ACCELERATE),
        ("acc.yaml", "mixed_precision: bf16", FileKind.ACCELERATE),
        ("acc.json", '{"distributed_type": "DEEPSPEED", "num_processes": 8}', FileKind.ACCELERATE),
        ("args.json", '{"output_dir": "out", "bf16": true, "deepspeed": "ds.json"}', FileKind.RECIPE),
        ("args.json", '{"bf16": true}', FileKind.RECIPE),
        ("recipe.yaml", "model_name_or_path: m\nstage: sft\ndeepspeed: ds.json\nbf16: true", FileKind.RECIPE),
        ("recipe.yml", "base_model: m\nsequence_len: 4096\noptimizer: adamw_torch", FileKind.RECIPE),
        ("plan.json", '{"strategy": {}, "topology": {}, "machine": {}, "versions": {}, "version": 1}', _ELSE),
        ("export.yaml", "model: a\npeft_config:\n  name: lora\n", _ELSE),
        ("config.json", '{"model_type": "llama", "hidden_size": 64}', _ELSE),
        ("package.json", '{"name": "x", "version": "1", "dependencies": {}}', _ELSE),
        ("job.yaml", "apiVersion: batch/v1\nkind: Job\nmetadata: {}\nspec: {}", _ELSE),
        (
            "ds.yaml",
            "zero_optimization: {stage: 2}\ntrain_batch_size: 8",
            "a DeepSpeed configuration in YAML, which DeepSpeed does not read",
        ),
    ],
)
def test_kind(name: str, text: str, expected: FileKind | str) -> None:
    document = read_document(text, name=name, format=format_of(name, text))
    assert kind_of(document, _SCHEMAS) == expected
