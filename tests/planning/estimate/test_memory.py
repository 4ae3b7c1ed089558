"""estimate_memory and estimate_within: laws over random logs, strategies and GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logs import LayerSizes, layered_log, random_layers, random_logs

from zerofit.core.allocation_log import AllocationLog
from zerofit.core.estimates import Holder, RunPhase
from zerofit.core.facts import GpuSpec, Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    Buckets,
    Engine,
    OffloadDevice,
    OptimizerName,
    Quantization,
    Strategy,
    ZeroStage,
)
from zerofit.core.units import GIB, MIB
from zerofit.planning.estimate.device_memory.memory import estimate_memory, estimate_within, play_strategy
from zerofit.planning.estimate.device_memory.non_torch_memory import OTHER_MODELS
from zerofit.planning.estimate.device_memory.replay import TapePeak, replay, replay_live
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.engines.native import NativeEngine
from zerofit.planning.estimate.engines.zero_stage3 import DeepSpeedStage3
from zerofit.planning.estimate.engines.zero_stages_0_to_2 import DeepSpeedStage0, DeepSpeedStage12
from zerofit.planning.estimate.model_use import ModelUse

_VERSIONS = Versions(python="3.11", zerofit="0")
_LAWS = settings(max_examples=40, deadline=None)

_OPTIMIZERS = st.sampled_from((None, *OptimizerName))
_STRATEGIES = st.builds(
    Strategy,
    micro_batch_size=st.integers(1, 6),
    gradient_accumulation_steps=st.integers(1, 5),
    gradient_clipping=st.sampled_from((None, 0.0, 1.0)),
    optimizer=_OPTIMIZERS,
)
_ENGINES = st.sampled_from(
    [(Engine.NATIVE, ZeroStage.NOTHING), *((Engine.DEEPSPEED, stage) for stage in ZeroStage)]
)
_RANKS = st.sampled_from((1, 2, 8))
_NOT_OF_STEPS = (RunPhase.EVALUATE, RunPhase.PREFILL, RunPhase.DECODE)
_PHASES = [phase for phase in RunPhase if phase not in _NOT_OF_STEPS]
"""The phases of training."""
_GPUS = st.builds(
    GpuSpec,
    name=st.just("made"),
    memory_bytes=st.integers(1, 4 * GIB),
    compute_capability=st.sampled_from((None, (7, 0), (8, 0), (9, 0))),
)


def _setup(log: AllocationLog, strategy: Strategy, *, ranks: int = 1, keeps_outputs: bool = False) -> Setup:
    return Setup(
        log=log,
        strategy=strategy,
        topology=Topology(world_size=ranks),
        versions=_VERSIONS,
        keeps_outputs=keeps_outputs,
    )


def _live(setup: Setup) -> dict[RunPhase, TapePeak]:
    tape = play_strategy(setup).tape
    return {peak.phase: peak for peak in replay_live(tape).peaks}


@_LAWS
@given(
    log=random_logs(),
    strategy=_STRATEGIES,
    engine=_ENGINES,
    gpu=_GPUS,
    ranks=_RANKS,
    expandable=st.booleans(),
    makes_model_first=st.booleans(),
)
def test_terms_sum_to_what_is_reserved_and_what_is_outside(
    log: AllocationLog,
    strategy: Strategy,
    engine: tuple[Engine, ZeroStage],
    gpu: GpuSpec,
    ranks: int,
    expandable: bool,
    makes_model_first: bool,
) -> None:
    strategy = replace(strategy, engine=engine[0], zero_stage=engine[1])
    setup = replace(_setup(log, strategy, ranks=ranks), use=ModelUse(makes_model_first=makes_model_first))
    setup = replace(setup, expandable_segments=expandable, rank=0)
    estimate = estimate_memory(setup, gpu=gpu)
    room = gpu.usable_bytes - (estimate.peak.held_by(Holder.OUTSIDE))
    here = replace(setup, compute_capability=gpu.compute_capability or (8, 0), gpu_memory_bytes=max(0, room))
    peaks = replay(play_strategy(here).tape, expandable_segments=expandable).peaks
    assert [phase.phase for phase in estimate.phases] == _PHASES
    for phase, peak in zip(estimate.phases, peaks, strict=True):
        assert phase.held_by(Holder.TENSORS, Holder.CACHE) == peak.reserved_bytes
        assert phase.total_bytes == peak.reserved_bytes + phase.held_by(Holder.OUTSIDE)
        assert all(term.num_bytes >= 0 and term.formula and term.source for term in phase.terms)
        assert len({term.name for term in phase.terms}) == len(phase.terms)


def _least(setup: Setup) -> int:
    """Return the live tensors' largest sum over a sketch of the run."""
    tape = play_strategy(setup, sketch=True).tape
    return max(peak.live_bytes for peak in replay_live(tape).peaks)


