"""Bars of memory, and the text of a plan's table."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planning_problems import problem, solved

from zerofit.core.estimates import Holder, PhaseMemory, RunPhase, Term
from zerofit.core.plan import Topology
from zerofit.core.strategy import Buckets, Engine, Lora, OffloadDevice, OptimizerName, Strategy, ZeroStage
from zerofit.planning import plan_table
from zerofit.planning.answer_lines import as_it_is_lines
from zerofit.planning.estimate.engines.engine import WEIGHT_COPIES
from zerofit.planning.plan_labels import label, rate, seconds
from zerofit.planning.plan_reasons import why_it_loses
from zerofit.planning.plan_table import GROUPS, bar, group_of, short_verdict


def _phase(**terms: int) -> PhaseMemory:
    return PhaseMemory(
        phase=RunPhase.STEP,
        terms=tuple(
            Term(
                name=name.replace("_", " "),
                num_bytes=num_bytes,
                holder=Holder.TENSORS,
                formula="",
                source="",
            )
            for name, num_bytes in terms.items()
        ),
    )


_COPIES = Term(name=WEIGHT_COPIES, num_bytes=50, holder=Holder.TENSORS, formula="", source="")


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (_phase(), "...................."),
        (_phase(weights=50), "WWWWWWWWWW.........."),
        (_phase(activations=25, weights=25, gradients=10), "WWWWWGGAAAAA........"),
        (_phase(weights=2, gradients=2), "G..................."),
        (_phase(allocator_cache=100), "CCCCCCCCCCCCCCCCCCCC"),
        (PhaseMemory(phase=RunPhase.FORWARD, terms=(_COPIES,)), "WWWWWWWWWW.........."),
        (_phase(weights=90, gathered_weights=20), "WWWWWWWWWWWWWWWWWWB>"),
        (_phase(weights=1000), "WWWWWWWWWWWWWWWWWWW>"),
    ],
)
def test_bar(phase: PhaseMemory, expected: str) -> None:
    assert bar(phase, limit_bytes=100, width=20) == expected


def test_letters_and_terms_stand_in_one_group() -> None:
    assert len({group.letter for group in GROUPS}) == len(GROUPS)
    terms = [term for group in GROUPS for term in group.terms]
    assert len(set(terms)) == len(terms)
    assert group_of("a buffer that is new").letter == "B"


_ZERO3 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "expected"),
    [
        (Strategy(), 1, "one GPU"),
        (Strategy(optimizer=OptimizerName.ADAMW_8BIT), 8, "DDP, 8-bit AdamW"),
        (_ZERO3, 8, "ZeRO-3"),
        (
            Strategy(gradient_checkpointing=True, activation_offload=True),
            1,
            "one GPU, checkpointing to the host",
        ),
        (
            Strategy(gradient_checkpointing=True, activation_offload=True, checkpoint_every=2),
            8,
            "DDP, checkpointing 1 block in 2 to the host",
        ),
        (
            Strategy(
                engine=Engine.DEEPSPEED,
                zero_stage=ZeroStage.PARAMETERS,
                optimizer_offload=OffloadDevice.CPU,
                param_offload=OffloadDevice.NVME,
                gradient_checkpointing=True,
                lora=Lora(rank=8),
                freeze=("*embed*",),
                buckets=Buckets(sub_group_size=1),
                compile=True,
            ),
            8,
            "ZeRO-3, optimizer on cpu, weights on nvme, checkpointing, LoRA 8, frozen weights, "
            "small buckets, compiled",
        ),
    ],
)
def test_label(strategy: Strategy, num_ranks: int, expected: str) -> None:
    assert label(strategy, Topology(world_size=num_ranks)) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.0123, "12 ms"),
        (0.9994, "999 ms"),
        (1, "1.00 s"),
        (9.5, "9.50 s"),
        (12.34, "12.3 s"),
        (99.5, "99.5 s"),
        (1234.5, "1234 s"),
    ],
)
def test_seconds(number: float, expected: str) -> None:
    assert seconds(number) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.5, "fits, 50% faster"),
        (0.96, "fits, as fast"),
        (1.04, "fits, as fast"),
        (1.09, "fits, 9% slower"),
        (1.5, "fits, 50% slower"),
        (2.0, "fits, 2.0x time"),
        (None, "fits"),
    ],
)
def test_a_short_verdict_has_the_time_beside_the_choice(
    ratio: float | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_table, "speedup", lambda chosen, judged: ratio)
    monkeypatch.setattr(plan_table, "fit_words", lambda estimate, problem: "fits")
    answer: Any = SimpleNamespace(found=SimpleNamespace(chosen="the choice"), head="the choice", problem=None)
    judged: Any = SimpleNamespace(fits=True, estimate=None)
    assert short_verdict(answer, judged) == expected


@pytest.mark.parametrize(
    ("per_s", "expected"),
    [(None, "-"), (0, "-"), (987.6, "988"), (12_345, "12.3k"), (1_234_567, "1.23M")],
)
def test_rate(per_s: float | None, expected: str) -> None:
    assert rate(per_s) == expected


def test_of_files_that_fit_it_is_said_why_another_strategy_is_chosen() -> None:
    answer = solved(problem(num_gpus=2))
    chosen = answer.found.chosen
    assert chosen is not None
    fits = next(judged for judged in answer.found.others if judged.fits)
    lacks = replace(fits, shortage="needs 2 GiB of 1 GiB on each GPU")
    for judged, end in (
        (chosen, "; this is what runs"),
        (fits, f"; not chosen: {why_it_loses(fits, chosen, answer.problem)}"),
        (lacks, ""),
    ):
        line, *_ = as_it_is_lines(replace(answer, as_files_say=judged))
        assert line.startswith("as your files say: ")
        assert line.endswith(end)
        assert ("not chosen" in line) is (judged is fits)
