"""Host memory of a node: what each phase holds per parameter, and the laws that hold over random models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logs import LayerSizes, layered_log, random_logs
from zero_plays import setup_of

from zerofit.core.allocation_log import AllocationLog, CostKind, OperatorCost, Pass
from zerofit.core.estimates import Holder, MemoryEstimate, RunPhase
from zerofit.core.facts import GpuSpec, Machine, ModelFacts
from zerofit.core.strategy import Buckets, Lora, OffloadDevice, OptimizerName, Precision, Strategy
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.host_ledger import CHECKPOINT, ROUNDING, HostLedger
from zerofit.planning.estimate.host_memory import PROCESS, estimate_host_memory
from zerofit.planning.estimate.model_use import ModelUse
from zerofit.planning.estimate.nvme_space import nvme_bytes_needed

_MODEL = ModelFacts(
    name="made",
    model_type="made",
    num_parameters=1,
    num_trainable_parameters=1,
    num_layers=1,
    hidden_size=1,
    vocab_size=1,
)
_MACHINE = Machine(
    gpus=(GpuSpec(name="made", memory_bytes=1),),
    num_cpu_cores=1,
    host_memory_bytes=1 << 50,
    host_memory_available_bytes=1 << 50,
)
_LAYERS = tuple(LayerSizes(elements=(1 << 16, 1 << 16)) for _ in range(4))
_LOG_OF = {size: layered_log(_LAYERS, bytes_per_element=size) for size in (2, 4)}
_LOG = _LOG_OF[2]
_NUM_ELEMENTS = 8 << 16
_LAWS = settings(max_examples=20, deadline=None)


def _estimate(setup: Setup, model: ModelFacts = _MODEL) -> MemoryEstimate:
    return estimate_host_memory(setup, model=model, machine=_MACHINE)


def _tensors(setup: Setup, phase: RunPhase, *holders: Holder, model: ModelFacts = _MODEL) -> int:
    """Return the bytes of a phase that belong to tensors."""
    found = _estimate(setup, model).of(phase)
    assert found is not None
    holders = holders or (Holder.PINNED, Holder.PAGEABLE)
    return sum(term.num_bytes for term in found.terms if term.name != PROCESS and term.holder in holders)


@pytest.mark.parametrize(
    ("stage", "offload", "ranks", "pinned", "pageable"),
    [
        # All ranks together: master, gradient, 16-bit copy and a largest gradient pinned, states pageable.
        (2, "o", 4, 4 + 4 + 2 + 4 * 2 / 8, 8),
        # Masters stay pageable; fp32 gradient and its 16-bit parts are pinned.
        (3, "o", 4, 4 + 2, 4 + 8 + 2),
        # ... and the weights' flat buffer; each parameter's first pinned block is kept for later ones.
        (3, "op", 4, 4 + 2 + 2 + 2 - 2, 4 + 8),
        (3, "", 4, 0, 0),
        (2, "", 4, 0, 0),
    ],
)
def test_what_the_step_holds_in_bytes_a_parameter(
    stage: int, offload: str, ranks: int, pinned: float, pageable: float
) -> None:
    setup = setup_of(_LOG, stage, ranks=ranks, offload=offload)
    held = [_tensors(setup, RunPhase.STEP, holder) for holder in (Holder.PINNED, Holder.PAGEABLE)]
    assert held[1] == pageable * _NUM_ELEMENTS
    assert held[0] == pytest.approx(
        pinned * _NUM_ELEMENTS, abs=4 * 2 * _NUM_ELEMENTS if "p" in offload else 0
    )


def test_the_gradients_buffer_of_stage_3_is_as_wide_as_the_weights() -> None:
    # Pinned are the fp32 gradients of the step and the buffer that each micro-batch's gradients are added in.
    pinned = [
        _tensors(setup_of(_LOG_OF[size], 3, ranks=4, offload="o"), RunPhase.STEP, Holder.PINNED)
        for size in (2, 4)
    ]
    assert pinned == [(4 + 2) * _NUM_ELEMENTS, (4 + 4) * _NUM_ELEMENTS]


@pytest.mark.parametrize(
    ("optimizer", "stage", "pages"),
    [
        # None of the log's tensors has the 100000 elements from which states are paged; flat ones have.
        (OptimizerName.PAGED_ADAMW, None, 0),
        (OptimizerName.PAGED_ADAMW, 2, 8),
        (OptimizerName.PAGED_ADAMW, 3, 8),
        (OptimizerName.PAGED_ADAMW_8BIT, 2, 2),
        (OptimizerName.PAGED_LION_8BIT, 3, 1),
        (OptimizerName.ADAMW_8BIT, 2, 0),
    ],
)
def test_pages_may_all_come_to_the_host(optimizer: OptimizerName, stage: int | None, pages: int) -> None:
    setup = setup_of(_LOG, stage or 0, ranks=4, optimizer=optimizer)
    if stage is None:
        setup = replace(setup, strategy=Strategy(optimizer=optimizer))
    found = _estimate(setup).of(RunPhase.STEP)
    assert found is not None
    held = sum(term.num_bytes for term in found.terms if term.name == "optimizer states")
    assert held == pages * _NUM_ELEMENTS


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_offloaded_activations_wait_in_pinned_blocks_of_powers_of_two(
    stage: int, micro_batch_size: int
) -> None:
    copy = OperatorCost(
        operator="host copy",
        kind=CostKind.HOST_COPY,
        during=Pass.FORWARD,
        precision=Precision.BF16,
        count=5,
        fixed_flops=0,
        flops_per_sample=0,
        fixed_bytes=0,
        bytes_per_sample=3000,
    )
    setup = setup_of(_LOG, stage, ranks=4)
    setup = replace(setup, strategy=replace(setup.strategy, micro_batch_size=micro_batch_size))
    log = replace(setup.log, costs=(*setup.log.costs, copy, replace(copy, during=Pass.BACKWARD)))
    before, after = _estimate(setup), _estimate(replace(setup, log=log))
    size = 1 << (3000 * micro_batch_size - 1).bit_length()
    for phase in (RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.STEP, RunPhase.SAVE):
        found, plain = after.of(phase), before.of(phase)
        assert found is not None
        assert plain is not None
        assert found.total_bytes - plain.total_bytes == 4 * 5 * size  # cached after the backward pass
    forward = after.of(RunPhase.FORWARD)
    assert forward is not None
    held = {term.name: term.num_bytes for term in forward.terms if term.holder is Holder.PINNED}
    assert held["offloaded activations"] == 4 * 5 * 3000 * micro_batch_size


def _held(setup: Setup, phase: RunPhase, *, dtype: str, machine: Machine = _MACHINE) -> dict[str, float]:
    """Return the bytes an element of the terms of tensors."""
    model = replace(_MODEL, checkpoint_dtype=dtype)
    found = estimate_host_memory(setup, model=model, machine=machine).of(phase)
    assert found is not None
    return {term.name: term.num_bytes / _NUM_ELEMENTS for term in found.terms if term.name != PROCESS}


_NATIVE = replace(setup_of(_LOG, 0, ranks=4), strategy=Strategy())
_MADE = {"use": ModelUse(loads_weights=False, makes_model_first=True)}
"""A model whose class the script calls."""


@pytest.mark.parametrize(
    ("setup", "dtype", "expected"),
    [
        (setup_of(_LOG, 2, ranks=4), "float32", {"checkpoint": 4}),  # the ranks share the file's pages
        (setup_of(_LOG, 2, ranks=4), "bfloat16", {"checkpoint": 2}),
        (setup_of(_LOG, 2, ranks=4), "", {"checkpoint": 4}),
        (setup_of(_LOG, 3, ranks=4), "bfloat16", {"checkpoint": 2}),
        (_NATIVE, "bfloat16", {"checkpoint": 2}),
        (_NATIVE, "float32", {"checkpoint": 4, "weights": 4 * 2}),  # a type that is not the file's is a copy
        (replace(setup_of(_LOG, 2, ranks=4), **_MADE), "float32", {"weights": 4 * 4}),  # each rank's own
        (replace(setup_of(_LOG, 3, ranks=4), **_MADE), "float32", {"weights": 4 * 4}),
        # Partitioned as it is made:
        (replace(setup_of(_LOG, 3, ranks=4), use=ModelUse(loads_weights=False)), "float32", {}),
    ],
)
def test_loading(setup: Setup, dtype: str, expected: dict[str, int]) -> None:
    assert _held(setup, RunPhase.LOAD, dtype=dtype) == expected


def test_each_rank_casts_a_copy_of_its_own() -> None:
    held = _held(setup_of(_LOG, 2, ranks=4), RunPhase.INITIALISE, dtype="float32")
    assert held == {"checkpoint": 4, "cast weights": 4 * 2}


def test_a_model_made_first_is_cast_whole_on_every_rank_at_stage_3() -> None:
    setup = setup_of(_LOG, 3, ranks=4)
    held = [
        _held(one, RunPhase.INITIALISE, dtype="float32").get("cast weights", 0)
        for one in (setup, replace(setup, use=ModelUse(makes_model_first=True)))
    ]
    assert held == [0, 4 * 2]


@pytest.mark.parametrize(("spare", "expected"), [(3 * _NUM_ELEMENTS, 3), (-1, 0), (99 * _NUM_ELEMENTS, 4)])
def test_mapped_pages_take_no_more_than_there_is(spare: int, expected: int) -> None:
    setup = setup_of(_LOG, 2, ranks=1)
    process = next(term for term in _estimate(setup).phases[0].terms if term.name == PROCESS)
    machine = replace(_MACHINE, host_memory_available_bytes=process.num_bytes + spare)
    held = _held(setup, RunPhase.LOAD, dtype="float32", machine=machine)
    assert held.get("checkpoint", 0) == expected


def test_mapped_pages_are_named_and_not_needed() -> None:
    model = replace(_MODEL, checkpoint_dtype="float32")
    load = _estimate(setup_of(_LOG, 2, ranks=2), model).of(RunPhase.LOAD)
    assert load is not None
    assert load.held_by(Holder.MAPPED) == 4 * _NUM_ELEMENTS
    assert load.total_bytes == sum(term.num_bytes for term in load.terms if term.name == PROCESS)


def test_pinned_memory_is_rounded_up_to_powers_of_two() -> None:
    log = layered_log((LayerSizes(elements=(3 << 16, 0 + (1 << 10))),), bytes_per_element=2)
    estimate = _estimate(setup_of(log, 2, ranks=1, offload="o"))
    step = estimate.of(RunPhase.STEP)
    assert step is not None
    assert {term.name for term in step.terms if term.holder is Holder.PINNED} >= {"pinned rounding"}
    blocks = step.held_by(Holder.PINNED)
    part = (3 << 16) + (1 << 10)
    expected = sum(1 << (size - 1).bit_length() for size in (4 * part, 4 * part, 2 * part, 2 * (3 << 16)))
    assert blocks == expected


def test_without_pin_memory_nothing_is_pinned_at_stage_2() -> None:
    setup = setup_of(_LOG, 2, offload="o", pin_memory=False)
    assert _tensors(setup, RunPhase.STEP, Holder.PINNED) == 0
    assert _tensors(setup, RunPhase.STEP, Holder.PAGEABLE) == (4 + 4 + 2 + 2 * 2 / 8 + 8) * _NUM_ELEMENTS


def test_weights_are_flattened_on_the_host_where_the_gpu_has_no_room() -> None:
    setup = setup_of(_LOG, 2)
    tight = replace(setup, gpu_memory_bytes=4 * _NUM_ELEMENTS - 1)
    model = replace(_MODEL, checkpoint_dtype="bfloat16")
    held = [_tensors(one, RunPhase.INITIALISE, model=model) for one in (setup, tight)]
    assert held == [0, 2 * 4 * _NUM_ELEMENTS]  # the mapped file does not count; two copies on each rank


def test_accumulation_keeps_whole_gradients_on_the_host_at_stage_2() -> None:
    once, more = (
        _tensors(setup_of(_LOG, 2, offload="o", gradient_accumulation_steps=steps), RunPhase.BACKWARD)
        for steps in (1, 4)
    )
    assert more - once == 2 * _NUM_ELEMENTS


@pytest.mark.parametrize("stage", [1, 2])
def test_4_bit_weights_are_packed_on_each_rank_as_they_are_loaded_and_never_cast(stage: int) -> None:
    setup = replace(setup_of(_LOG, stage, ranks=4), log=_with_packed(_FROZEN))
    packed = sum(one.num_elements for one in setup.log.parameters if one.is_packed) / _NUM_ELEMENTS
    for phase in (RunPhase.LOAD, RunPhase.INITIALISE):
        assert _held(setup, phase, dtype="bfloat16") == {"checkpoint": 2, "weights": 4 * packed}


def test_packed_weights_do_not_set_the_format_of_what_trains() -> None:
    sixteen_bit, four_bit = (
        _tensors(replace(setup_of(_LOG, 2, offload="o", ranks=4), log=one), RunPhase.STEP)
        for one in (_FROZEN, _with_packed(_FROZEN))
    )
    assert four_bit == sixteen_bit


def test_nvme_takes_what_the_host_would() -> None:
    setup = setup_of(_LOG, 3, ranks=4)
    strategy = replace(
        setup.strategy,
        optimizer_offload=OffloadDevice.NVME,
        param_offload=OffloadDevice.NVME,
        buckets=Buckets(sub_group_size=1 << 16),
    )
    nvme = replace(setup, strategy=strategy)
    assert nvme_bytes_needed(nvme) == 18 * _NUM_ELEMENTS
    assert nvme_bytes_needed(setup) == 0
    step = _estimate(nvme).of(RunPhase.STEP)
    assert step is not None
    held = {term.name: term.num_bytes for term in step.terms}
    assert held["optimizer swap buffers"] == 4 * 4 * 4 * (1 << 16)  # ranks x buffers x fp32 x sub-group
    assert held["weight swap buffers"] == 4 * 5 * 100_000_000 * 2
    assert "optimizer states" not in held


_FROZEN = replace(
    _LOG, parameters=(*_LOG.parameters[:1], *(replace(one, trains=False) for one in _LOG.parameters[1:]))
)


def _with_packed(log: AllocationLog) -> AllocationLog:
    """Return a log all of whose parameters but the first are in 4 bits."""
    packed = (replace(one, bytes_per_element=1, is_packed=True) for one in log.parameters[1:])
    return replace(log, parameters=(*log.parameters[:1], *packed))


def _with_lora(setup: Setup) -> Setup:
    return replace(setup, log=_FROZEN, strategy=replace(setup.strategy, lora=Lora()))


@pytest.mark.parametrize(
    ("setup", "num_elements"),
    [
        pytest.param(_NATIVE, _NUM_ELEMENTS, id="PyTorch alone: rank 0"),
        *(
            pytest.param(setup_of(_LOG, stage, ranks=4), 4 * _NUM_ELEMENTS, id=f"stage {stage}: every rank")
            for stage in (0, 1, 2)
        ),
        pytest.param(setup_of(_LOG, 3, ranks=4), _NUM_ELEMENTS, id="stage 3: rank 0"),
        pytest.param(_with_lora(_NATIVE), 1 << 16, id="LoRA alone: the adapters"),
        pytest.param(
            _with_lora(setup_of(_LOG, 2, ranks=4)), 4 * _NUM_ELEMENTS, id="LoRA at stage 2: all, every rank"
        ),
        pytest.param(_with_lora(setup_of(_LOG, 3, ranks=4)), 1 << 16, id="LoRA at stage 3: the adapters"),
    ],
)
def test_who_copies_the_weights_to_the_host_for_a_checkpoint(setup: Setup, num_elements: int) -> None:
    save = _estimate(setup).of(RunPhase.SAVE)
    assert save is not None
    assert {term.name: term.num_bytes for term in save.terms}["saved weights"] == 2 * num_elements


@_LAWS
@given(
    log=random_logs(),
    stage=st.integers(0, 3),
    ranks=st.integers(1, 5),
    offload=st.sampled_from(("", "o", "op")),
    accumulation=st.integers(1, 3),
    makes_model_first=st.booleans(),
    available=st.integers(1, 1 << 36),
)
def test_terms_are_never_negative_and_all_explained(
    log: AllocationLog,
    stage: int,
    ranks: int,
    offload: str,
    accumulation: int,
    makes_model_first: bool,
    available: int,
) -> None:
    offload = "" if stage == 0 else offload if stage == 3 else offload[:1]
    setup = replace(
        setup_of(log, stage, ranks=ranks, offload=offload, gradient_accumulation_steps=accumulation),
        use=ModelUse(makes_model_first=makes_model_first),
    )
    machine = replace(_MACHINE, host_memory_available_bytes=available)
    for phase in estimate_host_memory(setup, model=_MODEL, machine=machine).phases:
        counted = sum(term.num_bytes for term in phase.terms if term.name != "checkpoint")
        assert phase.total_bytes == counted
        assert all(term.num_bytes > 0 and term.formula and term.source for term in phase.terms)


@_LAWS
@given(log=random_logs(), stage=st.integers(1, 3), ranks=st.integers(1, 5))
def test_offload_never_needs_less_on_the_host(log: AllocationLog, stage: int, ranks: int) -> None:
    plain, offloaded = (
        _estimate(setup_of(log, stage, ranks=ranks, offload=offload)).peak_bytes for offload in ("", "o")
    )
    assert offloaded >= plain


def _held_by_ledger(ledger: HostLedger, phase: RunPhase = RunPhase.LOAD) -> int:
    return sum(ledger.largest[phase].values())


@pytest.mark.parametrize(
    ("num_bytes", "is_pinned", "held"),
    [(1000, False, 1000), (1000, True, 1024), (1024, True, 1024), (1025, True, 2048), (0, True, 0)],
)
def test_what_one_block_takes(num_bytes: int, is_pinned: bool, held: int) -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.take(num_bytes, "weights", is_pinned=is_pinned)
    assert _held_by_ledger(ledger) == held


def test_a_pinned_block_that_is_let_go_serves_the_next_of_its_size() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.drop(ledger.take(1000, "a", is_pinned=True))
    ledger.take(600, "b", is_pinned=True)
    ledger.begin(RunPhase.STEP)
    assert ledger.largest[RunPhase.STEP] == {
        ("a", Holder.PINNED): 0,
        ("b", Holder.PINNED): 600,
        (ROUNDING, Holder.PINNED): 424,
    }


def test_a_pinned_block_of_another_size_is_new_memory() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.drop(ledger.take(1000, "a", is_pinned=True))
    ledger.take(2000, "b", is_pinned=True)
    assert _held_by_ledger(ledger) == 1024 + 2048


def test_pinning_holds_both_copies_for_a_moment() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.pin(1024, "a", pins=True)
    ledger.begin(RunPhase.STEP)
    assert (_held_by_ledger(ledger), _held_by_ledger(ledger, RunPhase.STEP)) == (2048, 1024)


def test_a_phase_that_comes_twice_keeps_its_larger_moment() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.FORWARD)
    block = ledger.take(10, "a")
    ledger.begin(RunPhase.STEP)
    ledger.drop(block)
    ledger.begin(RunPhase.FORWARD)
    assert _held_by_ledger(ledger, RunPhase.FORWARD) == 10


def test_pages_of_mapped_files_do_not_decide_the_largest_moment() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.INITIALISE)
    ledger.drop(ledger.take(5000, CHECKPOINT))
    ledger.take(1000, "cast weights")
    assert +Counter(ledger.largest[RunPhase.INITIALISE]) == {("cast weights", Holder.PAGEABLE): 1000}
