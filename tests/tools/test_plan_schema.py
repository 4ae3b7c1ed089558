"""The JSON Schema of plan files, held against real ones by another library."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

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
