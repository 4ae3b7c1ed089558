"""Laws of the step's time: what can't be faster is not, terms sum, and what is not known has no time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_steps import closed_form_of, machine_of, time_of

from zerofit.core.allocation_log import AllocationLog, CostKind, Event, OperatorCost, Pass, TraceRequest
from zerofit.core.estimates import StepTime
from zerofit.core.facts import Machine, Versions
from zerofit.core.plan import Topology
from zerofit.core.rates import Basis, Rate, RateName, Rates, Unit
from zerofit.core.strategy import (
    Engine,
    Lora,
    OffloadDevice,
    OptimizerName,
    Precision,
    Strategy,
    ZeroStage,
)
from zerofit.machine.rates import catalog_rates
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.speeds import Speeds, speeds_of
from zerofit.planning.estimate.step_time import estimate_step_time, optimizer_term

_GPUS = ("V100-16G", "RTX4090", "A100-80G", "H100-80G")
_STRATEGIES = st.builds(
    Strategy,
    engine=st.just(Engine.DEEPSPEED),
    zero_stage=st.sampled_from(ZeroStage),
    precision=st.sampled_from((Precision.FP16, Precision.FP32)),
    micro_batch_size=st.integers(1, 16),
    gradient_accumulation_steps=st.sampled_from((1, 2, 8)),
    gradient_checkpointing=st.booleans(),
    optimizer=st.sampled_from((None, OptimizerName.ADAMW, OptimizerName.SGD)),
    compile=st.booleans(),
)
_PLACES = st.tuples(st.sampled_from(_GPUS), st.sampled_from((1, 2, 8)), st.sampled_from((1, 2)))
_A100 = machine_of("A100-80G")
_GPT2_ELEMENTS = 124_439_808
_FEW = settings(max_examples=40, deadline=None)


def _speeds(machine: Machine, *, ranks: int = 1) -> Speeds:
    found = speeds_of(machine, Topology(world_size=ranks), catalog_rates())
    assert found
    return found


def _time(strategy: Strategy, place: tuple[str, int, int], **machine: float) -> StepTime:
    gpu, gpus, nodes = place
    node = replace(machine_of(gpu, gpus), **machine)  # type: ignore[arg-type]
    return time_of("gpt2", strategy, node, sequence_length=512, num_nodes=nodes)


@_FEW
@given(_STRATEGIES, _PLACES)
def test_terms_sum_and_are_positive(strategy: Strategy, place: tuple[str, int, int]) -> None:
    found = _time(strategy, place)
    assert found.seconds == pytest.approx(sum(term.seconds for term in found.terms))
    assert all(term.seconds > 0 and term.formula and term.source for term in found.terms)
    assert len({term.name for term in found.terms}) == len(found.terms)


@_FEW
@given(_STRATEGIES, _PLACES)
def test_checkpointing_is_never_faster(strategy: Strategy, place: tuple[str, int, int]) -> None:
    without = _time(replace(strategy, gradient_checkpointing=False), place)
    assert _time(replace(strategy, gradient_checkpointing=True), place).seconds >= without.seconds


@_FEW
@given(_STRATEGIES, _PLACES, st.booleans(), st.booleans())
def test_offload_is_never_faster(
    strategy: Strategy, place: tuple[str, int, int], to_nvme: bool, with_weights: bool
) -> None:
    stage = max(strategy.zero_stage, ZeroStage.OPTIMIZER_STATES)
    here = replace(strategy, zero_stage=stage)
    device = OffloadDevice.NVME if to_nvme and stage is ZeroStage.PARAMETERS else OffloadDevice.CPU
    away = replace(here, optimizer_offload=device)
    if with_weights and stage is ZeroStage.PARAMETERS:
        away = replace(away, param_offload=device)
    assert _time(away, place).seconds > _time(here, place).seconds
    pageable = _time(replace(away, pin_memory=False), place)
    assert pageable.seconds >= _time(away, place).seconds


def test_on_nvme_the_gradients_are_written_too() -> None:
    strategy = Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.PARAMETERS,
        optimizer_offload=OffloadDevice.NVME,
        precision=Precision.BF16,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
    )
    machine = machine_of("A100-80G", 2)
    speeds = _speeds(machine, ranks=2)
    found = {term.name: term.seconds for term in time_of("gpt2", strategy, machine, sequence_length=64).terms}
    # fp32 weight, two moments and gradient: each is read once and written once.
    each_way = 16 * _GPT2_ELEMENTS
    expected = each_way / speeds.nvme_read_bytes_per_s + each_way / speeds.nvme_write_bytes_per_s
    assert found["NVMe"] == pytest.approx(expected)


@pytest.mark.parametrize(("gpu", "own"), [("H100", True), ("H100-PCIE", False), ("A100-80G", False)])
def test_a_rate_of_one_gpu_holds_for_its_machines_only(gpu: str, own: bool) -> None:
    fraction = Rate(
        name=RateName.DEVICE_MEMORY,
        value=0.5,
        unit=Unit.FRACTION,
        basis=Basis.PUBLISHED,
        source="test",
        gpus=("NVIDIA H100 80GB HBM3",),
    )
    machine = machine_of(gpu, 1)
    rates = Rates(rates=(*catalog_rates().rates, fraction))
    before, now = (speeds_of(machine, Topology(world_size=1), known) for known in (catalog_rates(), rates))
    assert before
    assert now
    peak = machine.gpus[0].memory_bytes_per_s
    assert now.memory_bytes_per_s == (0.5 * peak if own else before.memory_bytes_per_s)


_BUS = 0.85 * 1e8
"""Bytes a second that the catalog's rate leaves of a network of 0.1 GB/s."""


