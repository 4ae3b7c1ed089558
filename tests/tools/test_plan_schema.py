"""The JSON Schemas for editors, held against real files by another library."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tools.editor_schemas import deepspeed_schema
from tools.write_docs import schema_of
from zerofit.core.plan import Plan
from zerofit.core.run_report import RunReport

_ROOT = Path(__file__).parents[2]
_SCHEMA = json.loads((_ROOT / "docs" / "reference" / "plan.schema.json").read_text("utf-8"))
_PLAN = json.loads((_ROOT / "tests" / "golden" / "plan" / "full.json").read_text("utf-8"))


def test_a_plan_file_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)
    jsonschema.validate(_PLAN, _SCHEMA)


@pytest.mark.parametrize(
    "change", [{"notes": ""}, {"version": "1"}, {"strategy": {**_PLAN["strategy"], "zero_stage": 4}}]
)
def test_another_document_is_not(change: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**_PLAN, **change}, _SCHEMA)


def _text(name: str) -> str:
    return (_ROOT / "docs" / "reference" / name).read_text("utf-8")


def test_the_schemas_are_fresh() -> None:
    assert _text("plan.schema.json") == schema_of(Plan)
    assert _text("run-report.schema.json") == schema_of(RunReport)
    assert _text("ds_config.schema.json") == deepspeed_schema()


_DEEPSPEED = json.loads(_text("ds_config.schema.json"))
_PRESETS = sorted((_ROOT / "ds_configs").glob("*.json"))


@pytest.fixture(scope="module")
def editor() -> jsonschema.Draft202012Validator:
    """Return what an editor checks DeepSpeed's files with; the schema takes a second to check itself."""
    jsonschema.Draft202012Validator.check_schema(_DEEPSPEED)
    return jsonschema.Draft202012Validator(_DEEPSPEED)


@pytest.mark.parametrize("path", _PRESETS, ids=[path.stem for path in _PRESETS])
def test_a_preset_is_valid_for_an_editor(path: Path, editor: jsonschema.Draft202012Validator) -> None:
    editor.validate(json.loads(path.read_text("utf-8")))


@pytest.mark.parametrize(
    ("document", "at"),
    [
        ({"zero_optimization": {"stage": 3, "offload_params": {"device": "cpu"}}}, "offload_params"),
        ({"gradient_clippping": 1.0}, "gradient_clippping"),
        ({"zero_optimization": {"stage": 4}}, "4"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"train_batch_size": 0}, "0"),
    ],
)
def test_an_editor_underlines_what_deepspeed_ignores_or_refuses(document: dict[str, object], at: str) -> None:
    errors = list(jsonschema.Draft202012Validator(_DEEPSPEED).iter_errors(document))
    assert errors
    assert any(at in str(error.message) + str(list(error.absolute_path)) for error in errors)