@_LAWS
@given(log=random_logs(), strategy=_STRATEGIES, engine=_ENGINES, gpu=_GPUS, ranks=_RANKS, keeps=st.booleans())
def test_the_bound_is_never_above_the_estimate(
    log: AllocationLog,
    strategy: Strategy,
    engine: tuple[Engine, ZeroStage],
    gpu: GpuSpec,
    ranks: int,
    keeps: bool,
) -> None:
    strategy = replace(strategy, engine=engine[0], zero_stage=engine[1])
    setup = _setup(log, strategy, ranks=ranks, keeps_outputs=keeps)
    estimate = estimate_memory(setup, gpu=gpu)
    outside = estimate.peak.held_by(Holder.OUTSIDE)
    capability = gpu.compute_capability or (8, 0)
    room = max(0, gpu.usable_bytes - outside)
    here = replace(setup, compute_capability=capability, gpu_memory_bytes=room)
    assert _least(here) <= estimate.peak_bytes - outside


@_LAWS
@given(log=random_logs(), strategy=_STRATEGIES, gpu=_GPUS, ranks=_RANKS, expandable=st.booleans())
def test_a_run_gets_through_with_its_estimate_and_not_with_less_than_is_alive(
    log: AllocationLog, strategy: Strategy, gpu: GpuSpec, ranks: int, expandable: bool
) -> None:
    setup = replace(_setup(log, strategy, ranks=ranks), expandable_segments=expandable)
    estimate = estimate_memory(setup, gpu=gpu)
    alive = _least(replace(setup, compute_capability=gpu.compute_capability or (8, 0)))
    alive += estimate.peak.held_by(Holder.OUTSIDE)
    assert estimate_within(setup, gpu=gpu, limit_bytes=estimate.peak_bytes) == estimate
    assert estimate_within(setup, gpu=gpu, limit_bytes=alive - 1) is None


def test_the_rank_that_needs_most_is_estimated_though_another_has_more_gradients() -> None:
    """A model as Llama 3.2 1B on 8 ranks: rank 0 has a slice of the embedding, which is copied for the norm.

    Rank 1 has the embedding's end and a layer: more gradients, in smaller slices.
    """
    layers = (LayerSizes(elements=(17 * MIB, 1 * MIB)), *(LayerSizes(elements=(3 * MIB, 1 * MIB)),) * 16)
    setup = _setup(
        layered_log(layers),
        Strategy(
            engine=Engine.DEEPSPEED,
            zero_stage=ZeroStage.OPTIMIZER_STATES,
            optimizer_offload=OffloadDevice.CPU,
            buckets=Buckets(reduce_bucket_size=4 * MIB),
        ),
        ranks=8,
    )
    gpu = GpuSpec(name="made", memory_bytes=80 * GIB, compute_capability=(8, 0))
    by_rank = [estimate_memory(replace(setup, rank=rank), gpu=gpu) for rank in range(8)]
    planned = estimate_memory(setup, gpu=gpu)
    assert planned == by_rank[0] == max(by_rank, key=lambda memory: memory.peak_bytes)
    assert by_rank[1].peak_bytes < planned.peak_bytes
    assert estimate_within(setup, gpu=gpu, limit_bytes=planned.peak_bytes) == planned