@_FEW
@given(_STRATEGIES, st.sampled_from(_GPUS), st.sampled_from((2, 8)))
def test_how_often_each_stage_sends_the_gradients_or_weights(
    strategy: Strategy, gpu: str, num_nodes: int
) -> None:
    width = 4 if strategy.precision is Precision.FP32 else 2
    one_way = width * _GPT2_ELEMENTS * (num_nodes - 1) / num_nodes / _BUS
    times = [
        {
            term.name: term.seconds
            for term in _time(
                replace(strategy, zero_stage=stage), (gpu, 1, num_nodes), node_bytes_per_s=1e8
            ).terms
        }["communication"]
        / one_way
        for stage in ZeroStage
    ]
    steps = strategy.gradient_accumulation_steps or 1
    # An all-reduce is two ways; the stages 1 to 3 gather what was stepped; stage 2 reduces every time.
    assert times[:3] == pytest.approx([2, 3, 2 * steps + 1], rel=0.01)
    assert times[3] >= times[2]


@_FEW
@given(_STRATEGIES, _PLACES)
def test_a_larger_micro_batch_is_never_slower_a_sample(
    strategy: Strategy, place: tuple[str, int, int]
) -> None:
    size = strategy.micro_batch_size or 1
    twice = _time(replace(strategy, micro_batch_size=2 * size), place)
    assert twice.seconds / 2 <= _time(strategy, place).seconds * (1 + 1e-12)


@_FEW
@given(_STRATEGIES, st.sampled_from(_GPUS), st.floats(1e9, 1e12), st.floats(1e9, 1e12))
def test_a_slower_network_is_never_faster(strategy: Strategy, gpu: str, one: float, other: float) -> None:
    slow, fast = (
        _time(strategy, (gpu, 2, 2), node_bytes_per_s=rate).seconds for rate in sorted((one, other))
    )
    assert slow >= fast


@_FEW
@given(_STRATEGIES, st.floats(1e10, 1e12), st.floats(1e10, 1e12))
def test_a_slower_host_never_makes_offload_faster(strategy: Strategy, one: float, other: float) -> None:
    away = replace(strategy, zero_stage=ZeroStage.GRADIENTS, optimizer_offload=OffloadDevice.CPU)
    slow, fast = (
        _time(away, ("A100-80G", 8, 1), host_memory_bytes_per_s=rate).seconds for rate in sorted((one, other))
    )
    assert slow >= fast


