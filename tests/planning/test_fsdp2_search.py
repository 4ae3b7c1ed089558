"""FSDP2 is searched beside ZeRO: where nobody names it, only where it may fit and the others don't."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from planning_problems import (
    LARGE,
    RATES,
    VERSIONS,
    closed_forms,
    made_trace,
    model,
    problem,
    replays,
    solved,
    spec_of,
)
from tiny_traces import run_sharded_once, tiny

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rules import ALL_RULES
from zerofit.core.allocation_log import Trace, TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.estimates import Holder, RunPhase
from zerofit.core.optimizers.lookup import REPLACEMENT_IDS, entry_of
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.models.trace.entry import trace_config
from zerofit.planning.beside_fsdp2 import may_be_better
from zerofit.planning.candidates import candidates
from zerofit.planning.closed_form_estimator import ClosedFormEstimator
from zerofit.planning.engine_order import allows_fsdp2, first_engine
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.options import MemoryLimits
from zerofit.planning.plan_reasons import rejected
from zerofit.planning.problem import Problem
from zerofit.planning.search import Candidate, simplicity
from zerofit.planning.solve import solve
from zerofit.planning.training_estimator import TrainingEstimator

_UNTIED = UserError(
    "fsdp2-unties-weights", "FSDP2 would train tied weights apart", found="T5", why="it does", fix="use ZeRO"
)


def _without_fsdp2(facts: Any, request: TraceRequest) -> Trace:
    """Trace by closed forms what is no FSDP2, and refuse the rest."""
    if request.sharding is not None:
        raise _UNTIED
    return Trace(request=request, logs=(closed_form_log(facts, request),))


def _searched(asked: Problem) -> Any:
    """Return the answer of traces that refuse FSDP2."""
    return solve(
        asked,
        estimator_of=lambda given: TrainingEstimator(
            given, trace=partial(_without_fsdp2, given.model), rates=RATES
        ),
        quick_estimator_of=closed_forms,
    )


def _rules(answer: Any) -> set[str]:
    return {finding.rule for dropped in answer.dropped for finding in dropped.findings}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (problem(), (Engine.DEEPSPEED, "nobody names FSDP")),
        (problem(spec=spec_of(engine=Engine.FSDP2)), (Engine.FSDP2, "--engine says so")),
        (problem(spec=spec_of(engine=Engine.DEEPSPEED)), (Engine.DEEPSPEED, "--engine says so")),
        (problem(versions=replace(VERSIONS, deepspeed=None)), (Engine.DEEPSPEED, "nobody names FSDP")),
        (
            problem(spec=spec_of(), versions=replace(VERSIONS, deepspeed=None)),
            (Engine.FSDP2, "DeepSpeed is not installed"),
        ),
    ],
)
def test_the_engine_that_wins_among_equals_is_what_is_named_else_deepspeed(
    asked: Problem, expected: tuple[Engine, str]
) -> None:
    assert first_engine(asked) == expected


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, True),
        ({"num_gpus": 1}, False),
        ({"spec": spec_of(zero_stage=ZeroStage.GRADIENTS)}, False),
        ({"spec": spec_of(engine=Engine.NATIVE)}, False),
        ({"topology": Topology(world_size=8, tensor_parallel_size=2)}, False),
        ({"topology": Topology(world_size=8, sequence_parallel_size=2)}, False),
        ({"topology": Topology(world_size=8, on_cpu=True)}, False),
        ({"spec": spec_of(engine=Engine.FSDP2), "num_gpus": 1}, True),
    ],
)
def test_fsdp2_may_shard_over_several_gpus_that_only_share_weights(fields: Any, allowed: bool) -> None:
    assert allows_fsdp2(problem(**fields)) is allowed


@pytest.mark.parametrize("offload", [OffloadDevice.NONE, OffloadDevice.CPU])
def test_the_first_engine_is_simpler_than_the_other_in_every_stage(offload: OffloadDevice) -> None:
    fsdp2 = Strategy(engine=Engine.FSDP2, optimizer_offload=offload, param_offload=offload)
    zero_3 = replace(fsdp2, engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)
    assert simplicity(zero_3) < simplicity(fsdp2)
    assert simplicity(fsdp2, Engine.FSDP2) < simplicity(zero_3, Engine.FSDP2)
    assert simplicity(replace(fsdp2, engine=Engine.NATIVE), Engine.FSDP2) < simplicity(fsdp2, Engine.FSDP2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_gpus": 2},
        {"num_nodes": 2},
        {"facts": LARGE, "global_batch_size": 8},
        {"spec": spec_of(lora=Lora())},
        {"spec": spec_of(precision=Precision.FP32), "global_batch_size": 16},
    ],
)
def test_nothing_is_traced_under_fsdp2_if_another_engine_fits_and_a_row_says_so(fields: Any) -> None:
    answer = _searched(problem(**fields))
    assert answer.fits
    assert "fsdp2-unties-weights" not in _rules(answer)
    [row] = [
        loser for loser in rejected(answer.found, answer.problem) if loser.strategy.engine is Engine.FSDP2
    ]
    assert "not traced, as nobody names FSDP: --engine fsdp2 plans it" in row.why


def test_what_fsdp2_needs_at_least_is_a_row_without_a_trace() -> None:
    answer = _searched(problem(num_gpus=2, memory_gib=12, facts=LARGE, global_batch_size=8, host_gib=400))
    assert answer.found.chosen.strategy.offloads
    [row] = [loser for loser in answer.plan.rejected if loser.strategy.engine is Engine.FSDP2]
    assert row.why.startswith("needs at least ")


_LARGE_BASE = model(num_parameters=34_000_000_000, num_trainable_parameters=34_000_000_000, num_layers=60)


@pytest.mark.parametrize("num_gpus", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_4_bit_base_that_no_gpu_holds_whole_is_sharded_by_fsdp2_alone(num_gpus: int) -> None:
    spec = spec_of(lora=Lora(), quantization=Quantization.NF4)
    asked = problem(num_gpus=num_gpus, memory_gib=16, facts=_LARGE_BASE, global_batch_size=4, spec=spec)
    sharded = [s for s in candidates(asked, with_fsdp2=True).strategies if s.engine is Engine.FSDP2]
    assert {strategy.quant_storage for strategy in sharded} == {Precision.BF16}
    answer = _searched(asked)
    assert not answer.fits
    assert "fsdp2-unties-weights" in _rules(answer)  # it was traced, since nothing else can fit


def test_a_change_that_helps_fsdp2_alone_is_suggested() -> None:
    large, spec = 34_000_000_000, spec_of(lora=Lora(), quantization=Quantization.NF4)
    facts = model(
        num_parameters=large,
        num_trainable_parameters=large,
        num_layers=12,
        hidden_size=8192,
        intermediate_size=104_000,
    )
    asked = problem(num_gpus=2, memory_gib=18, host_gib=32, facts=facts, global_batch_size=2, spec=spec)
    answer = solve(asked, estimator_of=_standing_in, quick_estimator_of=_standing_in)
    assert not answer.fits
    [more] = [
        found for found in answer.suggestions if found.change == "128.0 GiB of host memory on each node"
    ]
    assert (more.best.strategy.engine, more.best.strategy.param_offload) == (Engine.FSDP2, OffloadDevice.CPU)


def _standing_in(asked: Problem) -> ClosedFormEstimator:
    """Return an estimator that counts FSDP2 by closed forms of ZeRO-3."""
    return ClosedFormEstimator(asked, stands_in=True, trace=made_trace(asked.model), rates=RATES)


def test_an_engine_that_was_named_and_refuses_the_model_is_an_error_with_its_reason() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        _searched(problem(spec=spec_of(engine=Engine.FSDP2)))
    assert [error.rule for error in raised.value.exceptions] == ["fsdp2-unties-weights"]


def test_an_engine_that_this_machine_prefers_and_that_refuses_the_model_gives_way() -> None:
    asked = problem(spec=spec_of(), versions=replace(VERSIONS, deepspeed=None))
    answer = _searched(asked)
    assert answer.fits
    assert answer.found.chosen.strategy.engine is not Engine.FSDP2
    assert _rules(answer) >= {"fsdp2-unties-weights"}


@pytest.mark.parametrize("estimator", [closed_forms, replays])
def test_closed_forms_of_fsdp2_are_refused_with_the_reason(estimator: Any) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        solve(problem(spec=spec_of(engine=Engine.FSDP2)), estimator_of=estimator)
    assert [error.rule for error in raised.value.exceptions] == ["fsdp2-needs-trace"]


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "sequence_parallel_size", "pipeline_parallel_size"])
def test_groups_that_share_samples_are_refused_under_fsdp2_by_name(flag: str) -> None:
    spec = spec_of(engine=Engine.FSDP2, **{flag: 2})
    asked = problem(spec=spec, topology=Topology(world_size=8, **{flag: 2}))
    found = candidates(asked)
    rules = {finding.rule for dropped in found.dropped for finding in dropped.findings}
    assert (found.strategies, rules) == ((), {"fsdp2-without-other-groups"})


_NO_DTENSORS = "fsdp2-optimizer-takes-no-dtensors"


@pytest.mark.parametrize("optimizer", OptimizerName)
def test_an_optimizer_that_steps_no_dtensors_is_refused_when_it_is_planned(optimizer: OptimizerName) -> None:
    asked = problem(spec=spec_of(engine=Engine.FSDP2, optimizer=optimizer))
    found = candidates(asked)
    entry = entry_of(REPLACEMENT_IDS[optimizer])
    assert entry is not None
    findings = [finding for dropped in found.dropped for finding in dropped.findings]
    assert bool(found.strategies) == entry.takes_dtensors
    assert {finding.rule for finding in findings} == (set() if entry.takes_dtensors else {_NO_DTENSORS})
    assert all(f"--optimizer {optimizer} with FSDP 2" == finding.found for finding in findings)


@pytest.mark.parametrize(
    "own",
    [
        "torch.AdamW",
        "torch.Muon",
        "torch.Adafactor",
        "torch.Rprop",
        "transformers.Adafactor",
        "bitsandbytes.PagedAdamW32bit",
        "bitsandbytes.Lion8bit",
        "other:mine.Own",
    ],
)
@pytest.mark.parametrize("engine", Engine)
def test_the_scripts_own_optimizer_is_judged_by_the_same_rule(own: str, engine: Engine) -> None:
    strategy = Strategy(engine=engine)
    said: Said[str | None] = Said(value=own, text="the script's own")
    situation = situation_of_strategy(strategy, topology=Topology(world_size=2), own_optimizer=said)
    entry = entry_of(own)
    fails = engine is Engine.FSDP2 and entry is not None and not entry.takes_dtensors
    assert (_NO_DTENSORS in {finding.rule for finding in check(situation, rules=ALL_RULES).findings}) == fails


def test_a_plan_by_closed_forms_alone_has_no_row_of_fsdp2() -> None:
    answer = solved(problem())
    assert answer.found.untraced is None


@cache
def _plain(name: str, request: TraceRequest) -> Trace:
    config, build = tiny(name, 2)
    return trace_config(config, build, request, all_layers=True)


@cache
def _tiny_trace(name: str, request: TraceRequest) -> Trace:
    if request.sharding is None:
        return _plain(name, request)
    log = run_sharded_once(name, request)
    return Trace(request=request, logs=(replace(log, least_micro_batch_size=1),))


_FAMILIES = ("llama", "gpt2", "roberta")
_BOUNDED: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, ""),
    ({"gradient_checkpointing": True}, ""),
    ({"gradient_accumulation_steps": 3}, ""),
    ({"reshard_after_forward": False}, ""),
    ({"optimizer_offload": OffloadDevice.CPU, "param_offload": OffloadDevice.CPU}, "roberta"),
)
"""Fields of a strategy, and the family with which each is tried at each change, if one is."""


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        pytest.param(fields, name, marks=() if name == quick else pytest.mark.slow)
        for fields, quick in _BOUNDED
        for name in _FAMILIES
    ],
)
def test_the_bounds_of_fsdp2_need_no_trace_of_it_and_are_never_above_its_estimate(
    name: str, fields: dict[str, Any]
) -> None:
    parameters = sum(parameter.num_elements for parameter in _plain(name, _PLAIN).logs[-1].parameters)
    facts = model(num_parameters=parameters, num_trainable_parameters=parameters, hidden_size=64)
    asked = problem(num_gpus=2, facts=facts, sequence_length=16, global_batch_size=8)
    estimator = TrainingEstimator(asked, trace=partial(_tiny_trace, name), rates=RATES)
    strategy = Strategy(
        engine=Engine.FSDP2,
        precision=Precision.BF16,
        micro_batch_size=4,
        **{"gradient_accumulation_steps": 1, **fields},
    )
    least, seconds = estimator.least_live_bytes(strategy), estimator.seconds(strategy)
    assert not estimator.is_known(strategy)
    found = estimator.estimate(strategy).estimate
    assert estimator.least_bytes(strategy) <= least <= found.device.peak_bytes
    if not strategy.offloads:  # copies of tiny shards take the time of their launches
        assert found.step_time is not None
        assert seconds == pytest.approx(found.step_time.seconds, rel=0.5)
    for memory in found.device.phases[2:]:  # those of a step, and a save
        needed = memory.held_by(Holder.TENSORS)
        assert _limited(asked, name, memory.phase, needed).fits(strategy)
        assert not _limited(asked, name, memory.phase, needed - 1).fits(strategy)


def _limited(asked: Problem, name: str, phase: RunPhase | None, num_bytes: int) -> TrainingEstimator:
    """Return an estimator after an attempt that ran out of memory in a phase."""
    spec = replace(asked.spec, limits=MemoryLimits(phases=((phase, num_bytes),)))
    return TrainingEstimator(replace(asked, spec=spec), trace=partial(_tiny_trace, name), rates=RATES)


@pytest.mark.parametrize("phase", [RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.STEP, RunPhase.SAVE, None])
def test_states_beyond_the_limit_of_an_earlier_attempt_are_known_without_a_trace(
    phase: RunPhase | None,
) -> None:
    def untraced(request: TraceRequest) -> Trace:
        assert request.sharding is None
        return _without_fsdp2(model(), request)

    states = model().num_parameters * 12 // 2
    asked = problem(num_gpus=2, sequence_length=16, global_batch_size=8)
    spec = replace(asked.spec, limits=MemoryLimits(phases=((phase, states - 1),)))
    estimator = TrainingEstimator(replace(asked, spec=spec), trace=untraced, rates=RATES)
    assert not estimator.fits(Strategy(engine=Engine.FSDP2, precision=Precision.BF16, micro_batch_size=4))


_PLAIN = TraceRequest(sequence_length=16, weights=Precision.BF16)


@pytest.mark.parametrize(
    ("others", "excess", "is_traced"),
    [
        ((ZeroStage.PARAMETERS,), 1.05, True),
        ((ZeroStage.PARAMETERS,), 1.5, False),
        ((), 1.5, True),  # ZeRO-3 can't train it at all
    ],
)
def test_fsdp2_is_traced_where_zero3_nearly_fits_or_can_not_train_this(
    others: tuple[ZeroStage, ...], excess: float, is_traced: bool
) -> None:
    """Both hold the same states, in buffers that differ by less."""
    sharded = Strategy(engine=Engine.FSDP2)
    zero = [Strategy(engine=Engine.DEEPSPEED, zero_stage=stage) for stage in others]
    judged = tuple(Candidate(strategy=strategy, shortage="too large", excess=excess) for strategy in zero)
    found: Any = SimpleNamespace(chosen=None, others=judged, nearest=None)
    small: Any = SimpleNamespace(least_bytes=lambda strategy: 0, least_live_bytes=lambda strategy: 0)
    better = may_be_better(problem(), [sharded], zero, found, small)
    assert better == [sharded] * is_traced
    small.least_live_bytes = lambda strategy: 1 << 50
    assert may_be_better(problem(), [sharded], zero, found, small) == []
