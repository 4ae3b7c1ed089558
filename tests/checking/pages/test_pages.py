"""The pages of docs/reference: rules and versions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import yaml
from rule_examples import wrong_in

from tools.measured_pages import versions_page
from tools.rules_reference import rules_reference
from zerofit.checking.pages.rule_pages import rule_page, rules_table
from zerofit.checking.rule import Effect, Example, Reproduction
from zerofit.checking.rules import ALL_RULES, Rule
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage

_PARAM_OFFLOAD = next(rule for rule in ALL_RULES if rule.id == "param-offload-needs-zero3")


def test_page(golden: Callable[[str, str], None]) -> None:
    golden(rule_page(_PARAM_OFFLOAD), "findings/param-offload-needs-zero3.md")


def test_page_of_every_layer(golden: Callable[[str, str], None]) -> None:
    example = Example(
        deepspeed='{\n  // as it is\n  "bf16": {}\n}\n',
        accelerate={"deepspeed_config": {"deepspeed_config_file": "ds_config.json"}},
        command="accelerate launch --config_file accelerate.yaml",
        script="import torch\n",
        arguments="--deepspeed ds_config.json",
        versions={"deepspeed": "0.18.0"},
    )
    rule = replace(
        _PARAM_OFFLOAD,
        holds_for=("deepspeed<0.19", "accelerate>=1.15"),
        is_fixed_by_launch=True,
        bad=example,
        good=Example(
            strategy=Strategy(
                engine=Engine.DEEPSPEED,
                zero_stage=ZeroStage.PARAMETERS,
                param_offload=OffloadDevice.CPU,
                compile=True,
            )
        ),
        evidence=Reproduction(outcome=Effect.HANGS, not_reproduced="needs two nodes"),
    )
    golden(rule_page(rule, level=2), "findings/every-layer.md")


def _wrong_in_page(rule: Rule) -> Iterator[str]:
    page = rule_page(rule)
    if not page.startswith(f"# {rule.id}\n\n**{rule.severity}**: {rule.summary}.\n"):
        yield f"its page begins with {page[:100]!r}"
    if not page.endswith("\n") or page.endswith("\n\n"):
        yield f"its page ends with {page[-20:]!r}"
    if fields := re.findall(r"\{\w+\}", page.partition("Violates the rule:")[0]):
        yield f"its page keeps {fields}"
    if page.count("```") % 2:
        yield "its page leaves a block of code open"
    if missing := [heading for heading in ("Violates the rule", "Keeps it") if f"{heading}:\n\n" not in page]:
        yield f"its page lacks {missing}"


def _wrong_in_page_examples(rule: Rule) -> Iterator[str]:
    for example in (rule.bad, rule.good):
        page = rule_page(replace(rule, bad=example, good=Example()))
        blocks = dict(re.findall(r"```(json|yaml)\n(.*?)\n```", page, flags=re.DOTALL))
        if isinstance(example.deepspeed, dict) and json.loads(blocks["json"]) != example.deepspeed:
            yield f"its page shows another DeepSpeed file: {blocks['json']}"
        if isinstance(example.accelerate, dict) and yaml.safe_load(blocks["yaml"]) != example.accelerate:
            yield f"its page shows another accelerate file: {blocks['yaml']}"


def test_every_page_is_whole() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_page) == []


def test_examples_that_are_mappings_can_be_read_back() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_page_examples) == []


def test_the_reference_has_a_row_and_a_page_for_each_rule() -> None:
    reference = rules_reference(ALL_RULES)
    for rule in ALL_RULES:
        assert reference.count(f"| [{rule.id}](#{rule.id}) | {rule.severity} | ") == 1
        assert reference.count(f"\n## {rule.id}\n") == 1


def test_the_list_has_a_line_for_each_rule() -> None:
    lines = rules_table(ALL_RULES).splitlines()
    assert [line.split()[1] for line in lines] == sorted(rule.id for rule in ALL_RULES)


_VERSIONS = {"python": "3.11.7", "torch": "2.8.0", "accelerate": "1.10.0", "deepspeed": "0.18.3"}
_VERSIONS |= {"transformers": "5.0.0", "huggingface_hub": "1.3.0", "peft": None, "bitsandbytes": "0.46.1"}


def _kept(*checks: tuple[str, bool]) -> dict[str, object]:
    rows = [{"check": name, "passed": passed, "seconds": 7} for name, passed in checks]
    return {"measured_on": "2026-01-02", "versions": _VERSIONS, "checks": rows}


def test_a_check_that_failed_or_was_not_run_is_not_passed() -> None:
    page = versions_page(
        {
            "oldest": _kept(("example[Trainer-ZeRO-3]", True), ("plan of a script", False)),
            "newest": _kept(("example[Trainer-ZeRO-3]", True)),
        }
    )
    assert page.splitlines()[-5:] == [
        "| peft | none | none |",
        "| bitsandbytes | 0.46.1 | 0.46.1 |",
        "| example: Trainer, ZeRO-3 | passed, 7 s | passed, 7 s |",
        "| plan of a script | **failed** | not run |",
        "| measured on | 2026-01-02 | 2026-01-02 |",
    ]


def test_the_ranges_are_those_that_are_refused_by() -> None:
    assert "| transformers | `>=5.0,<6` | 5.23.0 |\n" in versions_page({})