@pytest.mark.parametrize(
    ("stage", "clips", "precision", "num_bytes"),
    [
        (2, 0.0, "bf16", 6),
        (2, 1.0, "bf16", 14),
        (2, 0.0, "fp16", 14),
        (3, 0.0, "bf16", 14),
        (3, 0.0, "fp32", 16),
    ],
)
def test_the_cpu_scales_gradients_and_narrows_weights_beside_adam(
    stage: int, clips: float, precision: str, num_bytes: int
) -> None:
    strategy = Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage(stage),
        precision=Precision(precision),
        gradient_clipping=clips,
        micro_batch_size=1,
        optimizer=OptimizerName.ADAMW,
        optimizer_offload=OffloadDevice.CPU,
    )
    terms = {term.name: term.seconds for term in _time(strategy, ("A100-80G", 8, 1)).terms}
    assert terms["CPU copies"] / terms["CPU Adam"] == pytest.approx(num_bytes / 28)


def test_gradients_return_beside_the_backward_pass_from_pinned_memory_alone() -> None:
    strategy = Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.PARAMETERS,
        precision=Precision.BF16,
        micro_batch_size=64,
        optimizer=OptimizerName.ADAMW,
        optimizer_offload=OffloadDevice.CPU,
        param_offload=OffloadDevice.CPU,
    )
    pinned, pageable = (
        next(
            term.seconds
            for term in _time(replace(strategy, pin_memory=is_pinned), ("A100-80G", 1, 1)).terms
            if term.name == "offload transfers"
        )
        for is_pinned in (True, False)
    )
    gradients = 8 * _GPT2_ELEMENTS  # 2 bytes down and up again, and 4 down in fp32
    assert pinned == pytest.approx(0.1 * gradients / (0.8 * 32e9), rel=0.05)
    assert pageable == pytest.approx(gradients / (0.25 * 32e9), rel=0.05)


def test_weights_stepped_on_the_gpu_return_to_the_host() -> None:
    strategy = Strategy(
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.PARAMETERS,
        precision=Precision.BF16,
        micro_batch_size=64,  # whose passes hide the copies to the GPU
        optimizer=OptimizerName.ADAMW,
        param_offload=OffloadDevice.CPU,
    )
    terms = {term.name: term.seconds for term in _time(strategy, ("A100-80G", 1, 1)).terms}
    assert terms["weight transfers"] == pytest.approx(2 * _GPT2_ELEMENTS / (0.8 * 32e9), rel=0.05)
    away = replace(strategy, optimizer_offload=OffloadDevice.CPU)
    assert "weight transfers" not in {term.name for term in _time(away, ("A100-80G", 1, 1)).terms}


def _setup(log: AllocationLog, strategy: Strategy, *, trains: bool = True) -> Setup:
    versions = Versions(python="3.11", zerofit="0")
    return Setup(log=log, strategy=strategy, topology=Topology(), versions=versions, trains=trains)


def _log_of(*costs: OperatorCost, codes: bytes = bytes([Event.FORWARD_ENDS])) -> AllocationLog:
    """Return a log of GPT-2's parameters with these costs and events, by default no module's call."""
    log = closed_form_of("gpt2", TraceRequest(sequence_length=8))
    return replace(log, costs=costs, codes=codes, arguments=(0,) * len(codes))


def _cost(kind: CostKind, *, flops: int = 0, num_bytes: int = 0, count: int = 1) -> OperatorCost:
    return OperatorCost(
        operator="one",
        kind=kind,
        during=Pass.FORWARD,
        precision=Precision.BF16,
        count=count,
        fixed_flops=0,
        flops_per_sample=flops,
        fixed_bytes=num_bytes,
        bytes_per_sample=0,
    )