def test_nccl_has_no_buffers_while_the_model_is_loaded() -> None:
    gpu = GpuSpec(name="made", memory_bytes=80 * GIB, compute_capability=(8, 0))
    phases = estimate_memory(_setup(layered_log(), Strategy(), ranks=2), gpu=gpu).phases
    with_nccl = [phase.phase for phase in phases if any(term.name == "NCCL" for term in phase.terms)]
    assert with_nccl == [phase for phase in _PHASES if phase is not RunPhase.LOAD]


def test_a_scripts_other_models_are_there_in_every_phase() -> None:
    gpu = GpuSpec(name="made", memory_bytes=80 * GIB, compute_capability=(8, 0))
    for ranks in (1, 2):
        setup = _setup(layered_log(), Strategy(), ranks=ranks)
        alone, beside = (
            estimate_memory(replace(setup, use=ModelUse(other_weight_bytes=num_bytes)), gpu=gpu)
            for num_bytes in (0, 5 * GIB)
        )
        assert [phase.total_bytes - 5 * GIB for phase in beside.phases] == [
            phase.total_bytes for phase in alone.phases
        ]
        assert beside.uncertainty == alone.uncertainty
        named = [[term.name for term in phase.terms].count(OTHER_MODELS) for phase in beside.phases]
        assert named == [1] * len(_PHASES)
        limit = beside.peak_bytes - 1 * GIB
        fuller = replace(setup, use=ModelUse(other_weight_bytes=5 * GIB))
        assert estimate_within(fuller, gpu=gpu, limit_bytes=limit) is None


def test_a_sketch_is_a_fraction_of_the_run() -> None:
    setup = _setup(layered_log((LayerSizes(),) * 8), Strategy(gradient_accumulation_steps=8))
    tapes = [play_strategy(setup, sketch=sketch).tape for sketch in (False, True)]
    assert len(tapes[1].entries) < len(tapes[0].entries) / 2


@_LAWS
@given(log=random_logs(), strategy=_STRATEGIES, ranks=_RANKS)
def test_twice_the_micro_batch_never_has_fewer_bytes_alive(
    log: AllocationLog, strategy: Strategy, ranks: int
) -> None:
    """It may reserve less, though: 9 MiB are cut from a segment of 20, and 18 MiB get one of 18."""
    doubled = replace(strategy, micro_batch_size=2 * (strategy.micro_batch_size or 1))
    small, large = (_live(_setup(log, one, ranks=ranks)) for one in (strategy, doubled))
    assert all(small[phase].live_bytes <= large[phase].live_bytes for phase in _PHASES)
    assert _least(_setup(log, strategy, ranks=ranks)) <= _least(_setup(log, doubled, ranks=ranks))


@_LAWS
@given(log=random_logs(), strategy=_STRATEGIES, gpu=_GPUS)
def test_from_two_ranks_on_more_ranks_need_as_much_each(
    log: AllocationLog, strategy: Strategy, gpu: GpuSpec
) -> None:
    """NCCL aside, whose buffers grow with the ranks over NVLink."""
    one, two, eight = (_setup(log, strategy, ranks=ranks) for ranks in (1, 2, 8))
    assert estimate_memory(two, gpu=gpu) == estimate_memory(eight, gpu=gpu)
    assert _least(one) < _least(two)


@_LAWS
@given(layers=random_layers(), strategy=_STRATEGIES)
def test_checkpointing_never_keeps_more_in_the_forward_pass(
    layers: tuple[LayerSizes, ...], strategy: Strategy
) -> None:
    kept, recomputed = (
        _live(_setup(layered_log(layers, checkpointing=checkpointing), strategy))[RunPhase.FORWARD]
        for checkpointing in (False, True)
    )
    assert recomputed.live_bytes <= kept.live_bytes


@pytest.mark.parametrize(
    ("engine", "stage", "expected"),
    [
        (Engine.NATIVE, ZeroStage.NOTHING, NativeEngine),
        (Engine.DEEPSPEED, ZeroStage.NOTHING, DeepSpeedStage0),
        (Engine.DEEPSPEED, ZeroStage.OPTIMIZER_STATES, DeepSpeedStage12),
        (Engine.DEEPSPEED, ZeroStage.GRADIENTS, DeepSpeedStage12),
        (Engine.DEEPSPEED, ZeroStage.PARAMETERS, DeepSpeedStage3),
    ],
)
def test_each_strategy_has_its_engine(engine: Engine, stage: ZeroStage, expected: type) -> None:
    setup = _setup(layered_log(), Strategy(engine=engine, zero_stage=stage))
    assert type(play_strategy(setup)) is expected


