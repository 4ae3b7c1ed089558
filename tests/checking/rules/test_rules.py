"""Every rule breaks on its bad example, holds on its good one, and is declared whole."""

from __future__ import annotations

import importlib
import re
from pkgutil import walk_packages

import pytest
from rule_examples import situations_of_example

from zerofit.checking import rules as compat
from zerofit.checking.engine import DEEPSPEED_NAMES, check, spell
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Effect, Severity
from zerofit.checking.rules import ALL_RULES, Rule
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import Topology
from zerofit.core.strategy import Precision, Strategy
from zerofit.core.units import GIB

_EVERY_RULE = pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.id)


def _broken(rule: Rule, which: str) -> list[str]:
    example = getattr(rule, which)
    situations = situations_of_example(example)
    return [
        finding.rule for situation in situations for finding in check(situation, rules=ALL_RULES).findings
    ]


@_EVERY_RULE
def test_bad_example_breaks_this_rule_alone(rule: Rule) -> None:
    assert set(_broken(rule, "bad")) == {rule.id}


@_EVERY_RULE
def test_good_example_breaks_no_rule(rule: Rule) -> None:
    assert _broken(rule, "good") == []


@_EVERY_RULE
def test_rule_is_declared_whole(rule: Rule) -> None:
    assert rule.bad != rule.good
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.id)
    for text in (rule.summary, rule.why, rule.fix):
        assert text
        assert text == text.strip().rstrip(".")
        assert "\n" not in text
        assert not re.search(r"{{|}}", text)  # of an f-string that is none
    assert re.fullmatch(r"https://\S+", rule.see)
    assert set(re.findall(r"{(\w+)}", rule.fix)) <= set(DEEPSPEED_NAMES)
    assert not re.search(r"{\w+}", spell(rule.fix, {}))
    evidence = rule.evidence
    shown = {Effect.FAILS: bool(evidence.says), Effect.IGNORED: bool(evidence.observed)}
    assert evidence.not_reproduced or shown.get(evidence.outcome, True)
    assert rule.severity is not Severity.ADVICE or evidence.outcome in (Effect.COSTS, Effect.IGNORED)


def test_every_file_of_rules_is_in_the_list() -> None:
    modules = [
        importlib.import_module(name)
        for _, name, _ in walk_packages(compat.__path__, "zerofit.checking.rules.")
    ]
    declared = [rule for module in modules for rule in getattr(module, "RULES", ())]
    assert {rule.id for rule in declared} == {rule.id for rule in ALL_RULES}
    assert len(declared) == len(ALL_RULES)


@pytest.mark.parametrize(
    ("strategy", "ids"),
    [(Strategy(tf32=True), {"tf32-needs-ampere"}), (Strategy(precision=Precision.BF16), set())],
)
def test_a_gpu_before_ampere_with_a_known_rate_of_bf16_has_no_tf32(strategy: Strategy, ids: set[str]) -> None:
    gpu = GpuSpec(name="Radeon", memory_bytes=16 * GIB, compute_capability=(7, 5), bf16_flops_per_s=1e14)
    machine = Machine(
        gpus=(gpu,), num_cpu_cores=8, host_memory_bytes=64 * GIB, host_memory_available_bytes=60 * GIB
    )
    situation = situation_of_strategy(strategy, topology=Topology(), machine=machine)
    rules = {finding.rule for finding in check(situation, rules=ALL_RULES).findings}
    assert rules & {"tf32-needs-ampere", "bf16-needs-ampere"} == ids


def test_ids_are_unique() -> None:
    ids = [rule.id for rule in ALL_RULES]
    assert sorted(set(ids)) == sorted(ids)


def test_ids_are_permanent() -> None:
    # An id stands in users' scripts and notes: add to this list, and take nothing away.
    assert {rule.id for rule in ALL_RULES} >= {
        "bf16-needs-ampere",
        "cpu-ranks-need-zerofit-launch",
        "fp16-needs-gpu",
        "nvme-needs-path",
        "nvme-offload-needs-zero3",
        "nvme-path-unused",
        "offload-needs-adam",
        "optimizer-offload-needs-zero",
        "param-offload-needs-zero3",
        "zero-needs-deepspeed",
    }
