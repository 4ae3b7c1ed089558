"""What the rules of ds_config.json find in a text, without the layers around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from zerofit.checking.engine import Verdict, check
from zerofit.checking.inputs.join import settings_of_deepspeed
from zerofit.checking.rule import Rule
from zerofit.checking.rules.deepspeed import auto as deepspeed_auto
from zerofit.checking.rules.deepspeed import batch as deepspeed_batch
from zerofit.checking.rules.deepspeed import file as deepspeed_file
from zerofit.checking.rules.deepspeed import keys as deepspeed_keys
from zerofit.checking.rules.deepspeed import spellings as deepspeed_spellings
from zerofit.checking.rules.deepspeed import switches as deepspeed_switches
from zerofit.checking.rules.deepspeed import values as deepspeed_values
from zerofit.checking.rules.launch import files as unreadable_files
from zerofit.checking.situation import Situation
from zerofit.configs.document import FileKind
from zerofit.configs.schemas.load import load_schemas
from zerofit.configs.text import Unreadable, read_document
from zerofit.configs.text.unreadable import broken_file
from zerofit.core.command import Route
from zerofit.core.plan import Topology

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
