"""What the rules of ds_config.json find in a text, without the layers around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from rule_examples import situation_of_example

from zerofit.checking.engine import Verdict, check
from zerofit.checking.rule import Example
from zerofit.checking.rules.deepspeed import keys, readers, switches, values
from zerofit.checking.rules.launch import files
from zerofit.core.command import Route
from zerofit.core.plan import Topology

_RULES = (*values.RULES, *readers.RULES, *keys.RULES, *switches.RULES, *files.RULES)


def verdict_of(
    config: Mapping[str, Any] | str,
    *,
    route: Route | None = None,
    topology: Topology | None = None,
    is_schema_known: bool = True,
) -> Verdict:
    """Return what the rules say of a configuration."""
    situation = situation_of_example(Example(deepspeed=config, route=route, topology=topology))
    return check(situation if is_schema_known else replace(situation, schemas=None), rules=_RULES)


@pytest.fixture
def verdict() -> Callable[..., Verdict]:
    return verdict_of


@pytest.fixture
def found() -> Callable[..., list[str]]:
    """A configuration to "rule: what was found" of each finding."""
    return lambda config, **more: [f"{f.rule}: {f.found}" for f in verdict_of(config, **more).findings]
