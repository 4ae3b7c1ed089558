"""What the rules of ds_config.json find in a text, without the layers around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from zerofit.command import Route
from zerofit.compat import (
    deepspeed_auto,
    deepspeed_batch,
    deepspeed_file,
    deepspeed_keys,
    deepspeed_spellings,
    deepspeed_switches,
    deepspeed_values,
    unreadable_files,
)
from zerofit.compat.engine import Verdict, check
from zerofit.compat.rule import Rule
from zerofit.compat.situation import Situation
from zerofit.document import FileKind
from zerofit.documents import Unreadable, read_document
from zerofit.layers.broken import broken_file
from zerofit.layers.of_files import settings_of_deepspeed
from zerofit.plan import Topology
from zerofit.probe.catalog import load_schemas

NAME = "ds_config.json"
RULES: tuple[Rule, ...] = (
    *deepspeed_auto.RULES,
    *deepspeed_batch.RULES,
    *deepspeed_file.RULES,
    *deepspeed_keys.RULES,
    *deepspeed_spellings.RULES,
    *deepspeed_switches.RULES,
    *deepspeed_values.RULES,
    *unreadable_files.RULES,
)
_SCHEMAS = load_schemas()


def verdict_of(
    config: Mapping[str, Any] | str,
    *,
    route: Route | None = None,
    topology: Topology | None = None,
    is_schema_known: bool = True,
) -> Verdict:
    """Return what the rules say of a configuration."""
    text = config if isinstance(config, str) else json.dumps(config)
    schemas = _SCHEMAS if is_schema_known else None
    try:
        document = read_document(text, name=NAME)
    except Unreadable as error:
        broken = broken_file(NAME, FileKind.DEEPSPEED, error)
        return check(Situation(broken=(broken,), route=route, schemas=schemas), rules=RULES)
    situation = Situation(
        settings=settings_of_deepspeed(document),
        deepspeed=document,
        route=route,
        topology=topology,
        schemas=schemas,
    )
    return check(situation, rules=RULES)


@pytest.fixture
def verdict() -> Callable[..., Verdict]:
    return verdict_of


@pytest.fixture
def found() -> Callable[..., list[str]]:
    """A configuration to "rule: what was found" of each finding."""
    return lambda config, **more: [f"{f.rule}: {f.found}" for f in verdict_of(config, **more).findings]


@pytest.fixture
def rules() -> tuple[Rule, ...]:
    return RULES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rule" in metafunc.fixturenames:
        metafunc.parametrize("rule", RULES, ids=lambda rule: rule.id)
