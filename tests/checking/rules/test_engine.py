"""The engine: all findings at once, in order; what lacks a fact is unknown; what is not certain warns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Hit, Rule, Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.checking.situation import Situation, UnknownFact, known
from zerofit.core.command import Launcher
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.setting import Confidence, Place
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage

_SITUATION = Situation(versions=Versions(python="3.11.7", zerofit="0.1.0", deepspeed="0.19.8"))
_RULE = replace(
    next(rule for rule in ALL_RULES if rule.id == "nvme-needs-path"), id="test-rule", severity=Severity.ERROR
)


def _finds(*hits: Hit, **changes: object) -> Rule:
    return replace(_RULE, find=lambda situation: iter(hits), **changes)  # type: ignore[arg-type]


def _at(file: str, line: int) -> Place:
    return Place(file=file, line=line)


def test_findings_are_sorted_by_place_then_severity_then_rule() -> None:
    rules = [
        _finds(Hit(found="d", place=_at("b.json", 2)), Hit(found="a"), id="later"),
        _finds(Hit(found="c", place=_at("b.json", 2)), id="earlier"),
        _finds(Hit(found="b", place=_at("b.json", 1)), id="w", severity=Severity.WARNING),
        _finds(Hit(found="e", place=_at("b.json", 2)), id="a-warning", severity=Severity.WARNING),
    ]
    assert [finding.found for finding in check(_SITUATION, rules=rules).findings] == ["a", "b", "c", "d", "e"]


def test_the_same_finding_is_reported_once() -> None:
    assert len(check(_SITUATION, rules=[_finds(Hit(found="a"), Hit(found="a"))]).findings) == 1


@pytest.mark.parametrize(
    ("confidence", "severity"),
    [
        (Confidence.CERTAIN, Severity.ERROR),
        (Confidence.LIKELY, Severity.WARNING),
        (Confidence.POSSIBLE, Severity.WARNING),
    ],
)
def test_what_is_not_certain_is_a_warning_at_most(confidence: Confidence, severity: Severity) -> None:
    (finding,) = check(_SITUATION, rules=[_finds(Hit(found="a", confidence=confidence))]).findings
    assert (finding.severity, finding.confidence) == (severity, confidence)


def test_a_rule_that_lacks_a_fact_is_unknown_and_keeps_what_it_found_before() -> None:
    def find(situation: Situation) -> Iterator[Hit]:
        yield Hit(found="a")
        known(situation.machine, "the GPUs")

    verdict = check(_SITUATION, rules=[replace(_RULE, find=find)])
    assert [finding.found for finding in verdict.findings] == ["a"]
    assert [(unknown.rule, unknown.fact) for unknown in verdict.unknown] == [("test-rule", "the GPUs")]


def test_what_a_predicate_lacks_is_what_its_error_says() -> None:
    with pytest.raises(UnknownFact, match=r"^the GPUs$") as lacking:
        known(None, "the GPUs")
    assert lacking.value.fact == "the GPUs"
    assert known(0, "the GPUs") == 0


@pytest.mark.parametrize(
    ("specifier", "num_findings", "num_unknown"),
    [
        ("deepspeed<0.19.3", 0, 0),
        ("deepspeed>=0.19.3", 1, 0),
        ("deepspeed==0.19.8", 1, 0),
        ("bitsandbytes<1", 0, 1),
    ],
)
def test_a_rule_holds_for_its_versions(specifier: str, num_findings: int, num_unknown: int) -> None:
    verdict = check(_SITUATION, rules=[_finds(Hit(found="a"), holds_for=(specifier,))])
    assert (len(verdict.findings), len(verdict.unknown)) == (num_findings, num_unknown)


def test_what_launch_puts_right_is_not_said_there() -> None:
    rule = _finds(Hit(found="a"), is_fixed_by_launch=True)
    launched = {
        launcher: len(check(replace(_SITUATION, launcher=launcher), rules=[rule]).findings)
        for launcher in (Launcher.ZEROFIT, Launcher.ACCELERATE, None)
    }
    assert launched == {Launcher.ZEROFIT: 0, Launcher.ACCELERATE: 1, None: 1}


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
            ["nvme-needs-path", "optimizer-offload-needs-zero", "param-offload-needs-zero3"],
        ),
        (
            Strategy(zero_stage=ZeroStage.PARAMETERS, precision=Precision.FP16),
            _ON_CPU,
            ["fp16-needs-gpu", "zero-needs-deepspeed"],
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
def test_all_findings_of_flags_are_reported(strategy: Strategy, topology: Topology, ids: list[str]) -> None:
    situation = situation_of_strategy(strategy, topology=topology)
    errors = check(situation, rules=ALL_RULES).of(Severity.ERROR)
    assert [error.rule for error in errors] == ids


def test_a_finding_as_text() -> None:
    strategy = replace(
        _ZERO0, zero_stage=ZeroStage.GRADIENTS, param_offload=OffloadDevice.NVME, nvme_path="/nvme"
    )
    situation = situation_of_strategy(strategy, topology=Topology(world_size=2))
    (finding,) = check(situation, rules=ALL_RULES).findings
    text = (
        "error[param-offload-needs-zero3]: parameter offload needs ZeRO-3\n"
        "  found: --offload-param nvme with --zero-stage 2\n"
        "  why:   only stage 3 partitions parameters, so lower stages ignore the setting\n"
        "  fix:   set --zero-stage to 3, or leave out --offload-param\n"
        "  see:   https://www.deepspeed.ai/docs/config-json/#parameter-offloading"
    )
    assert (finding.as_text(), str(finding.as_error())) == (text, text)
    assert finding.as_error().exit_code == 2