@pytest.mark.parametrize(
    ("cost", "name", "seconds"),
    [
        # A100: 312 TFLOPS and 2039 GB/s by its data sheet, 0.63, 0.50 and 0.80 of them by the catalog.
        (_cost(CostKind.MATMUL, flops=10**14), "matrix products", 2 * 1e14 / (312e12 * 0.63)),
        (_cost(CostKind.GROUPED, flops=10**14), "products of experts", 2 * 1e14 / (312e12 * 0.63 * 0.66)),
        (_cost(CostKind.ATTENTION, flops=10**14), "attention", 2 * 1e14 / (312e12 * 0.50)),
        (_cost(CostKind.MEMORY, num_bytes=10**12), "memory-bound operators", 1e12 / (2039e9 * 0.80)),
        # A matrix product with few FLOPs is as slow as its bytes.
        (_cost(CostKind.MATMUL, flops=1, num_bytes=10**12), "matrix products", 1e12 / (2039e9 * 0.80)),
        # PCIe 4 has 31.5 GB/s in each direction, of which 0.80 by the catalog.
        (_cost(CostKind.HOST_COPY, num_bytes=10**10), "activation copies", 1e10 / (31.5e9 * 0.80)),
        # Nothing to do but to start a thousand operators.
        (_cost(CostKind.MEMORY, count=1000), "launch overhead", 1000 * 1.5e-5),
    ],
)
def test_the_roofline_of_one_operator(cost: OperatorCost, name: str, seconds: float) -> None:
    setup = _setup(_log_of(cost), Strategy(micro_batch_size=2, gradient_accumulation_steps=1), trains=False)
    found = estimate_step_time(setup, machine=_A100, rates=catalog_rates())
    assert found is not None
    assert [(term.name, pytest.approx(term.seconds)) for term in found.terms] == [(name, seconds)]


@pytest.mark.parametrize(
    ("stage", "backward_bytes", "hooks"),
    [
        (0, 0, 0),
        (1, 0, 1),  # once a step
        (2, 0, 4),  # every micro-batch
        (2, 10**12, None),  # a GPU that is busy all the backward pass waits for none of them
    ],
)
def test_python_starts_a_hook_of_each_gradient_where_stages_1_and_2_reduce_it(
    stage: int, backward_bytes: int, hooks: int | None
) -> None:
    forward = _cost(CostKind.MEMORY, count=1000)
    backward = replace(forward, during=Pass.BACKWARD, fixed_bytes=backward_bytes)
    log = _log_of(forward, backward)
    strategy = Strategy(micro_batch_size=1, gradient_accumulation_steps=4)
    setup = _setup(log, replace(strategy, engine=Engine.DEEPSPEED, zero_stage=ZeroStage(stage)))
    speeds = _speeds(_A100)
    found = estimate_step_time(setup, machine=_A100, rates=catalog_rates())
    assert found is not None
    waits = {term.name: term.seconds for term in found.terms}["launch overhead"]
    one_way = 4 * 1000 * speeds.dispatch_s
    started = 0 if hooks is None else one_way + hooks * len(log.parameters) * speeds.gradient_hook_s
    assert waits == pytest.approx(one_way + started)


@pytest.mark.parametrize(("compiles", "calls"), [(False, 4 + 3), (True, 0)])
def test_python_calls_modules_forward_and_where_layers_are_recomputed(compiles: bool, calls: int) -> None:
    forward = _cost(CostKind.MEMORY, count=1000)
    again = replace(forward, during=Pass.RECOMPUTATION)
    enters = bytes([Event.FORWARD_ENTER])
    log = _log_of(forward, again, codes=4 * enters + bytes([Event.FORWARD_ENDS]) + 3 * enters)
    strategy = Strategy(micro_batch_size=1, compile=compiles, gradient_checkpointing=True)
    speeds = _speeds(_A100)
    found = estimate_step_time(_setup(log, strategy), machine=_A100, rates=catalog_rates())
    assert found is not None
    terms = {term.name: term.seconds for term in found.terms}
    operators = 2000 * (speeds.compiled if compiles else 1)
    waits = (operators + 2 * calls) * speeds.dispatch_s
    assert terms["launch overhead"] + terms["recomputation"] == pytest.approx(waits)


