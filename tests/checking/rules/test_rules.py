"""Every rule breaks on its bad example, holds on its good one, and is declared whole."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import pytest
import rule_examples
from rule_examples import EXAMPLES
from rule_examples.example import Example
from rule_situations import situations_of_example, wrong_in

from zerofit.checking import rules as compat
from zerofit.checking.engine import DEEPSPEED_NAMES, check, spell
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Effect, Severity
from zerofit.checking.rules import ALL_RULES, Rule
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import Topology
from zerofit.core.strategy import Precision, Strategy
from zerofit.core.units import GIB


def _broken(example: Example, rules: Sequence[Rule] = ALL_RULES) -> list[str]:
    return [
        finding.rule
        for situation in situations_of_example(example)
        for finding in check(situation, rules=rules).findings
    ]


def _wrong_in_bad_example(rule: Rule) -> Iterator[str]:
    if (broken := set(_broken(EXAMPLES[rule.id].bad))) != {rule.id}:
        yield f"its bad example breaks {sorted(broken)}"


def _wrong_in_good_example(rule: Rule) -> Iterator[str]:
    if broken := _broken(EXAMPLES[rule.id].good):
        yield f"its good example breaks {broken}"


def _wrong_in_declaration(rule: Rule) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.id):
        yield "its id is not in kebab case"
    for text in (rule.summary, rule.why, rule.fix):
        if not text or text != text.strip().rstrip(".") or "\n" in text:
            yield f"not one sentence without its full stop: {text!r}"
        if re.search(r"{{|}}", text):
            yield f"braces of an f-string that is none: {text!r}"
    if not re.fullmatch(r"https://\S+", rule.see):
        yield f"no link: {rule.see!r}"
    if unknown := set(re.findall(r"{(\w+)}", rule.fix)) - set(DEEPSPEED_NAMES):
        yield f"its fix has fields that have no name in DeepSpeed's file: {sorted(unknown)}"
    if re.search(r"{\w+}", spell(rule.fix, {})):
        yield f"its fix keeps fields: {rule.fix!r}"
    evidence = rule.evidence
    shown = {Effect.FAILS: bool(evidence.says), Effect.IGNORED: bool(evidence.observed)}
    if not (evidence.not_reproduced or shown.get(evidence.outcome, True)):
        yield f"nothing shows that it {evidence.outcome}"
    if rule.severity is Severity.ADVICE and evidence.outcome not in (Effect.COSTS, Effect.IGNORED):
        yield f"advice, and its bad example {evidence.outcome}"


def test_bad_example_breaks_this_rule_alone() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_bad_example) == []


def test_good_example_breaks_no_rule() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_good_example) == []


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.id)
def test_by_itself_each_rule_breaks_on_its_bad_example_and_holds_on_its_good_one(rule: Rule) -> None:
    """The two tests above hold each example against all rules, which takes them too long for `make test`."""
    assert _broken(EXAMPLES[rule.id].bad, (rule,)) != []
    assert _broken(EXAMPLES[rule.id].good, (rule,)) == []


def test_rule_is_declared_whole() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_declaration) == []


def test_each_rule_has_a_bad_and_a_good_example_that_differ() -> None:
    assert sorted(EXAMPLES) == sorted(rule.id for rule in ALL_RULES)
    assert [name for name, examples in EXAMPLES.items() if examples.bad == examples.good] == []


def test_examples_are_in_the_file_named_as_that_of_their_rule() -> None:
    rules = {name: [rule.id for rule in declared] for name, declared in _declared_in(compat, "RULES").items()}
    examples = {name: list(declared) for name, declared in _declared_in(rule_examples, "EXAMPLES").items()}
    assert examples == rules


def _declared_in(package: ModuleType, name: str) -> dict[str, Any]:
    """Return what each module of a package declares under a name, by the module's path in the package."""
    prefix = f"{package.__name__}."
    modules = [importlib.import_module(found.name) for found in walk_packages(package.__path__, prefix)]
    return {
        module.__name__.removeprefix(prefix): getattr(module, name)
        for module in modules
        if hasattr(module, name)
    }


def test_each_broken_rule_is_named() -> None:
    without_end, without_evidence, whole = ALL_RULES[:3]
    planted = (
        replace(without_end, fix="leave it out."),
        replace(without_evidence, evidence=None),  # type: ignore[arg-type]
        whole,
    )
    wrong = wrong_in(planted, _wrong_in_declaration)
    assert wrong[0] == f"{without_end.id}: not one sentence without its full stop: 'leave it out.'"
    (error,) = wrong[1:]
    assert error.startswith(f"{without_evidence.id}: Traceback")
    assert "AttributeError: 'NoneType' object has no attribute 'says'" in error


def test_every_file_of_rules_is_in_the_list() -> None:
    declared = [rule for rules in _declared_in(compat, "RULES").values() for rule in rules]
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


@pytest.mark.parametrize(
    ("topology", "is_found"),
    [(None, False), (Topology(), False), (Topology(on_cpu=True), True)],
)
def test_ranks_run_on_the_gpus_of_a_machine_unless_they_are_told_not_to(
    topology: Topology | None, is_found: bool
) -> None:
    gpu = GpuSpec(name="A100", memory_bytes=80 * GIB, compute_capability=(8, 0))
    machine = Machine(
        gpus=(gpu,), num_cpu_cores=8, host_memory_bytes=64 * GIB, host_memory_available_bytes=60 * GIB
    )
    strategy = Strategy(precision=Precision.FP16)
    situation = situation_of_strategy(strategy, topology=Topology(), machine=machine)
    report = check(replace(situation, topology=topology), rules=ALL_RULES)
    assert ("fp16-needs-gpu" in {finding.rule for finding in report.findings}) is is_found
