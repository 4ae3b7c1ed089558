"""Messages of a launch with defaults name no flag: the planner chose the values."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rule_examples import EXAMPLES
from rule_situations import situations_of_example, wrong_in
from typed_flags import messages, untyped_flags

import zerofit
from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rules import ALL_RULES, LIMITS
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Engine,
    OffloadDevice,
    OptimizerName,
    Precision,
    Strategy,
    ZeroStage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.rule import Rule
    from zerofit.checking.situation import Situation

_ROOT = Path(zerofit.__file__).parent
_OF_STRATEGIES = [rule for rule in ALL_RULES if EXAMPLES[rule.id].bad.strategy and rule not in LIMITS]
"""Limits of a captured script only concern what was typed: the planner keeps to them."""
_IN_RANKS = ("training", "models/changes", "generation")
"""Code of the ranks, which do not see the command line."""


def _untyped(situation: Situation, rules: tuple[Rule, ...], *, typed: tuple[str, ...] = ()) -> list[str]:
    findings = check(situation, rules=rules).findings
    assert findings
    return [flag for finding in findings for flag in untyped_flags(typed, finding.as_text())]


_SWITCHES = {
    "tf32": ("--tf32",),
    "liger": ("--liger",),
    "fsdp2": ("--reshard-after-forward", "--tensor-parallel-size"),
}
"""By the first word of a rule: flags that its example has typed."""


def _untyped_in_finding(rule: Rule) -> list[str]:
    (situation,) = situations_of_example(EXAMPLES[rule.id].bad)
    of_script = {name: getattr(situation, name) for name in ("script", "route", "trainer")}
    planned = replace(situation_of(situation), **of_script)
    kind = rule.id.partition("-")[0]
    # What only a flag switches on was typed: neither a planner nor a preset chooses it.
    return _untyped(planned, (rule,), typed=_SWITCHES.get(kind, (f"--{kind}-parallel-size",)))


def test_a_finding_on_a_planned_strategy_names_no_flag_of_it() -> None:
    assert wrong_in(_OF_STRATEGIES, _untyped_in_finding) == []


def situation_of(situation: Situation) -> Situation:
    """Return the situation of a strategy that a planner chose as a whole."""
    assert situation.strategy is not None
    assert situation.topology is not None
    return situation_of_strategy(
        situation.strategy,
        topology=situation.topology,
        machine=situation.machine,
        versions=situation.versions,
        typed=(),
    )


_WRONG = [
    Strategy(
        engine=engine,
        zero_stage=stage,
        optimizer_offload=optimizer_offload,
        param_offload=param_offload,
        optimizer=optimizer,
        precision=precision,
    )
    for engine, stage, optimizer_offload, param_offload, optimizer, precision in product(
        Engine,
        (ZeroStage.NOTHING, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS),
        OffloadDevice,
        OffloadDevice,
        (None, OptimizerName.ADAFACTOR, OptimizerName.LION_8BIT, OptimizerName.PAGED_ADAMW),
        (None, Precision.FP16),
    )
]


def test_no_rule_names_a_flag_of_any_planned_strategy() -> None:
    found = Counter(
        (finding.rule, *untyped_flags((), finding.as_text()))
        for strategy in _WRONG
        for finding in check(
            situation_of_strategy(strategy, topology=Topology(world_size=2), typed=()), rules=ALL_RULES
        ).findings
    )
    assert len(found) > 5  # rules of offloading, of optimizers and of engines
    assert [flags for flags in found if len(flags) > 1] == []


def test_what_was_typed_is_named_as_it_was() -> None:
    strategy = Strategy(
        engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, param_offload=OffloadDevice.CPU
    )

    def found(*typed: str) -> list[str]:
        situation = situation_of_strategy(strategy, topology=Topology(world_size=2), typed=typed)
        (rule,) = [rule for rule in ALL_RULES if rule.id == "param-offload-needs-zero3"]
        return [finding.found for finding in check(situation, rules=(rule,)).findings]

    assert found("zero_stage", "param_offload") == ["--offload-param cpu with --zero-stage 2"]
    assert found("param_offload") == ["--offload-param cpu with ZeRO stage 2"]
    assert found() == ["parameter offload to cpu with ZeRO stage 2"]


def test_a_breach_is_found() -> None:
    message = (
        "error[a-b]: --tf32 is on\n  found: --zero-stage 3 without --lora\n  why:   --cpu\n  fix:   --cpu"
    )
    assert untyped_flags((), message) == ["--tf32", "--zero-stage"]
    assert untyped_flags(("launch", "--tf32=on", "--zero_stage", "3"), message) == []
    assert messages(f"x\n{message}\n\nwarning[c]: d\n  found: e\n") == [
        message,
        "warning[c]: d\n  found: e",
    ]


@pytest.mark.parametrize("package", _IN_RANKS)
def test_no_error_of_a_rank_names_a_flag_in_what_it_found(package: str) -> None:
    wrong = [
        f"{file.relative_to(_ROOT)}:{line}: {text}"
        for file in sorted((_ROOT / package).rglob("*.py"))
        for line, text in _said(ast.parse(file.read_text(encoding="utf-8")))
        if re.search(r"(?<!no )(?<!without )--[a-z]", text)
    ]
    assert wrong == []


def _said(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and literal text of what errors say, other than how to mend it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError":
            said = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg != "fix")]
            for part in (part for value in said for part in ast.walk(value)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