def test_the_host_of_the_h200_launches_more_slowly_than_one_that_nobody_measured() -> None:
    seconds = [_speeds(machine_of(gpu)).dispatch_s for gpu in ("H200-141G", "H100-80G", "RTX4090")]
    assert seconds == [2.5e-5, 1.5e-5, 1.5e-5]


@pytest.mark.parametrize(
    ("optimizer", "dispatches"),
    [(None, 0.5), (OptimizerName.ADAMW_8BIT, 4), (OptimizerName.ADAFACTOR, 10)],
)
def test_python_steps_each_parameter(optimizer: OptimizerName | None, dispatches: float) -> None:
    log = _log_of(_cost(CostKind.MATMUL, flops=1))
    small = tuple(replace(one, num_elements=1, shape=(1,)) for one in log.parameters)
    setup = _setup(replace(log, parameters=small), Strategy(micro_batch_size=1, optimizer=optimizer))
    speeds = _speeds(_A100)
    expected = dispatches * len(log.parameters) * speeds.dispatch_s
    assert optimizer_term(setup, speeds).seconds == pytest.approx(expected)


def test_what_is_not_known_has_no_time() -> None:
    log = closed_form_of("gpt2", TraceRequest(sequence_length=8))
    known = machine_of("A100-80G", 2)
    nameless = replace(known.gpus[0], fp16_flops_per_s=None)
    unlinked = replace(known.gpus[0], peer_bytes_per_s=None)
    setup = replace(_setup(log, Strategy(micro_batch_size=1)), topology=Topology(world_size=2))
    rates = catalog_rates()
    assert estimate_step_time(setup, machine=known, rates=rates) is not None
    for gpus in ((), (nameless,) * 2, (unlinked,) * 2):
        assert estimate_step_time(setup, machine=replace(known, gpus=gpus), rates=rates) is None
    on_cpu = replace(setup, topology=Topology(world_size=2, on_cpu=True))
    assert estimate_step_time(on_cpu, machine=known, rates=rates) is None


def test_each_parameter_of_a_small_model_costs_python_at_stages_1_to_3() -> None:
    seconds = [
        time_of(
            "bert-base-uncased",
            Strategy(
                engine=Engine.DEEPSPEED,
                zero_stage=stage,
                precision=Precision.BF16,
                micro_batch_size=1,
                gradient_accumulation_steps=4,
                optimizer=OptimizerName.SGD,
            ),
            machine_of("A100-80G", 8),
            sequence_length=32,
        ).seconds
        for stage in ZeroStage
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] - seconds[1] > 3 * 100 * 2.0e-5  # hooks of three more micro-batches, 100 parameters


@pytest.mark.parametrize(
    ("gpu", "kind", "uncertainty"),
    [
        ("A100-80G", CostKind.GROUPED, 1.0),
        ("H100-80G", CostKind.GROUPED, 0.3),
        ("A100-80G", CostKind.MATMUL, 0.3),
    ],
)
def test_experts_that_run_one_by_one_before_hopper_widen_the_uncertainty(
    gpu: str, kind: CostKind, uncertainty: float
) -> None:
    log = replace(closed_form_of("gpt2", TraceRequest(sequence_length=8)), costs=(_cost(kind, flops=10**14),))
    setup = _setup(log, Strategy(micro_batch_size=1, gradient_accumulation_steps=1))
    time = estimate_step_time(setup, machine=machine_of(gpu), rates=catalog_rates())
    assert time is not None
    assert time.uncertainty == uncertainty


def test_copies_of_activations_widen_the_uncertainty_of_adapters_too() -> None:
    log = _log_of(_cost(CostKind.MATMUL, flops=10**14), _cost(CostKind.HOST_COPY, num_bytes=10**9))
    setup = _setup(log, Strategy(micro_batch_size=1, gradient_accumulation_steps=1))
    for strategy in (setup.strategy, replace(setup.strategy, lora=Lora(rank=8))):
        found = estimate_step_time(replace(setup, strategy=strategy), machine=_A100, rates=catalog_rates())
        assert found is not None
        assert found.uncertainty == 0.5
        assert "accelerate/pull/4175" in found.uncertainty_source
