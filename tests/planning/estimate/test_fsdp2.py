"""FSDP2 played for whole steps: shards, states, gathered units and what a save gathers, phase by phase."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from planning_problems import A100, VERSIONS, machine, problem, spec_of
from tiny_traces import run_sharded_once

from zerofit.core.allocation_log import AllocationLog, TraceRequest
from zerofit.core.estimates import MemoryEstimate, RunPhase
from zerofit.core.facts import Workload
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Quantization,
    StateDictType,
    Strategy,
)
from zerofit.machine.rates import catalog_rates
from zerofit.planning.closed_form_estimator import ClosedFormEstimator
from zerofit.planning.estimate.device_memory.memory import estimate_memory, play_strategy
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.host_memory import estimate_host_memory
from zerofit.planning.estimate.step_time import estimate_step_time
from zerofit.planning.search import EngineRefusedError
from zerofit.planning.trace_request import trace_request_for

_CPU = OffloadDevice.CPU
_FSDP2 = Strategy(engine=Engine.FSDP2, micro_batch_size=4, gradient_accumulation_steps=1)
_SAMPLES = Workload(sequence_length=16, is_padded=False)


@cache
def _log(request: TraceRequest) -> AllocationLog:
    return replace(run_sharded_once("llama", request), least_micro_batch_size=1)


def _setup(strategy: Strategy = _FSDP2, *, num_ranks: int = 2, copies: int = 1) -> Setup:
    topology = Topology(world_size=num_ranks, dp_replicate_size=copies)
    log = _log(trace_request_for(strategy, _SAMPLES, A100, topology=topology))
    exact = replace(strategy, micro_batch_size=1)  # the log's own
    return Setup(log=log, strategy=exact, topology=topology, versions=VERSIONS)


def _live(setup: Setup) -> dict[RunPhase, dict[str, int]]:
    return {peak.phase: dict(peak.live) for peak in replay_live(play_strategy(setup).tape).peaks}


def _peak(setup: Setup) -> int:
    return max(sum(terms.values()) for terms in _live(setup).values())


def _shard_bytes(setup: Setup) -> int:
    return sum(shard.num_elements * shard.bytes_per_element for shard in setup.log.shards)


def test_a_step_holds_shards_of_weights_gradients_and_two_states() -> None:
    setup = _setup()
    step, size = _live(setup)[RunPhase.STEP], _shard_bytes(setup)
    held = (step["weight shards"], step["gradients"], step["optimizer states"])
    assert held == (size, size, 2 * size)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [(None, 2), (OptimizerName.ADAMW, 2), (OptimizerName.SGD, 0), (OptimizerName.LION, 1)],
)
def test_states_are_those_of_the_shards(optimizer: OptimizerName | None, states: int) -> None:
    setup = _setup(replace(_FSDP2, optimizer=optimizer))
    held = _live(setup)[RunPhase.STEP].get("optimizer states", 0)
    assert held == pytest.approx(states * _shard_bytes(setup), rel=0.01)


def test_offload_leaves_neither_shards_nor_states_on_the_gpu() -> None:
    phases = _live(_setup(replace(_FSDP2, optimizer_offload=_CPU, param_offload=_CPU)))
    assert not {"weight shards", "optimizer states", "gradients"} & phases[RunPhase.STEP].keys()
    assert "gathered weights" in phases[RunPhase.FORWARD]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        pytest.param({}, {"reshard_after_forward": False}, marks=pytest.mark.slow),
        ({"optimizer_offload": _CPU, "param_offload": _CPU}, {}),
        pytest.param({"gradient_checkpointing": True}, {}, marks=pytest.mark.slow),
        pytest.param({}, {"gradient_accumulation_steps": 4}, marks=pytest.mark.slow),
    ],
)
def test_what_needs_less_never_needs_more(less: dict[str, Any], more: dict[str, Any]) -> None:
    assert _peak(_setup(replace(_FSDP2, **less))) <= _peak(_setup(replace(_FSDP2, **more)))


@pytest.mark.slow
def test_copies_cost_the_memory_of_fewer_ranks() -> None:
    hybrid, whole = _setup(num_ranks=4, copies=2), _setup(num_ranks=4)
    assert _shard_bytes(hybrid) == _shard_bytes(_setup(num_ranks=2)) > _shard_bytes(whole)


@pytest.mark.parametrize("kind", list(StateDictType))
def test_only_a_full_state_dict_gathers(kind: StateDictType) -> None:
    save = _live(_setup(replace(_FSDP2, state_dict_type=kind)))[RunPhase.SAVE]
    assert ("gathered state dict" in save) is (kind is StateDictType.FULL)


def _estimate(setup: Setup) -> MemoryEstimate:
    return estimate_memory(setup, gpu=A100)


def test_each_term_is_explained_and_a_sketch_needs_no_more_than_the_run() -> None:
    setup = _setup(replace(_FSDP2, gradient_accumulation_steps=2))
    assert all(term.formula and term.source for phase in _estimate(setup).phases for term in phase.terms)
    sketch = max(peak.live_bytes for peak in replay_live(play_strategy(setup, sketch=True).tape).peaks)
    assert sketch <= _peak(setup)


def test_the_uncertainty_says_that_no_gpu_was_measured() -> None:
    assert "no run under FSDP2 was measured on a GPU" in _estimate(_setup()).uncertainty_source


def test_offloaded_shards_gradients_and_states_are_on_the_host() -> None:
    setup = _setup(replace(_FSDP2, optimizer_offload=_CPU, param_offload=_CPU))
    found = estimate_host_memory(setup, model=problem().model, machine=machine(2))
    step = next(phase for phase in found.phases if phase.phase is RunPhase.STEP)
    held = sum(term.num_bytes for term in step.terms if term.name in _OF_OFFLOAD)
    assert held == 2 * 4 * _shard_bytes(setup)  # of both ranks


_OF_OFFLOAD = ("offloaded weights", "gradient partition", "optimizer states")


def test_time_counts_a_gather_for_each_pass_and_one_reduction() -> None:
    setup = _setup(num_ranks=8)
    found = estimate_step_time(setup, machine=machine(8), rates=catalog_rates())
    assert found is not None
    names = {term.name: term.seconds for term in found.terms}
    assert names["communication"] > 0
    alone = estimate_step_time(_setup(), machine=machine(2), rates=catalog_rates())
    assert alone is not None
    assert {term.name for term in alone.terms} >= {"communication", "optimizer step"}


def test_accumulation_reduces_once_and_gathers_for_each_micro_batch() -> None:
    def communication(**fields: Any) -> float:
        found = estimate_step_time(
            _setup(replace(_FSDP2, **fields)), machine=machine(2), rates=catalog_rates()
        )
        assert found is not None
        return next(term.seconds for term in found.terms if term.name == "communication")

    once, four = communication(), communication(gradient_accumulation_steps=4)
    assert once < four < 4 * once


def test_fast_has_no_fsdp2() -> None:
    asked = problem(spec=spec_of(engine=Engine.FSDP2))
    estimator = ClosedFormEstimator(asked, trace=_no_trace, rates=catalog_rates())
    with pytest.raises(EngineRefusedError, match="fsdp2-needs-trace"):
        estimator.estimate(replace(_FSDP2, precision=Precision.BF16))


def _no_trace(request: TraceRequest) -> Any:
    from zerofit.core.allocation_log import Trace
    from zerofit.planning.estimate.closed_form.log import closed_form_log

    return Trace(request=request, logs=(closed_form_log(problem().model, request),))


@pytest.mark.parametrize(
    ("strategy", "topology", "expected"),
    [
        ({}, {"world_size": 8}, {"shard_size": 8, "copies": 1, "micro_batches": 1}),
        ({}, {"world_size": 8, "dp_replicate_size": 2}, {"shard_size": 4, "copies": 2}),
        ({"reshard_after_forward": False}, {"world_size": 2}, {"reshard_after_forward": False}),
        ({"gradient_accumulation_steps": 2}, {"world_size": 2}, {"micro_batches": 2}),
        ({"gradient_accumulation_steps": 64}, {"world_size": 2}, {"micro_batches": 3}),
        ({"param_offload": _CPU}, {"world_size": 2}, {"cpu_offload": True}),
        ({"precision": Precision.BF16}, {"world_size": 2}, {"precision": Precision.BF16}),
    ],
)
def test_the_request_says_how_fsdp2_runs(
    strategy: dict[str, Any], topology: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = trace_request_for(replace(_FSDP2, **strategy), _SAMPLES, A100, topology=Topology(**topology))
    assert request.sharding is not None
    assert {name: getattr(request.sharding, name) for name in expected} == expected
    assert request.autocast is None


_QLORA: dict[str, Any] = {"quantization": Quantization.NF4, "lora": Lora(rank=2), "precision": Precision.BF16}


def _on_host(setup: Setup, phase: RunPhase, term: str) -> int:
    model = replace(problem().model, checkpoint_dtype="bfloat16")
    found = estimate_host_memory(setup, model=model, machine=machine(2)).of(phase)
    assert found is not None
    return sum(held.num_bytes for held in found.terms if held.name == term)


@pytest.mark.parametrize(
    ("storage", "num_ranks"),
    [
        (Precision.BF16, 2),
        *(
            pytest.param(storage, num_ranks, marks=pytest.mark.slow)
            for storage in (Precision.BF16, Precision.FP16, Precision.FP32)
            for num_ranks in (2, 4)
            if (storage, num_ranks) != (Precision.BF16, 2)
        ),
    ],
)
def test_each_rank_loads_the_whole_4_bit_base_into_host_memory(storage: Precision, num_ranks: int) -> None:
    setup = _setup(replace(_FSDP2, quant_storage=storage, **_QLORA), num_ranks=num_ranks)
    use = replace(setup.use, loads_weights=True)
    parameters = setup.log.parameters
    base = sum(p.num_elements * p.bytes_per_element for p in parameters if p.is_packed)
    adapters = sum(p.num_elements * p.bytes_per_element for p in parameters if p.trains)
    loaded = _on_host(replace(setup, use=use), RunPhase.LOAD, "weights")
    assert base > 0
    assert loaded == num_ranks * (base + adapters)  # the other weights are mapped from the checkpoint


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        pytest.param({"precision": Precision.BF16}, marks=pytest.mark.slow),
        {**_QLORA, "quant_storage": Precision.BF16},
    ],
)
def test_offloaded_shards_are_made_while_whole_weights_are_on_the_host(strategy: dict[str, Any]) -> None:
    offloads = {"optimizer_offload": _CPU, "param_offload": _CPU}
    setup = _setup(replace(_FSDP2, **strategy, **offloads))
    setup = replace(setup, use=replace(setup.use, loads_weights=False))
    whole = sum(
        parameter.num_elements * shard.bytes_per_element
        for parameter, shard in zip(setup.log.parameters, setup.log.shards, strict=True)
    )
    phase = RunPhase.INITIALISE
    held = sum(_on_host(setup, phase, term) for term in ("weights", "cast weights"))
    assert held == 2 * whole
    assert _on_host(setup, phase, "offloaded weights") >= 2 * _shard_bytes(setup)


def test_storage_of_packed_weights_is_asked_for() -> None:
    strategy = replace(_FSDP2, quant_storage=Precision.BF16, lora=Lora(), precision=Precision.BF16)
    request = trace_request_for(strategy, _SAMPLES, A100, topology=Topology(world_size=2))
    assert (request.packing.stored_in, request.weights) == (Precision.BF16, Precision.BF16)
