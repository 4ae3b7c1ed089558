"""What the rules of launch files, flags and TrainingArguments say of a run in small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.checking.engine import Finding, check
from zerofit.checking.inputs.example import situations_of_example
from zerofit.checking.rule import Example
from zerofit.checking.rules import ALL_RULES
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.machine.versions import probe_versions

Check = Callable[..., list[Finding]]


@pytest.fixture(scope="session")
def check_example() -> Check:
    """Return a function that checks the layers of an Example with one rule."""
    schemas, versions = load_schemas(), probe_versions()

    def check_one(rule: str, **layers: Any) -> list[Finding]:
        (only,) = [one for one in ALL_RULES if one.id == rule]
        found = situations_of_example(Example(**layers), schemas=schemas, versions=versions)
        return [finding for situation in found for finding in check(situation, rules=[only]).findings]

    return check_one
