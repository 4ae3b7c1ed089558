"""Every rule breaks on its bad example, holds on its good one, and speaks in the form of an error."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from zerofit.compat import ALL_RULES, Rule, Situation
from zerofit.compat.rule import broken_rules
from zerofit.plan import Topology
from zerofit.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage

_EVERY_RULE = pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.id)


@_EVERY_RULE
def test_rule_breaks_on_its_bad_example(rule: Rule) -> None:
    found = rule.found(rule.bad)
    assert found
    assert "\n" not in found


@_EVERY_RULE
def test_good_example_breaks_no_rule(rule: Rule) -> None:
    assert rule.found(rule.good) is None
    assert broken_rules(rule.good, rules=ALL_RULES) == ()


@_EVERY_RULE
def test_bad_example_breaks_this_rule_alone(rule: Rule) -> None:
    assert [error.rule for error in broken_rules(rule.bad, rules=ALL_RULES)] == [rule.id]


@_EVERY_RULE
def test_examples_differ_in_few_places(rule: Rule) -> None:
    def flat(situation: Situation) -> dict[str, object]:
        parts = (situation.strategy, situation.topology)
        return {field.name: getattr(part, field.name) for part in parts for field in fields(part)}

    bad, good = flat(rule.bad), flat(rule.good)
    assert 1 <= sum(bad[name] != good[name] for name in bad) <= 2


@_EVERY_RULE
def test_rule_is_declared_whole(rule: Rule) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.id)
    for text in (rule.summary, rule.why, rule.fix):
        assert text
        assert text == text.strip().rstrip(".")
        assert "\n" not in text
    assert re.fullmatch(r"https://\S+", rule.see)


def test_ids_are_unique() -> None:
    ids = [rule.id for rule in ALL_RULES]
    assert sorted(set(ids)) == sorted(ids)


def test_ids_are_permanent() -> None:
    # An id stands in users' scripts and notes: add to this list, and take nothing away.
    assert {rule.id for rule in ALL_RULES} >= {
        "bf16-needs-ampere",
        "fp16-needs-gpu",
        "nvme-needs-path",
        "nvme-offload-needs-zero3",
        "offload-needs-adam",
        "optimizer-offload-needs-zero",
        "param-offload-needs-zero3",
        "zero-needs-deepspeed",
    }


_ZERO0 = Strategy(engine=Engine.DEEPSPEED)
_ON_CPU = Topology(on_cpu=True)


@pytest.mark.parametrize(
    ("strategy", "topology", "ids"),
    [
        (_ZERO0, _ON_CPU, []),
        (Strategy(), _ON_CPU, []),
        (
            replace(_ZERO0, optimizer_offload=OffloadDevice.NVME, param_offload=OffloadDevice.CPU),
            Topology(),
            [
                "optimizer-offload-needs-zero",
                "param-offload-needs-zero3",
                "nvme-offload-needs-zero3",
                "nvme-needs-path",
            ],
        ),
        (
            Strategy(zero_stage=ZeroStage.PARAMETERS, precision=Precision.FP16),
            _ON_CPU,
            ["zero-needs-deepspeed", "fp16-needs-gpu"],
        ),
        (replace(_ZERO0, precision=Precision.FP16), Topology(world_size=8), []),
        (
            replace(_ZERO0, zero_stage=ZeroStage.OPTIMIZER_STATES, optimizer_offload=OffloadDevice.CPU),
            Topology(world_size=8),
            [],
        ),
        (
            replace(_ZERO0, zero_stage=ZeroStage.PARAMETERS, param_offload=OffloadDevice.NVME, nvme_path=""),
            Topology(world_size=8),
            ["nvme-needs-path"],
        ),
    ],
)
def test_all_findings_are_reported_in_the_order_of_the_rules(
    strategy: Strategy, topology: Topology, ids: list[str]
) -> None:
    errors = broken_rules(Situation(strategy=strategy, topology=topology), rules=ALL_RULES)
    assert [error.rule for error in errors] == ids


def test_broken_rule_as_text() -> None:
    strategy = replace(
        _ZERO0, zero_stage=ZeroStage.GRADIENTS, param_offload=OffloadDevice.NVME, nvme_path="/nvme"
    )
    (error,) = broken_rules(Situation(strategy=strategy, topology=Topology(world_size=2)), rules=ALL_RULES)
    assert str(error) == (
        "error[param-offload-needs-zero3]: parameter offload needs ZeRO-3\n"
        "  found: --offload-param nvme with --zero-stage 2\n"
        "  why:   only stage 3 partitions parameters, so lower stages ignore the setting\n"
        "  fix:   set --zero-stage 3, or leave out --offload-param\n"
        "  see:   https://www.deepspeed.ai/docs/config-json/#parameter-offloading"
    )
    assert error.exit_code == 2
