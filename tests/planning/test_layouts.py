"""Layouts: where ranks share samples, which layout is taken, and the table of all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planning_problems import LARGE, closed_forms, model, problem, solved

from zerofit.cli.output.plan_json import plan_json
from zerofit.core.errors import UserError
from zerofit.core.estimates import Holder
from zerofit.core.plan import Origin, Topology
from zerofit.core.request import Request
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.planning.layout_table import layout_table
from zerofit.planning.layouts import check_open, other_layouts
from zerofit.planning.problem import Problem
from zerofit.planning.solve import Answer

_LONG = problem(sequence_length=65_536, global_batch_size=8, memory_gib=40)
_ZERO3 = Strategy(
    engine=Engine.DEEPSPEED,
    zero_stage=ZeroStage.PARAMETERS,
    micro_batch_size=1,
    gradient_accumulation_steps=1,
)


def _sizes(answer: Answer) -> tuple[int, int]:
    topology = answer.plan.topology
    return topology.data_parallel_size, topology.sequence_parallel_size


def test_ranks_share_no_samples_where_whole_ones_fit() -> None:
    answer = solved(problem(sequence_length=1024))
    assert answer.problem.topology == Topology(world_size=8)
    assert "parallel_size" not in str([reason.field for reason in answer.plan.reasons])


def test_ranks_share_long_samples_where_whole_ones_fit_by_offload_alone_or_not_at_all() -> None:
    alone = replace(_LONG, request=Request(sequence_parallel_size=1))
    before = solved(alone)
    assert not before.fits or before.head.strategy.offloads
    answer = solved(_LONG)
    assert answer.fits
    assert _sizes(answer)[1] > 1
    (reason,) = (one for one in answer.plan.reasons if one.field == "sequence_parallel_size")
    assert (reason.value, reason.origin) == (str(_sizes(answer)[1]), Origin.PLANNER)
    assert reason.why.startswith("with whole samples on each GPU ")


def test_the_global_batch_stays() -> None:
    answer = solved(_LONG)
    strategy, topology = answer.plan.strategy, answer.plan.topology
    assert strategy.micro_batch_size is not None
    assert strategy.gradient_accumulation_steps is not None
    made = strategy.micro_batch_size * strategy.gradient_accumulation_steps * topology.data_parallel_size
    assert made == 8


@pytest.mark.parametrize(
    ("num_gpus", "num_nodes", "heads", "expected"),
    [
        (8, 1, 16, [2, 4, 8]),
        (8, 1, 12, [2, 4]),
        (8, 1, 7, []),
        (6, 1, 12, [2, 3, 6]),
        (8, 4, 32, [2, 4, 8]),  # groups stay within a node
        (1, 1, 16, []),
    ],
)
def test_groups_divide_heads_and_the_ranks_of_a_node(
    num_gpus: int, num_nodes: int, heads: int, expected: list[int]
) -> None:
    facts = model(num_attention_heads=heads, num_key_value_heads=heads)
    asked = problem(num_gpus=num_gpus, num_nodes=num_nodes, facts=facts)
    layouts = [one.topology for one in other_layouts(asked)]
    assert [one.sequence_parallel_size for one in layouts] == expected
    for one in layouts:
        sizes = one.tensor_parallel_size * one.sequence_parallel_size * one.pipeline_parallel_size
        assert one.world_size == one.data_parallel_size * sizes == num_gpus * num_nodes
        assert one.num_replicas == one.world_size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_size_that_is_given_is_planned_for(size: int) -> None:
    asked = problem(request=Request(sequence_parallel_size=size))
    answer = solved(replace(asked, topology=Topology(world_size=8, sequence_parallel_size=size)))
    assert _sizes(answer) == (8 // size, size)
    (reason,) = (one for one in answer.plan.reasons if one.field == "sequence_parallel_size")
    assert (reason.origin, reason.why) == (Origin.FLAG, "--sequence-parallel-size says so")


def _shared(size: int, asked: Problem) -> Problem:
    return replace(asked, topology=replace(asked.topology, sequence_parallel_size=size))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_more_ranks_to_a_sample_never_cost_more_memory_and_always_exchange_more_often(
    checkpoints: bool,
) -> None:
    asked = problem(facts=LARGE, sequence_length=16_384, global_batch_size=8)
    strategy = replace(_ZERO3, gradient_checkpointing=checkpoints)
    tensors, totals = [], []
    for size in (1, 2, 4, 8):
        estimate = closed_forms(_shared(size, asked)).estimate(strategy).estimate
        for phase in estimate.device.phases:
            assert phase.total_bytes == sum(term.num_bytes for term in phase.terms)
        tensors.append(max(phase.held_by(Holder.TENSORS) for phase in estimate.device.phases))
        assert estimate.step_time is not None
        totals.append(
            sum(one.seconds for one in estimate.step_time.terms if one.name == "exchange in the group")
        )
    assert tensors == sorted(tensors, reverse=True)
    assert totals[0] == 0 < min(totals[1:])


def test_zero_partitions_over_the_ranks_of_all_groups() -> None:
    asked = problem(facts=LARGE)
    phases = [
        {term.name: term.num_bytes for term in closed_forms(one).estimate(_ZERO3).estimate.device.peak.terms}
        for one in (asked, _shared(8, asked))
    ]
    assert phases[0]["master weights"] == phases[1]["master weights"]


def test_the_table_has_each_layout_and_says_why_it_loses() -> None:
    answer = solved(_LONG, compares_layouts=True)
    lines = layout_table(answer, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[2:]]
    sizes = [[int(word) for word in row if word.isdigit()][:4] for row in rows]
    assert sizes == [[8, 1, 1, 1], [4, 1, 2, 1], [2, 1, 4, 1], [1, 1, 8, 1]]
    chosen = [line for line in lines if line.startswith(">")]
    assert len(chosen) == 1
    assert chosen[0].endswith("chosen")
    document = json.loads(plan_json([answer]))["plans"][0]
    assert [one["topology"].get("sequence_parallel_size", 1) for one in document["layouts"]] == [1, 2, 4, 8]
    assert "layouts" not in json.loads(plan_json([solved(_LONG)]))["plans"][0]


def test_layouts_are_not_compared_where_a_flag_says_which() -> None:
    check_open(Request())
    with pytest.raises(UserError) as error:
        check_open(Request(sequence_parallel_size=2))
    assert error.value.found == "--compare-layouts with --sequence-parallel-size 2"
