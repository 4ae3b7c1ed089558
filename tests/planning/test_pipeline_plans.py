"""Plans for pipeline stages, from traces of each stage of a small Llama."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from planning_problems import RATES, model, problem, spec_of
from tiny_traces import trace_of_two_runs

from zerofit.core.allocation_log import AllocationLog, Trace, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.estimates import RunPhase
from zerofit.core.plan import Origin, Reason, Topology, plan_from_json, plan_to_json
from zerofit.core.strategy import Engine, OptimizerName, Precision, Strategy
from zerofit.core.units import GIB
from zerofit.machine.machine_spec import SpecifiedMachine
from zerofit.planning.candidates import candidates
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.engines.engine import WEIGHT_COPIES
from zerofit.planning.estimate.engines.pipeline import STAGE_BUFFERS
from zerofit.planning.estimate.engines.stage import Stage
from zerofit.planning.layouts import compare_layouts
from zerofit.planning.options import Reserve
from zerofit.planning.plan import ranks_to_plan
from zerofit.planning.plan_from_flags import choose
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.solve import Answer, best_of, solve
from zerofit.planning.stages import share_by_memory, with_stage_blocks
from zerofit.planning.training_estimator import TrainingEstimator

_HIDDEN, _TOKENS, _VOCABULARY = 64, 128, 512
_FACTS = model(
    num_parameters=330_816,
    num_trainable_parameters=330_816,
    num_layers=6,
    hidden_size=_HIDDEN,
    vocab_size=_VOCABULARY,
    intermediate_size=176,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    num_largest_layer_parameters=50_304,
    largest_parameter=_VOCABULARY * _HIDDEN,
)


@cache
def _traced(request: TraceRequest, *, is_tied: bool = False) -> Trace:
    """Return a trace whose log for more samples is taken for one sample, too: no test here looks at one."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=_HIDDEN, intermediate_size=176, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=is_tied,
    )  # fmt: skip
    trace = trace_of_two_runs(config, transformers.AutoModelForCausalLM.from_config, request)
    return replace(trace, logs=(replace(trace.logs[0], least_micro_batch_size=1),))


def _log(stage: int, *, stages: int = 2, is_tied: bool = False, **fields: Any) -> AllocationLog:
    request = TraceRequest(
        sequence_length=_TOKENS,
        keeps_outputs=False,
        pipeline_parallel_size=stages,
        pipeline_place=stage,
        **fields,
    )
    return _traced(request, is_tied=is_tied).log_for(2)


def _flops(log: AllocationLog) -> int:
    return sum(cost.count * (cost.fixed_flops + 2 * cost.flops_per_sample) for cost in log.costs)


