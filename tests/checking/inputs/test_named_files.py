"""The configurations that a command, a script's arguments and an accelerate file name."""

from __future__ import annotations

import pytest

from zerofit.checking.inputs.command_line import read_command
from zerofit.checking.inputs.named_files import (
    named_by_accelerate,
    named_by_arguments,
    named_by_command,
    named_by_source,
)
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import read_document
from zerofit.core.setting import Confidence

_FLAGS = load_schemas().accelerate_launch.root


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("accelerate launch train.py", []),
        (
            "accelerate launch --config_file acc.yaml --deepspeed_config_file ds.json train.py",
            [("acc.yaml", "--config_file acc.yaml"), ("ds.json", "--deepspeed_config_file ds.json")],
        ),
        ("accelerate launch --config-file=acc.yaml train.py", [("acc.yaml", "--config-file=acc.yaml")]),
        ("accelerate launch train.py --config_file model.yaml", []),
        ("torchrun train.py --deepspeed ds.json", []),
    ],
)
def test_named_by_a_command(line: str, expected: list[tuple[str, str]]) -> None:
    command = read_command(line.split(), launch_flags=_FLAGS)
    assert command is not None
    assert [(said.value, said.text) for _, said in named_by_command(command)] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--bf16 --output_dir out", []),
        ("--deepspeed ds.json --bf16", [("ds.json", "--deepspeed ds.json")]),
        ("--deepspeed=ds.json", [("ds.json", "--deepspeed=ds.json")]),
        ("--deepspeed --deepspeed_config ds.json", [("ds.json", "--deepspeed_config ds.json")]),
        ("--deepspeed-config ds.json", [("ds.json", "--deepspeed-config ds.json")]),
        ("--deepspeed", []),
        ('--deepspeed {"bf16":{}}', [('{"bf16":{}}', '--deepspeed {"bf16":{}}')]),
    ],
)
def test_named_by_a_scripts_arguments(arguments: str, expected: list[tuple[str, str]]) -> None:
    assert [(said.value, said.text) for said in named_by_arguments(arguments.split())] == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ds.json", [("ds.json", "deepspeed_config_file: ds.json", "acc.yaml:2")]),
        ("none", []),
        ("null", []),
        ("''", []),
        ("[ds.json]", []),
    ],
)
def test_named_by_an_accelerate_file(value: str, expected: list[tuple[str, str, str]]) -> None:
    document = read_document(f"deepspeed_config:\n  deepspeed_config_file: {value}\n", name="acc.yaml")
    said = [(said.value, said.text, str(said.place)) for said in named_by_accelerate(document)]
    assert said == expected


_TRAINER = "from transformers import TrainingArguments\n"
_PLUGIN = "from accelerate import DeepSpeedPlugin\n"
_ENGINE = "import deepspeed\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"{_TRAINER}TrainingArguments(deepspeed='ds.json')", [("ds.json", "deepspeed='ds.json'", 2)]),
        (
            f"{_ENGINE}file = 'ds.json'\ndeepspeed.initialize(model=m, config=file)",
            [("ds.json", "config=file", 3)],
        ),
        (
            f"{_ENGINE}deepspeed.initialize(config_params='ds.json')",
            [("ds.json", "config_params='ds.json'", 2)],
        ),
        (f"{_PLUGIN}DeepSpeedPlugin(hf_ds_config='ds.json')", [("ds.json", "hf_ds_config='ds.json'", 2)]),
        (f"{_PLUGIN}DeepSpeedPlugin(hf_ds_config={{'bf16': {{}}}}, zero_stage=3)", []),
        (f"{_ENGINE}deepspeed.initialize(config=args.file)", []),
        (f"{_TRAINER}TrainingArguments(deepspeed=None)", []),
        ("other.initialize(config='ds.json')  # no DeepSpeed", []),
        ("deepspeed = (", []),
    ],
)
def test_named_by_a_scripts_source(source: str, expected: list[tuple[str, str, int]]) -> None:
    found = [
        (said.value, said.text, said.place.line) for said in named_by_source("train.py", source) if said.place
    ]
    assert found == expected
    assert all(said.confidence is Confidence.LIKELY for said in named_by_source("train.py", source))
