"""The catalog's files of accelerate and transformers are those of the installed versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from zerofit.checking.situation import DEFAULTS
from zerofit.configs.schema import Schema
from zerofit.configs.schemas.accelerate_schema import probe_accelerate_launch_schema, probe_accelerate_schema
from zerofit.configs.schemas.catalog import load_history, load_schema, render_schema
from zerofit.configs.schemas.releases import with_release
from zerofit.configs.schemas.training_arguments_schema import REMOVED, probe_training_arguments_schema

_CATALOG = Path(__file__).parents[3] / "zerofit" / "catalog"
_PROBES = [
    ("accelerate", probe_accelerate_schema),
    ("accelerate_launch", probe_accelerate_launch_schema),
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
    assert {removed.path for removed in schema.removed} == {(name,) for name in REMOVED}


def test_trainer_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    assert {name: fields[name].default for name in DEFAULTS} == DEFAULTS
