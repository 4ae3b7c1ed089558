"""Findings of the rules of ds_config.json in a configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rule_examples.example import Example
from rule_situations import situation_of_example

from zerofit.checking.engine import Verdict, check
from zerofit.checking.rules.deepspeed import keys, readers, switches, tensor_parallel, values
from zerofit.checking.rules.launch import files
from zerofit.core.command import Route
from zerofit.core.plan import Topology

_RULES = (
    *values.RULES,
    *readers.RULES,
    *keys.RULES,
    *switches.RULES,
    *tensor_parallel.RULES,
    *files.RULES,
)


def verdict(
    config: Mapping[str, Any] | str,
    *,
    route: Route | None = None,
    topology: Topology | None = None,
    is_schema_known: bool = True,
) -> Verdict:
    """Return what the rules say of a configuration."""
    situation = situation_of_example(Example(deepspeed=config, route=route, topology=topology))
    return check(situation if is_schema_known else replace(situation, schemas=None), rules=_RULES)


def found_in(config: Mapping[str, Any] | str, **more: Any) -> list[str]:
    """Return "rule: what was found" of each finding."""
    return [f"{one.rule}: {one.found}" for one in verdict(config, **more).findings]
