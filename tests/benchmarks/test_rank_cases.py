"""The cases of many ranks: what they cover, and that no rule forbids one."""

from __future__ import annotations

import pytest
from gpu_truth.rank_cases import RANKS, RANKS_ON_CPU
from gpu_truth.results import Case

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.core.plan import Topology
from zerofit.core.strategy import OffloadDevice


@pytest.mark.parametrize("cases", [RANKS, RANKS_ON_CPU])
def test_every_stage_and_number_of_ranks_is_covered_with_offload_and_without(cases: tuple[Case, ...]) -> None:
    assert len({one.key for one in cases}) == len(cases)
    assert {one.num_ranks for one in cases} >= {2, 4, 8, 64}
    assert {one.strategy.zero_stage.value for one in cases} == {1, 2, 3}
    assert {one.strategy.optimizer_offload for one in cases} == {OffloadDevice.NONE, OffloadDevice.CPU}


@pytest.mark.parametrize(
    ("stage", "offload", "numbers"),
    [
        (1, "", {2, 4, 8, 64}),
        (1, "offload-optimizer", {4}),
        (2, "", {2, 4, 8, 64}),
        (2, "offload-optimizer", {4, 8}),
        (3, "", {2, 8, 64}),
        (3, "offload-optimizer", {8}),
        (3, "offload-param", {4, 8, 64}),
    ],
)
def test_the_numbers_of_ranks_of_each_stage_and_offload(stage: int, offload: str, numbers: set[int]) -> None:
    group = f"zero-{stage} {offload}".strip()
    assert {one.num_ranks for one in RANKS if one.group == group} == numbers


@pytest.mark.parametrize("case", [*RANKS, *RANKS_ON_CPU], ids=lambda one: one.key)
def test_no_rule_forbids_a_case(case: Case) -> None:
    situation = situation_of_strategy(case.strategy, topology=Topology(world_size=case.num_ranks))
    assert check(situation, rules=ALL_RULES).of(Severity.ERROR) == ()