@pytest.mark.parametrize("checkpoints", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stages_share_the_operations_and_the_parameters_of_the_whole(checkpoints: bool) -> None:
    stages = [_log(stage, stages=3, gradient_checkpointing=checkpoints) for stage in range(3)]
    whole = _traced(
        TraceRequest(sequence_length=_TOKENS, keeps_outputs=False, gradient_checkpointing=checkpoints)
    ).log_for(2)
    assert sum(map(_flops, stages)) == _flops(whole)
    sizes = [sum(one.num_elements for one in log.parameters) for log in (*stages, whole)]
    assert sum(sizes[:3]) == sizes[3]


@pytest.mark.slow
def test_tied_embeddings_are_on_both_ends() -> None:
    held = [[one.name for one in _log(stage, is_tied=True).parameters] for stage in range(2)]
    assert ["model.embed_tokens.weight" in names for names in held] == [True, True]


def _problem(
    stages: int, *, num_gpus: int = 2, per_rank: int = 1, spec: RunSpec | None = None, **fields: Any
) -> Any:
    asked = problem(
        facts=_FACTS,
        num_gpus=num_gpus,
        sequence_length=_TOKENS,
        spec=(spec or spec_of()).setting(pipeline_parallel_size=stages),
        **{"global_batch_size": 16, **fields},
    )
    sizes: Any = {"pipeline_parallel_size": stages, "pipeline_stages_per_rank": per_rank}
    return replace(asked, topology=with_stage_blocks(replace(asked.topology, **sizes), _FACTS))


def _estimator(asked: Any) -> TrainingEstimator:
    return TrainingEstimator(asked, trace=_traced, rates=RATES)


def _strategy(size: int, steps: int) -> Strategy:
    return Strategy(precision=Precision.FP32, micro_batch_size=size, gradient_accumulation_steps=steps)


def _live(setup: Any) -> dict[RunPhase, dict[str, int]]:
    return {peak.phase: dict(peak.live) for peak in replay_live(play_strategy(setup).tape).peaks}


@pytest.mark.parametrize(
    ("number", "received"),
    [pytest.param(0, 4, marks=pytest.mark.slow), (1, 8), pytest.param(2, 4, marks=pytest.mark.slow)],
)
def test_a_stage_holds_a_buffer_for_each_micro_batch_from_both_its_neighbours(
    number: int, received: int
) -> None:
    estimator = _estimator(_problem(3, num_gpus=3))
    live = _live(estimator._setup(_strategy(4, 4), number))
    assert live[RunPhase.STEP][STAGE_BUFFERS] == received * 4 * _TOKENS * _HIDDEN * 4


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    estimator = _estimator(_problem(2))
    setup = estimator._setup(_strategy(4, 4), 0)
    assert setup.stage == Stage(
        number=0, num_ranks=2, passes=1, hidden_bytes_per_sample=_TOKENS * _HIDDEN * 4
    )
    alone = replace(setup, stage=replace(setup.stage, number=1))
    held = [_live(one)[RunPhase.BACKWARD]["activations"] for one in (setup, alone)]
    assert held[0] == pytest.approx(2 * held[1], rel=0.1)


def test_casts_of_weights_stay_once_for_all_micro_batches_of_a_pass() -> None:
    """All of a pass runs inside one autocast, whose cache keeps a cast of each weight."""
    estimator = _estimator(_problem(2))
    setup = estimator._setup(replace(_strategy(4, 4), precision=Precision.BF16), 0)
    matrices = sum(one.num_elements for one in setup.log.parameters if len(one.shape) == 2)
    cast = matrices - _VOCABULARY * _HIDDEN  # not the embedding
    live = _live(setup)
    assert live[RunPhase.FORWARD][WEIGHT_COPIES] == live[RunPhase.BACKWARD][WEIGHT_COPIES] == 2 * cast
    assert WEIGHT_COPIES not in live[RunPhase.STEP]


def test_a_pass_adds_its_gradients_to_those_that_wait() -> None:
    estimator = _estimator(_problem(2))
    once, more = (estimator._setup(_strategy(4, steps), 0) for steps in (4, 8))
    twice = replace(more, stage=replace(more.stage, passes=2))
    gradients = [_live(one)[RunPhase.BACKWARD]["gradients"] for one in (once, twice)]
    assert gradients[1] > 1.8 * gradients[0]


def test_the_fullest_stage_is_the_estimate_and_says_which_it_is() -> None:
    estimator = _estimator(_problem(3, num_gpus=3))
    strategy = _strategy(4, 4)
    device = estimator.estimate(strategy).estimate.device
    stages = [estimator._estimate(estimator._setup(strategy, number)).peak_bytes for number in range(3)]
    assert device.peak_bytes == max(stages)
    assert device.uncertainty_source.startswith(
        f"of stage {stages.index(max(stages))} of 0 to 2, the fullest"
    )


@pytest.mark.slow
def test_more_micro_batches_wait_for_a_smaller_share_of_the_step() -> None:
    estimator = _estimator(_problem(2, global_batch_size=64))
    shares = []
    for steps in (2, 4, 8):
        time = estimator.estimate(_strategy(64 // steps, steps)).estimate.step_time
        assert time is not None
        terms = {one.name: one.seconds for one in time.terms}
        shares.append(terms["waiting for other stages"] / time.seconds)
        assert terms["sent between stages"] > 0
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("size", "stages", "micro_batches"), [(16, 2, [1, 2, 4, 8]), (16, 4, [1, 2, 4])])
def test_a_pass_has_a_micro_batch_for_each_stage(size: int, stages: int, micro_batches: list[int]) -> None:
    space = candidates(_problem(stages, num_gpus=stages, global_batch_size=size))
    assert {one.engine for one in space.strategies} == {Engine.NATIVE}
    assert sorted({one.micro_batch_size for one in space.strategies}) == micro_batches


def test_a_batch_that_does_not_fill_the_stages_is_refused() -> None:
    with pytest.raises(UserError) as error:
        candidates(_problem(4, num_gpus=8, global_batch_size=4))
    assert str(error.value).splitlines() == [
        "error[pipeline-batch-too-small]: the global batch is too small for the stages",
        "  found: a global batch of 4 on 2 pipelines of 4 ranks",
        "  why:   each forward pass needs a micro-batch for each rank, as 1F1B runs them",
        "  fix:   take a larger batch, smaller micro-batches or fewer ranks in a pipeline",
    ]


def test_a_plan_is_made_for_stages_that_are_asked_for() -> None:
    asked = _problem(2, num_gpus=4, spec=spec_of(precision=Precision.FP32))
    answer = solve(asked, estimator_of=_estimator)
    assert answer.fits
    topology = answer.plan.topology
    assert topology == Topology(world_size=4, pipeline_parallel_size=2)
    strategy = answer.plan.strategy
    assert (strategy.micro_batch_size or 0) * (strategy.gradient_accumulation_steps or 0) * 2 == 16


@pytest.mark.slow
def test_blocks_are_shared_by_memory_where_equally_fast_stages_do_not_fit() -> None:
    """The first of two stages holds two micro-batches, and is the fullest."""
    fixed: Any = {"micro_batch_size": 4, "gradient_checkpointing": False, "precision": Precision.FP32}
    asked = _problem(2)
    asked = replace(asked, spec=asked.spec.setting(optimizer=OptimizerName.ADAMW, **fixed))
    strategy = replace(_strategy(4, 4), gradient_checkpointing=False, optimizer=OptimizerName.ADAMW)
    first, last = _estimator(asked).stage_bytes(strategy)
    assert first > last
    tight = asked.with_options(reserve=Reserve(share=0.0, num_bytes=asked.card_bytes - first + 1))
    answer = solve(tight, estimator_of=_estimator)
    assert answer.fits
    assert answer.plan.topology.stage_blocks == (2, 4)
    assert answer.head.estimate.device.peak_bytes < first
    assert "stages of 2, 4 blocks: with equally fast ones nothing fits" in answer.notes
    kept = plan_from_json(plan_to_json(answer.plan), name="plan.json")
    machine, versions = answer.plan.machine, answer.plan.versions
    launched = choose(machine=machine, versions=versions, spec=spec_of(plan=kept, num_processes=2))
    assert launched.topology.stage_blocks == (2, 4)
    wide = tight.with_options(reserve=Reserve(share=0.0, num_bytes=asked.card_bytes - first))
    assert solve(wide, estimator_of=_estimator).plan.topology.stage_blocks == ()
    too_tight = tight.with_options(reserve=Reserve(share=0.0, num_bytes=asked.card_bytes - first // 2))
    answer = solve(too_tight, estimator_of=_estimator)
    assert not answer.fits
    assert answer.plan.topology.stage_blocks == ()


def test_a_ranks_stages_are_traced_as_one_with_the_blocks_of_all() -> None:
    asked = _problem(2, per_rank=3)
    assert asked.topology.stage_blocks == (1, 1, 1, 1, 1, 1)
    setup = _estimator(asked)._setup(_strategy(4, 4), 1)
    assert (setup.stage.blocks, list(setup.stage.numbers)) == ((1, 1, 1), [1, 3, 5])
    assert setup.log is _estimator(asked)._setup(_strategy(4, 4), 1).log
    assert sum(one.name.endswith("q_proj.weight") for one in setup.log.parameters) == 3


def test_interleaved_stages_wait_less_and_hold_more() -> None:
    fields: Any = {"global_batch_size": 64}
    strategy = _strategy(8, 8)
    plain, interleaved = (_estimator(_problem(2, per_rank=count, **fields)) for count in (1, 3))
    waits, sends = [], []
    for estimator in (plain, interleaved):
        time = estimator.estimate(strategy).estimate.step_time
        assert time is not None
        terms = {one.name: one.seconds for one in time.terms}
        waits.append(terms["waiting for other stages"])
        sends.append(terms["sent between stages"])
    # Each rank has three blocks of six, and the last the head, as with one stage on each.
    assert waits[1] == pytest.approx(waits[0] / 3, rel=0.01)
    assert sends[1] == pytest.approx(3 * sends[0])
    hidden = 8 * _TOKENS * _HIDDEN * 4
    live = [_live(one._setup(strategy, 0)) for one in (plain, interleaved)]
    held = [one[RunPhase.BACKWARD][STAGE_BUFFERS] for one in live]
    # Eight micro-batches from one neighbour, or from five of three stages; an output that waits for its turn.
    assert held == [8 * hidden, (5 * 8 + 1) * hidden]


@pytest.mark.parametrize(
    ("per_rank", "checkpoints"),
    [
        *((1, True), (3, False)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, False), (2, False), (2, True), (3, True))
        ),
    ],
)
def test_the_micro_batches_that_are_left_out_raise_no_peak(
    per_rank: int, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = _estimator(_problem(2, per_rank=per_rank, global_batch_size=64))
    strategy = replace(_strategy(4, 16), gradient_checkpointing=checkpoints)
    setups = [estimator._setup(strategy, rank) for rank in range(2)]
    short, whole = [], []
    for found in (short, whole):
        found += [{phase: sum(held.values()) for phase, held in _live(one).items()} for one in setups]
        monkeypatch.setattr(Stage, "least_played", lambda *_: 1000)
    assert short == whole


def test_stages_behind_frozen_ones_run_backward_to_what_they_receive() -> None:
    """Rank 0 holds blocks 0, 2 and 3 of stages 0 and 2; stage 2 sends the gradient of what it receives."""
    asked = _problem(2, per_rank=2)
    assert asked.topology.stage_blocks == (1, 2, 2, 1)
    strategy = replace(_strategy(4, 4), freeze=("embeddings+4",))
    setups = [_estimator(asked)._setup(strategy, rank) for rank in range(2)]
    trained = [[one.name for one in setup.log.parameters if one.trains] for setup in setups]
    # Block 4 is in stage 2, and block 5 in stage 3.
    assert [sum("q_proj" in name for name in names) for names in trained] == [1, 1]
    assert _live(setups[0])[RunPhase.BACKWARD]["activation gradients"] > 0
    assert _estimator(asked).estimate(strategy).estimate.device.peak_bytes > 0


@pytest.mark.parametrize(("stage", "number", "expected"), [
    (Stage(number=0, num_ranks=2, blocks=(1, 1), passes=1, hidden_bytes_per_sample=1), 4,
     [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]),
    (Stage(number=1, num_ranks=2, passes=1, hidden_bytes_per_sample=1), 3, [(0, 0), (1, 0), (2, 0)]),
])  # fmt: skip
def test_ranks_take_the_micro_batches_of_a_stage_by_rounds(
    stage: Stage, number: int, expected: list[tuple[int, int]]
) -> None:
    assert list(stage.turns(number)) == expected


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("per_rank", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_order_of_passes_is_that_of_torch(num_ranks: int, per_rank: int, rounds: int) -> None:
    from torch.distributed.pipelining import schedules

    number = rounds * num_ranks
    strategy = _strategy(1, number)
    for rank in range(num_ranks):
        torchs: Any = SimpleNamespace(
            n_local_stages=per_rank,
            microbatches_per_round=num_ranks,
            pp_group_size=num_ranks,
            _n_microbatches=number,
        )
        actions = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(torchs, rank)
        theirs = [
            (one.computation_type.value, one.microbatch_index, one.stage_index) for one in actions if one
        ]
        stage = Stage(
            number=rank, num_ranks=num_ranks, blocks=(1,) * per_rank, passes=1, hidden_bytes_per_sample=1
        )
        ours = [
            ("F" if is_forward else "B", index, stage.numbers[place])
            for is_forward, index, place in stage.passes_in_order(number, stage.in_flight(strategy))
        ]
        assert ours == theirs


def test_micro_batches_of_interleaved_stages_come_in_rounds() -> None:
    space = candidates(_problem(2, per_rank=3, global_batch_size=24))
    assert sorted({one.gradient_accumulation_steps for one in space.strategies}) == [2, 4, 6, 8, 12, 24]
    with pytest.raises(UserError) as error:
        candidates(_problem(2, per_rank=3, global_batch_size=9))
    assert str(error.value).splitlines() == [
        "error[pipeline-batch-not-in-rounds]: the global batch makes no whole rounds of micro-batches",
        "  found: a global batch of 9 on 1 pipelines of 2 ranks",
        "  why:   interleaved 1F1B runs the micro-batches of a pass by rounds of 2, one a rank",
        "  fix:   set --global-batch-size to 8 or 10, or --pipeline-stages-per-rank to 1",
    ]
    with pytest.raises(UserError, match="the global batch is too small for the stages"):
        candidates(_problem(2, per_rank=3, global_batch_size=1))


@cache
def _interleaved() -> Answer:
    fixed = spec_of(precision=Precision.FP32, gradient_checkpointing=False)
    return solve(_problem(2, per_rank=2, spec=fixed), estimator_of=_estimator)


@pytest.mark.slow
def test_a_plan_of_interleaved_stages_says_the_blocks_of_each_and_keeps_them() -> None:
    answer = _interleaved()
    assert answer.fits
    assert answer.plan.topology.stage_blocks == (1, 2, 2, 1)
    assert "stages of 1, 2, 2, 1 blocks: the slowest is as fast as it can be" in answer.notes
    said = answer.head.estimate.device.uncertainty_source
    assert re.match("of stages (0, 2|1, 3), which one GPU holds, the fullest; ", said)
    kept = plan_from_json(plan_to_json(answer.plan), name="plan.json")
    machine, versions = answer.plan.machine, answer.plan.versions
    launched = choose(machine=machine, versions=versions, spec=spec_of(plan=kept, num_processes=2))
    assert launched.topology == answer.plan.topology
    for flags, per_rank in (
        ({"num_processes": 2, "pipeline_stages_per_rank": 1}, 1),
        ({"num_processes": 4, "pipeline_parallel_size": 4, "on_cpu": True}, 1),
    ):
        other = choose(machine=machine, versions=versions, spec=spec_of(plan=kept, **flags))
        assert (other.topology.pipeline_stages_per_rank, other.topology.stage_blocks) == (per_rank, ())
        assert "pipeline_stages_per_rank" not in [one.field for one in other.reasons]


def test_a_plan_has_the_stages_per_rank_that_a_flag_says() -> None:
    machine = SpecifiedMachine(machine=_problem(2).machine, assumptions=())
    spec = spec_of(pipeline_parallel_size=2, pipeline_stages_per_rank=2, machine=machine)
    topology = ranks_to_plan(spec)
    assert (topology.pipeline_parallel_size, topology.pipeline_stages_per_rank) == (2, 2)
    assert (
        Reason(
            field="pipeline_stages_per_rank",
            value="2",
            origin=Origin.FLAG,
            why="--pipeline-stages-per-rank says so",
        )
        in _interleaved().plan.reasons
    )


@pytest.mark.slow
def test_one_stage_on_each_rank_is_suggested_where_several_do_not_fit() -> None:
    fixed: Any = {"micro_batch_size": 4, "gradient_checkpointing": False, "precision": Precision.FP32}
    asked = _problem(2, per_rank=2, global_batch_size=32)
    spec = asked.spec.setting(optimizer=OptimizerName.ADAMW, pipeline_stages_per_rank=2, **fixed)
    asked = replace(asked, spec=spec)
    strategy = replace(_strategy(4, 8), gradient_checkpointing=False, optimizer=OptimizerName.ADAMW)
    plain = max(_estimator(_problem(2, global_batch_size=32)).stage_bytes(strategy))
    assert max(_estimator(asked).stage_bytes(strategy)) > plain
    tight = asked.with_options(reserve=Reserve(share=0.0, num_bytes=asked.card_bytes - plain - 2**20))
    answer = solve(tight, estimator_of=_estimator)
    assert not answer.fits
    assert answer.suggestions[0].flags == "--pipeline-stages-per-rank 1"


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(UserError) as error:
        _problem(2, per_rank=4)
    assert str(error.value).splitlines()[1:] == [
        f"  found: 8 stages and 6 blocks of {_FACTS.name}",
        "  why:   a stage holds whole blocks",
        "  fix:   take at most 6 stages: a smaller --pipeline-parallel-size, or fewer on each rank",
    ]


@pytest.mark.slow
def test_stages_are_compared_and_taken_by_a_flag_alone() -> None:
    asked = problem(facts=_FACTS, num_gpus=4, sequence_length=_TOKENS, global_batch_size=16)
    fixed: Any = {"gradient_checkpointing": False, "precision": Precision.FP32}
    asked = replace(asked, spec=spec_of(micro_batch_size=2, optimizer=OptimizerName.ADAMW, **fixed))
    layouts = compare_layouts(asked, solve=lambda one: best_of(one, _estimator))
    in_stages = {
        one.problem.topology.pipeline_parallel_size: one.best
        for one in layouts
        if one.problem.topology.sample_group_size == one.problem.topology.pipeline_parallel_size > 1
    }
    assert list(in_stages) == [2, 4]
    assert all(best is not None and best.fits for best in in_stages.values())


@pytest.mark.parametrize(
    ("stages", "gib_per_block", "blocks"),
    [
        (2, (20, 20), None),  # fits with equal stages
        (2, (30, 10), (2, 4)),
        (2, (40, 20), None),  # nothing fits
        (3, (40, 10, 30), (1, 3, 2)),
        (1, (30,), None),
        (7, (90,) * 7, None),
    ],
)
def test_a_stage_whose_blocks_need_more_gets_fewer_of_them(
    stages: int, gib_per_block: tuple[int, ...], blocks: tuple[int, ...] | None
) -> None:
    asked = problem(facts=_FACTS, num_gpus=max(2, stages))
    asked = replace(asked, topology=Topology(world_size=max(2, stages), pipeline_parallel_size=stages))

    def estimator_of(laid_out: Any) -> Any:
        counts = laid_out.topology.stage_blocks
        sizes = tuple(count * gib * GIB for count, gib in zip(counts, gib_per_block, strict=True))
        return SimpleNamespace(stage_bytes=lambda strategy: sizes)

    shared = share_by_memory(asked, Strategy(), estimator_of)
    assert (shared.topology.stage_blocks if shared else None) == blocks
