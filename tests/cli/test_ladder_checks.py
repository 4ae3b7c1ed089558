"""Ladders that are refused before anything runs."""

from __future__ import annotations

import pytest

from zerofit.cli.bench import check_steps
from zerofit.core.errors import UserError
from zerofit.core.facts import ModelFacts, Versions
from zerofit.measuring.ladder import baseline, climb, parse_rungs
from zerofit.models.find import probe_model

_VERSIONS = Versions(python="3.12", zerofit="0.1.0", torch="2.13.0", deepspeed="0.19.8")


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    """Return those of a small BERT."""
    return probe_model("all-minilm-l6-v2").facts


def _refused(rungs: str, num_ranks: int, facts: ModelFacts) -> list[str]:
    """Return the ids of what refuses a ladder."""
    base = baseline(batch_size=4, sequence_length=16, attention="eager", num_ranks=num_ranks)
    steps = climb(parse_rungs(rungs), base, is_cumulative=True)
    try:
        check_steps(steps, facts, num_ranks=num_ranks, on_cpu=False, versions=_VERSIONS)
    except UserError as error:
        return [error.rule]
    except ExceptionGroup as group:
        return [error.rule for error in group.exceptions if isinstance(error, UserError)]
    return []


@pytest.mark.parametrize(
    ("rungs", "num_ranks", "refused"),
    [
        ("baseline,bf16,adamw-8bit,lora", 1, []),
        ("zero-1,bf16,zero-2,offload-optimizer,zero-3,offload-param,checkpointing", 64, []),
        ("zero-3,offload-param,offload-optimizer", 1, []),
        ("baseline,zero-3", 8, ["ladder-ranks-need-zero"]),
        ("zero-2,length-1024", 8, ["sequence-too-long"]),
        ("zero-2,offload-param", 8, ["param-offload-needs-zero3"]),
        ("zero-3,adamw-8bit,offload-optimizer", 8, ["offload-needs-adam"]),
        ("offload-optimizer", 1, ["optimizer-offload-needs-zero", "zero-needs-deepspeed"]),
    ],
)
def test_rungs_that_violate_a_rule_are_refused_by_it(
    rungs: str, num_ranks: int, refused: list[str], facts: ModelFacts
) -> None:
    assert _refused(rungs, num_ranks, facts) == refused


def test_the_message_names_the_rung() -> None:
    steps = climb(
        parse_rungs("zero-2,offload-param"),
        baseline(batch_size=4, sequence_length=16, attention="eager"),
        is_cumulative=True,
    )
    facts = probe_model("all-minilm-l6-v2").facts
    with pytest.raises(ExceptionGroup) as raised:
        check_steps(steps, facts, num_ranks=1, on_cpu=True, versions=_VERSIONS)
    assert str(raised.value.exceptions[0]) == (
        "error[param-offload-needs-zero3]: parameter offload needs ZeRO-3\n"
        "  found: --rungs with offload-param, under ZeRO-2\n"
        "  why:   only stage 3 partitions parameters, so lower stages ignore the setting\n"
        "  fix:   put zero-3 before offload-param, or leave offload-param out\n"
        "  see:   https://www.deepspeed.ai/docs/config-json/#parameter-offloading"
    )


@pytest.mark.parametrize(
    ("rungs", "found", "fix"),
    [
        (
            "offload-optimizer",
            "--rungs with offload-optimizer, which trains in plain PyTorch",
            "put zero-1, zero-2 or zero-3 before offload-optimizer, and leave --alone out; or leave "
            "offload-optimizer out",
        ),
        (
            "zero-3,adamw-8bit,offload-optimizer",
            "--rungs with offload-optimizer, under ZeRO-3",
            "leave out the rung of another optimizer, or offload-optimizer",
        ),
        (
            "zero-1,fp16",
            "--rungs with fp16, under ZeRO-1",
            "leave fp16 out, name bf16 in its place, or measure on a GPU",
        ),
    ],
)
def test_fixes_name_rungs_and_no_flags_of_other_verbs(
    rungs: str, found: str, fix: str, facts: ModelFacts
) -> None:
    base = baseline(batch_size=4, sequence_length=16, attention="eager")
    steps = climb(parse_rungs(rungs), base, is_cumulative=True)
    with pytest.raises(ExceptionGroup) as raised:
        check_steps(steps, facts, num_ranks=1, on_cpu=True, versions=_VERSIONS)
    for error in raised.value.exceptions:
        assert isinstance(error, UserError)
        assert (error.found, error.fix) == (found, fix)