def test_outputs_that_the_loop_holds_are_alive_in_the_next_forward_pass() -> None:
    log = layered_log(output_per_sample=64 * MIB)
    peaks = [_live(_setup(log, Strategy(), keeps_outputs=keeps)) for keeps in (False, True)]
    outputs = [dict(peak[RunPhase.STEP].live).get("outputs", 0) for peak in peaks]
    assert outputs == [0, 64 * MIB]
    outputs = [dict(peak[RunPhase.FORWARD].live)["outputs"] for peak in peaks]
    assert outputs == [64 * MIB, 128 * MIB]


@pytest.mark.parametrize(
    ("engine", "deepspeed", "uncertainty", "words"),
    [
        (Engine.DEEPSPEED, "0.19.8", 0.12, ""),
        (Engine.DEEPSPEED, "0.19.8+cu128", 0.12, ""),
        (Engine.DEEPSPEED, "0.19.2", 0.14, "2% more, as only 0.19.8 was compared"),
        (Engine.DEEPSPEED, "1.2.0", 0.14, "2% more, as only 0.19.8 was compared"),
        (Engine.DEEPSPEED, "0.16.4", 0.17, "5% more, as how it flattens"),
        (Engine.DEEPSPEED, None, 0.17, "5% more, as the release of DeepSpeed is not known"),
        (Engine.NATIVE, None, 0.12, ""),
    ],
)
def test_a_deepspeed_that_was_not_compared_is_less_certain(
    engine: Engine, deepspeed: str | None, uncertainty: float, words: str
) -> None:
    gpu = GpuSpec(name="made", memory_bytes=GIB, compute_capability=(8, 0))
    setup = _setup(layered_log(), Strategy(engine=engine))
    estimate = estimate_memory(replace(setup, versions=replace(_VERSIONS, deepspeed=deepspeed)), gpu=gpu)
    assert estimate.uncertainty == pytest.approx(uncertainty)
    assert words in estimate.uncertainty_source
    assert ("more, as" in estimate.uncertainty_source) is bool(words)


@pytest.mark.parametrize(
    ("own_model", "quantization", "ranks", "uncertainty"),
    [
        (True, None, 1, 0.08),
        (True, Quantization.NF4, 1, 0.15),
        (False, None, 1, 0.12),
        (False, Quantization.NF4, 1, 0.15),
        (True, None, 2, 0.15),
        (False, None, 2, 0.15),
    ],
)
def test_the_uncertainty_goes_by_ranks_by_whose_model_was_traced_and_by_its_format(
    own_model: bool, quantization: Quantization | None, ranks: int, uncertainty: float
) -> None:
    gpu = GpuSpec(name="made", memory_bytes=GIB, compute_capability=(8, 0))
    setup = _setup(layered_log(), Strategy(quantization=quantization), ranks=ranks)
    estimate = estimate_memory(replace(setup, use=ModelUse(is_own=own_model)), gpu=gpu)
    assert estimate.uncertainty == uncertainty


@pytest.mark.parametrize(
    ("rows", "said"), [(1, "bytes per sample"), (2, "bytes per sample (2 rows at the model)")]
)
def test_a_sample_of_several_rows_is_explained_as_such(rows: int, said: str) -> None:
    """A preference pair, for example."""
    log = layered_log((LayerSizes(),), checkpointing=False, bytes_per_element=4, output_per_sample=MIB)
    setup = replace(_setup(log, Strategy(micro_batch_size=2)), use=ModelUse(rows_per_sample=rows))
    estimate = estimate_memory(setup, gpu=GpuSpec(name="made", memory_bytes=GIB))
    formulas = [
        term.formula for phase in estimate.phases for term in phase.terms if "per sample" in term.formula
    ]
    assert formulas
    assert all(said in formula and ("rows" in formula) is (rows > 1) for formula in formulas)
