"""Layouts of ranks that share samples: which one is chosen, and the table of all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from planning_problems import LARGE, closed_forms, model, problem, solved, spec_of

from zerofit.cli.output.plan_json import plan_json
from zerofit.core.errors import UserError
from zerofit.core.estimates import RunPhase
from zerofit.core.overrides import overrides
from zerofit.core.plan import Origin, Topology
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.planning.layout_table import layout_table
from zerofit.planning.layouts import best_layout, check_open, compare_layouts, other_layouts
from zerofit.planning.plan_table import grouped
from zerofit.planning.problem import Problem
from zerofit.planning.search import EstimatedStrategy, tier
from zerofit.planning.solve import Answer, best_of

_CHECKPOINTING = spec_of(gradient_checkpointing=True)
_LONG = problem(
    sequence_length=65_536,
    global_batch_size=8,
    memory_gib=40,
    spec=_CHECKPOINTING,
    facts=model(num_layers=4),
)
_DEEP = replace(LARGE, num_layers=30, hidden_size=2560, intermediate_size=10_240)
_ZERO3 = Strategy(
    engine=Engine.DEEPSPEED,
    zero_stage=ZeroStage.PARAMETERS,
    micro_batch_size=1,
    gradient_accumulation_steps=1,
)


@cache
def _long() -> Answer:
    return solved(_LONG)


def _sizes(answer: Answer) -> tuple[int, int]:
    topology = answer.plan.topology
    return topology.data_parallel_size, topology.sequence_parallel_size


def test_ranks_share_no_samples_where_whole_ones_fit() -> None:
    answer = solved(problem(sequence_length=1024))
    assert answer.problem.topology == Topology(world_size=8)
    assert "parallel_size" not in str([reason.field for reason in answer.plan.reasons])


def test_ranks_share_long_samples_where_whole_ones_fit_nowhere() -> None:
    alone = replace(_LONG, spec=_CHECKPOINTING.setting(sequence_parallel_size=1))
    before = solved(alone)
    assert not before.fits
    answer = _long()
    assert answer.fits
    assert _sizes(answer)[1] > 1
    (reason,) = (one for one in answer.plan.reasons if one.field == "sequence_parallel_size")
    assert (reason.value, reason.origin) == (str(_sizes(answer)[1]), Origin.PLANNER)
    nothing = "with whole samples on each GPU nothing fits; the nearest "
    assert reason.why == f"{nothing}{before.head.shortage}"


def test_the_global_batch_stays() -> None:
    answer = _long()
    strategy, topology = answer.plan.strategy, answer.plan.topology
    assert strategy.micro_batch_size is not None
    assert strategy.gradient_accumulation_steps is not None
    made = strategy.micro_batch_size * strategy.gradient_accumulation_steps * topology.data_parallel_size
    assert made == 8


@pytest.mark.parametrize(
    ("num_gpus", "num_nodes", "heads", "key_heads", "sequence", "tensor"),
    [
        (8, 1, 16, 16, [2, 4, 8], [2, 4, 8]),
        (8, 1, 16, 2, [2, 4, 8], [2]),  # ranks that share layers have heads of keys each
        (8, 1, 12, 12, [2, 4], [2, 4]),
        (8, 1, 7, 7, [], []),
        (6, 1, 12, 12, [2, 3, 6], [2, 3, 6]),
        (8, 4, 32, 8, [2, 4, 8], [2, 4, 8]),  # groups stay within a node
        (1, 1, 16, 16, [], []),
    ],
)
def test_groups_divide_heads_and_the_ranks_of_a_node(
    num_gpus: int, num_nodes: int, heads: int, key_heads: int, sequence: list[int], tensor: list[int]
) -> None:
    facts = model(num_attention_heads=heads, num_key_value_heads=key_heads)
    asked = problem(num_gpus=num_gpus, num_nodes=num_nodes, facts=facts)
    layouts = [one.topology for one in other_layouts(asked)]
    assert [one.sequence_parallel_size for one in layouts if one.tensor_parallel_size == 1] == sequence
    assert [one.tensor_parallel_size for one in layouts if one.sequence_parallel_size == 1] == tensor
    for one in layouts:
        sizes = one.tensor_parallel_size * one.sequence_parallel_size * one.pipeline_parallel_size
        assert one.world_size == one.data_parallel_size * sizes == num_gpus * num_nodes
        assert one.num_replicas * one.tensor_parallel_size == one.world_size


def test_what_is_no_better_by_closed_forms_is_not_traced() -> None:
    """Model states dominate here, and sharing samples does not reduce them."""
    asked = problem(facts=LARGE, memory_gib=10, num_gpus=4, sequence_length=256, spec=_CHECKPOINTING)
    solved_for: list[Topology] = []

    def quickly(one: Problem) -> EstimatedStrategy | None:
        return best_of(one, closed_forms)

    def traced(one: Problem) -> EstimatedStrategy | None:
        solved_for.append(one.topology)
        return quickly(one)

    alone = quickly(asked)
    assert alone is not None
    assert alone.strategy.offloads
    assert best_layout(asked, alone, tier_of=tier, solve=traced, presolve=quickly) is None
    assert solved_for == []


def test_what_is_better_by_closed_forms_is_chosen() -> None:
    asked = problem(sequence_length=16_384, global_batch_size=8, memory_gib=10, num_gpus=4)

    def quickly(one: Problem) -> EstimatedStrategy | None:
        return best_of(one, closed_forms)

    alone = quickly(asked)
    assert alone is not None
    taken = best_layout(asked, alone, tier_of=tier, solve=quickly, presolve=quickly)
    assert taken is not None
    assert taken.topology.sequence_parallel_size == 2


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_size_that_is_given_is_planned_for(size: int) -> None:
    asked = problem(spec=spec_of(sequence_parallel_size=size))
    answer = solved(replace(asked, topology=Topology(world_size=8, sequence_parallel_size=size)))
    assert _sizes(answer) == (8 // size, size)
    (reason,) = (one for one in answer.plan.reasons if one.field == "sequence_parallel_size")
    assert (reason.origin, reason.why) == (Origin.FLAG, "--sequence-parallel-size says so")


def _shared(size: int, asked: Problem, kind: str = "sequence") -> Problem:
    sizes: dict[str, Any] = {f"{kind}_parallel_size": size}
    return replace(asked, topology=replace(asked.topology, **sizes))


@pytest.mark.parametrize("kind", ["sequence", "tensor"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_more_ranks_to_a_sample_never_cost_more_activations_and_always_exchange(
    checkpoints: bool, kind: str
) -> None:
    asked = problem(facts=_DEEP, sequence_length=16_384, global_batch_size=8)
    strategy = replace(_ZERO3, gradient_checkpointing=checkpoints)
    activations, totals = [], []
    for size in (1, 2, 4, 8):
        estimate = closed_forms(_shared(size, asked, kind)).estimate(strategy).estimate
        for phase in estimate.device.phases:
            assert phase.total_bytes == sum(term.num_bytes for term in phase.terms)
        held = [
            sum(num_bytes for group, num_bytes in grouped(phase) if group.letter == "A")
            for phase in estimate.device.phases
        ]
        activations.append(max(held))
        assert estimate.step_time is not None
        totals.append(
            sum(one.seconds for one in estimate.step_time.terms if one.name == "exchange in the group")
        )
    assert activations == sorted(activations, reverse=True)
    assert totals[0] == 0 < min(totals[1:])


def test_zero_partitions_over_the_ranks_of_all_groups() -> None:
    asked = problem(facts=LARGE)
    phases = [
        {term.name: term.num_bytes for term in closed_forms(one).estimate(_ZERO3).estimate.device.peak.terms}
        for one in (asked, _shared(8, asked))
    ]
    assert phases[0]["master weights"] == phases[1]["master weights"]


def test_ranks_that_share_layers_hold_parts_of_their_states_and_whole_embeddings() -> None:
    asked = problem(facts=LARGE)
    states = []
    for size in (1, 2):
        estimate = closed_forms(_shared(size, asked, "tensor")).estimate(
            replace(_ZERO3, zero_stage=ZeroStage.OPTIMIZER_STATES)
        )
        step = estimate.estimate.device.of(RunPhase.STEP)
        assert step is not None
        held = {term.name: term.num_bytes for term in step.terms}
        states.append((held["weights"], held["master weights"]))
    assert states[0][0] / 2 < states[1][0] < states[0][0]
    # ZeRO partitions over the 4 ranks that hold the same parts, and not over all 8.
    assert states[1][1] == pytest.approx(states[1][0] / 4, rel=0.01)


def test_the_table_has_each_layout_and_says_why_it_loses() -> None:
    answer = solved(_LONG, compares_layouts=True)
    lines = layout_table(answer, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[2:] if re.match(r"[> ]  ?\d", line)]  # but what is wrapped
    sizes = [[int(word) for word in row if word.isdigit()][:4] for row in rows]
    by_tokens = [[8, 1, 1, 1], [4, 1, 2, 1], [2, 1, 4, 1], [1, 1, 8, 1]]
    by_blocks = [[4, 1, 1, 2], [2, 1, 1, 4]]
    assert sizes == [*by_tokens, [4, 2, 1, 1], [2, 4, 1, 1], [1, 8, 1, 1], *by_blocks]
    assert " ".join(" ".join(lines).split()).count("--fast does not estimate") == 2
    chosen = [line for line in lines if line.startswith(">")]
    assert len(chosen) == 1
    assert chosen[0].endswith("chosen")
    document = json.loads(plan_json([answer]))["plans"][0]
    shown = [one["topology"].get("sequence_parallel_size", 1) for one in document["layouts"]]
    assert shown == [1, 2, 4, 8, 1, 1, 1, 1, 1]
    assert "layouts" not in json.loads(plan_json([_long()]))["plans"][0]


def test_layouts_are_not_compared_where_a_flag_says_which() -> None:
    check_open(overrides())
    with pytest.raises(UserError) as error:
        check_open(overrides(sequence_parallel_size=2))
    assert error.value.found == "--compare-layouts with --sequence-parallel-size 2"


@pytest.mark.parametrize(
    ("facts", "sizes"),
    [
        (model(is_causal=True, num_layers=8), [2, 4, 8]),
        (model(is_causal=True, num_layers=4), [2, 4]),
        (model(is_causal=False, num_layers=8), []),
    ],
)
def test_pipeline_stages_are_compared_for_a_model_of_the_next_token(facts: Any, sizes: list[int]) -> None:
    layouts = compare_layouts(problem(facts=facts), solve=lambda laid_out: None)
    assert layouts[0].problem.topology == Topology(world_size=8)
    found = [layout.problem.topology.pipeline_parallel_size for layout in layouts]
    assert [size for size in found if size > 1] == sizes
    assert (len(layouts) > 1) is facts.is_causal
