"""The catalog of schemas: what is written is what is read, fast, and what the installed libraries declare."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest

from tools.schemas.hugging_face_schemas import (
    REMOVED_FIELDS,
    probe_accelerate_schema,
    probe_training_arguments_schema,
)
from tools.schemas.launcher_schemas import (
    probe_accelerate_launch_schema,
    probe_deepspeed_launcher_schema,
    probe_torchrun_schema,
    probe_zerofit_launch_schema,
)
from tools.schemas.new_release import with_release
from tools.schemas.render import render_schema
from zerofit.checking.situation import DEFAULTS
from zerofit.configs.schema import Key, OnUnknown, Removed, Schema, Schemas, Section, ValueKind
from zerofit.configs.schemas.catalog import (
    load_history,
    load_schema,
    load_schemas,
    schema_of,
)

NAMES = tuple(name for name, value in vars(Schemas).items() if isinstance(value, cached_property))
_CATALOG = Path(__file__).parents[3] / "zerofit" / "catalog"


def test_every_file_of_the_catalog_is_loaded() -> None:
    assert {path.stem for path in _CATALOG.glob("*.json")} == {*NAMES, "recipe_plans"}
    assert load_schemas().deepspeed.package == "deepspeed"


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_reads_back_as_it_was_written(name: str) -> None:
    text = (_CATALOG / f"{name}.json").read_text(encoding="utf-8")
    assert render_schema(load_history(name)) == text


def test_a_written_schema_has_one_line_a_key() -> None:
    section = Section(
        keys=(Key(name="depth", kinds=(ValueKind.INTEGER,), at_least=0, below=3.5, replaced_by=""),),
        on_unknown=OnUnknown.REJECTS,
        drops_auto=True,
        params_of=(("sgd", Section(keys=(Key(name="lr"),), on_unknown=OnUnknown.ACCEPTS)),),
    )
    root = Section(
        keys=(
            Key(
                name="mode",
                kinds=(ValueKind.STRING, ValueKind.NULL),
                converts=True,
                choices=("a", 2),
                ignores_case=True,
                pattern="a.",
                example="ab",
                aliases=("way",),
                required=True,
                reader="accelerate",
            ),
            Key(name="tree", kinds=(ValueKind.SECTION,), section=section),
        ),
        on_unknown=OnUnknown.IGNORES,
    )
    schema = Schema(
        package="lib", version="1.0", root=root, removed=(Removed(path=("old", "key"), instead="use tree"),)
    )
    text = render_schema(schema)
    assert text == (
        "{\n"
        '  "package": "lib",\n'
        '  "version": "1.0",\n'
        '  "on_unknown": "ignores",\n'
        '  "keys": {\n'
        '    "mode": {"kinds": ["string", "null"], "converts": true, "choices": ["a", 2],'
        ' "ignores_case": true, "pattern": "a.", "example": "ab", "aliases": ["way"], "required": true,'
        ' "reader": "accelerate"},\n'
        '    "tree": {\n'
        '      "kinds": ["section"],\n'
        '      "on_unknown": "rejects",\n'
        '      "drops_auto": true,\n'
        '      "keys": {\n'
        '        "depth": {"kinds": ["integer"], "at_least": 0, "below": 3.5, "replaced_by": ""}\n'
        "      },\n"
        '      "params_of": {\n'
        '        "sgd": {\n'
        '          "on_unknown": "accepts",\n'
        '          "keys": {"lr": {}}\n'
        "        }\n"
        "      }\n"
        "    }\n"
        "  },\n"
        '  "removed": {\n'
        '    "old.key": "use tree"\n'
        "  }\n"
        "}\n"
    )
    assert schema_of(json.loads(text)) == schema


def test_find_knows_aliases() -> None:
    schema = load_schema("deepspeed")
    key = schema.find("zero_optimization", "gather_16bit_weights_on_model_save")
    assert key is not None
    assert key.name == "stage3_gather_16bit_weights_on_model_save"
    assert schema.find("zero_optimization", "stage", "deeper") is None


def test_loading_costs_milliseconds() -> None:
    start = time.process_time()
    load_schemas()
    assert time.process_time() - start < 0.1


_PROBES = [
    ("accelerate", probe_accelerate_schema),
    ("accelerate_launch", probe_accelerate_launch_schema),
    ("torchrun", probe_torchrun_schema),
    ("deepspeed_launcher", probe_deepspeed_launcher_schema),
    ("zerofit_launch", probe_zerofit_launch_schema),
    ("training_arguments", probe_training_arguments_schema),
]


@pytest.mark.parametrize(("name", "probe"), _PROBES)
def test_the_catalog_is_fresh(name: str, probe: Callable[[], Schema]) -> None:
    schema = probe()
    committed = (_CATALOG / f"{name}.json").read_text(encoding="utf-8")
    assert committed == render_schema(with_release(load_history(name), schema))
    assert replace(load_schema(name), other_releases=()) == schema


def test_no_removed_field_is_back() -> None:
    schema = load_schema("training_arguments")
    assert {removed.path for removed in schema.removed} == {(name,) for name in REMOVED_FIELDS}


def test_trainer_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    assert {name: fields[name].default for name in DEFAULTS} == DEFAULTS
