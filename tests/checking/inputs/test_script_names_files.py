"""With what a DeepSpeed file meets that a script's source names."""

from __future__ import annotations

import pytest

from zerofit.checking.inputs.named_files import named_by_accelerate, named_by_source
from zerofit.checking.inputs.situations import situations
from zerofit.checking.targets import TargetFile, Targets
from zerofit.configs.document import FileKind
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import read_document

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
