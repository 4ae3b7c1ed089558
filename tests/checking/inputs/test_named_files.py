"""Configuration files that commands, arguments, scripts and accelerate files name."""

from __future__ import annotations

import pytest

from zerofit.checking.inputs.command_line import read_command
from zerofit.checking.inputs.named_files import (
    named_by_accelerate,
    named_by_arguments,
    named_by_command,
    named_by_source,
)
from zerofit.checking.inputs.situations import situations
from zerofit.checking.targets import TargetFile, Targets
from zerofit.configs.document import FileKind
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import read_document
from zerofit.core.setting import Confidence

_SCHEMAS = load_schemas()


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
    command = read_command(line.split(), schemas=_SCHEMAS)
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


_NAMES = "import deepspeed\ndeepspeed.initialize(model=model, config='{}')\n"


def _script(name: str, file: str | None) -> TargetFile:
    source = _NAMES.format(file) if file else "import torch\n"
    return TargetFile(name=name, kind=FileKind.SCRIPT, source=source)


def _accelerate(file: str | None) -> TargetFile:
    named = f"deepspeed_config:\n  deepspeed_config_file: {file}\n" if file else ""
    text = f"distributed_type: DEEPSPEED\n{named}"
    return TargetFile(
        name="acc.yaml", kind=FileKind.ACCELERATE, document=read_document(text, name="acc.yaml")
    )


def _runs(*layers: TargetFile) -> list[tuple[str | None, str | None, str | None]]:
    named = {}
    for layer in layers:
        if layer.source is not None:
            named |= {said.value: said for said in named_by_source(layer.name, layer.source)}
        elif layer.document is not None:
            named = {said.value: said for said in named_by_accelerate(layer.document)} | named
    files = [
        TargetFile(name=name, kind=FileKind.DEEPSPEED, document=read_document("{}", name=name), named_by=said)
        for name, said in named.items()
    ]
    targets = Targets(files=(*layers, *files), schemas=load_schemas())
    return [
        (
            run.deepspeed.name if run.deepspeed else None,
            run.accelerate.name if run.accelerate else None,
            run.script.name if run.script else None,
        )
        for run in situations(targets)
    ]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((_script("a.py", "ds.json"),), [("ds.json", None, "a.py")]),
        ((_script("a.py", "ds.json"), _accelerate(None)), [("ds.json", "acc.yaml", "a.py")]),
        (
            (_script("a.py", "ds.json"), _accelerate("other.json")),
            [("ds.json", "acc.yaml", "a.py"), ("other.json", None, "a.py")],
        ),
        (
            (_script("a.py", "a.json"), _script("b.py", "b.json")),
            [("a.json", None, "a.py"), ("b.json", None, "b.py")],
        ),
        (
            (_script("a.py", "a.json"), _script("b.py", None)),
            [("a.json", None, "a.py"), (None, None, "b.py")],
        ),
    ],
)
def test_a_file_that_a_script_names_meets_that_script(
    layers: tuple[TargetFile, ...], expected: list[tuple[str | None, str | None, str | None]]
) -> None:
    assert sorted(_runs(*layers), key=str) == sorted(expected, key=str)
