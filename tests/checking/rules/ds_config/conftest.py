"""What the rules of ds_config.json find in a text, without the layers around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from zerofit.checking.engine import Verdict, check
from zerofit.checking.inputs.situations import settings_of_deepspeed
from zerofit.checking.rule import Rule
from zerofit.checking.rules.deepspeed import keys, readers, switches, values
from zerofit.checking.rules.launch import files
from zerofit.checking.situation import Situation
from zerofit.configs.document import BrokenFile, FileKind
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import read_document
from zerofit.core.command import Route
from zerofit.core.errors import Unreadable
from zerofit.core.plan import Topology

NAME = "ds_config.json"
RULES: tuple[Rule, ...] = (*values.RULES, *readers.RULES, *keys.RULES, *switches.RULES, *files.RULES)
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
        broken = BrokenFile(name=NAME, kind=FileKind.DEEPSPEED, error=error)
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
