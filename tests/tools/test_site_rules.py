"""The site's page of rules: each rule's page, with its examples."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click
import yaml
from rule_examples import EXAMPLES
from rule_examples.example import Example, Examples
from rule_situations import wrong_in

from tools.site_rules import command_of, page_with_examples, rules_reference
from zerofit.checking.rule import Effect, Reproduction
from zerofit.checking.rules import ALL_RULES
from zerofit.cli.launch import launch
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage

if TYPE_CHECKING:
    from zerofit.checking.rule import Rule

_PARAM_OFFLOAD = next(rule for rule in ALL_RULES if rule.id == "param-offload-needs-zero3")


def test_page_of_every_layer(golden: Callable[[str, str], None]) -> None:
    bad = Example(
        deepspeed='{\n  // as it is\n  "bf16": {}\n}\n',
        accelerate={"deepspeed_config": {"deepspeed_config_file": "ds_config.json"}},
        command="accelerate launch --config_file accelerate.yaml",
        script="import torch\n",
        arguments="--deepspeed ds_config.json",
        versions={"deepspeed": "0.18.0"},
    )
    good = Example(
        strategy=Strategy(
            engine=Engine.DEEPSPEED,
            zero_stage=ZeroStage.PARAMETERS,
            param_offload=OffloadDevice.CPU,
            compile=True,
        )
    )
    rule = replace(
        _PARAM_OFFLOAD,
        holds_for=("deepspeed<0.19", "accelerate>=1.15"),
        is_fixed_by_launch=True,
        evidence=Reproduction(outcome=Effect.HANGS, not_reproduced="needs two nodes"),
    )
    golden(page_with_examples(rule, Examples(bad=bad, good=good)), "findings/every-layer.md")


def _wrong_in_page(rule: Rule) -> Iterator[str]:
    page = page_with_examples(rule, EXAMPLES[rule.id])
    if not page.endswith("\n") or page.endswith("\n\n"):
        yield f"its page ends with {page[-20:]!r}"
    if page.count("```") % 2:
        yield "its page leaves a block of code open"
    if missing := [heading for heading in ("Violates the rule", "Keeps it") if f"{heading}:\n\n" not in page]:
        yield f"its page lacks {missing}"


def _wrong_in_page_examples(rule: Rule) -> Iterator[str]:
    examples = EXAMPLES[rule.id]
    for example in (examples.bad, examples.good):
        page = page_with_examples(rule, Examples(bad=example, good=Example()))
        blocks = dict(re.findall(r"```(json|yaml)\n(.*?)\n```", page, flags=re.DOTALL))
        if isinstance(example.deepspeed, dict) and json.loads(blocks["json"]) != example.deepspeed:
            yield f"its page shows another DeepSpeed file: {blocks['json']}"
        if isinstance(example.accelerate, dict) and yaml.safe_load(blocks["yaml"]) != example.accelerate:
            yield f"its page shows another accelerate file: {blocks['yaml']}"
        program, verb, *words = shlex.split(command_of(example)) or ("", "")
        if (program, verb) == ("zerofit", "launch"):
            launch.make_context("launch", words, parent=click.Context(launch))


def test_every_page_is_whole() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_page) == []


def test_examples_that_are_mappings_can_be_read_back_and_zerofit_takes_its_flags() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_page_examples) == []


def test_the_reference_has_a_row_and_a_page_for_each_rule() -> None:
    reference = rules_reference(ALL_RULES, EXAMPLES)
    for rule in ALL_RULES:
        assert reference.count(f"| [{rule.id}](#{rule.id}) | {rule.severity} | ") == 1
        assert reference.count(f"\n## {rule.id}\n") == 1
