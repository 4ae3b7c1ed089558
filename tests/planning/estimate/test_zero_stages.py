"""Bytes per parameter that DeepSpeed's stages hold, on a model whose sizes divide without a rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from made_logs import LayerSizes, layered_log
from zero_plays import ENGINE_TERMS, at_end, peaks, played, setup_of

from zerofit.core.estimates import RunPhase
from zerofit.core.strategy import Buckets, OptimizerName, Precision
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.engines.engine import NUM_STEPS

_LAYERS = tuple(LayerSizes(elements=(1 << 16, 1 << 16)) for _ in range(4))
_NUM_ELEMENTS = 8 << 16
_LOGS = {2: layered_log(_LAYERS, bytes_per_element=2), 4: layered_log(_LAYERS)}
_SMALL = Buckets(reduce_bucket_size=1 << 17, stage3_param_persistence_threshold=0)


def _held(size: int, stage: int, offload: str = "", ranks: int = 4) -> dict[str, float]:
    tape = played(setup_of(_LOGS[size], stage, ranks=ranks, offload=offload, buckets=_SMALL))
    names = ("weights", "master weights", "optimizer states", "gradient partition", "gradient bucket")
    return {name: at_end(tape)[name] / _NUM_ELEMENTS for name in names if at_end(tape)[name]}


@pytest.mark.parametrize(
    ("size", "stage", "offload", "expected"),
    [
        (2, 0, "", {"weights": 2, "master weights": 4, "optimizer states": 8}),
        (4, 0, "", {"weights": 4, "optimizer states": 8}),
        (2, 1, "", {"weights": 2, "master weights": 1, "optimizer states": 2}),
        (2, 2, "", {"weights": 2, "master weights": 1, "optimizer states": 2}),
        (4, 2, "", {"weights": 4, "master weights": 1, "optimizer states": 2}),
        (2, 2, "o", {"weights": 2, "gradient partition": 0.25}),  # c times the largest parameter
        (
            2,
            3,
            "",
            {
                "weights": 0.5,
                "master weights": 1,
                "optimizer states": 2,
                "gradient partition": 0.5,
                "gradient bucket": 0.5,
            },
        ),
        (2, 3, "o", {"weights": 0.5, "gradient bucket": 0.5}),
        (2, 3, "op", {"gradient bucket": 0.5}),
    ],
)
def test_what_stays_on_the_device_in_bytes_a_parameter(
    size: int, stage: int, offload: str, expected: dict[str, float]
) -> None:
    assert _held(size, stage, offload) == expected


@pytest.mark.parametrize(
    ("size", "stage", "per_parameter"),
    [
        # What deepspeed 0.19.8 was measured to need on two CPU ranks.
        (2, 0, 24),
        (4, 0, 20),
        (2, 1, 2 + (12 + 2 + 4 + 2) / 2),  # c P_part is c P / N here
        (2, 2, 2 + (12 + 2 + 4 + 2) / 2),
    ],
)
def test_largest_moment_of_the_step(size: int, stage: int, per_parameter: float) -> None:
    tape = played(setup_of(_LOGS[size], stage, ranks=2, buckets=_SMALL))
    assert peaks(tape, *ENGINE_TERMS)[RunPhase.STEP] == per_parameter * _NUM_ELEMENTS


def test_flattening_takes_the_weights_twice_unless_there_is_no_room() -> None:
    setup = setup_of(_LOGS[2], 2, buckets=_SMALL)
    weights = 2 * _NUM_ELEMENTS
    assert peaks(played(setup), "weights")[RunPhase.INITIALISE] == 2 * weights
    tight = replace(setup, gpu_memory_bytes=2 * weights - 1)
    assert peaks(played(tight), "weights")[RunPhase.INITIALISE] == weights


@pytest.mark.parametrize(
    ("stage", "accumulation", "phase", "term", "elements"),
    [
        (1, 1, RunPhase.FORWARD, "gradient bucket", 0),
        (1, 2, RunPhase.FORWARD, "gradient bucket", 1 << 17),  # stage 1 keeps it between micro-batches
        (2, 2, RunPhase.FORWARD, "gradient bucket", 0),
        (1, 2, RunPhase.FORWARD, "gradients", _NUM_ELEMENTS),
        (2, 2, RunPhase.FORWARD, "gradients", 0),
        (2, 1, RunPhase.BACKWARD, "gradient partition", _NUM_ELEMENTS // 4),
        (2, 2, RunPhase.BACKWARD, "gradient partition", _NUM_ELEMENTS // 2),  # the sum, and what is added
        (3, 2, RunPhase.BACKWARD, "gradient partition", _NUM_ELEMENTS // 4),
        (3, 2, RunPhase.FORWARD, "gradient bucket", 1 << 17),
    ],
)
def test_gradients_and_the_bucket(
    stage: int, accumulation: int, phase: RunPhase, term: str, elements: int
) -> None:
    setup = setup_of(_LOGS[2], stage, ranks=4, buckets=_SMALL, gradient_accumulation_steps=accumulation)
    assert peaks(played(setup), term)[phase] == 2 * elements


def test_an_oversized_gradient_passes_the_bucket_by() -> None:
    buckets = Buckets(reduce_bucket_size=1 << 10, stage3_param_persistence_threshold=0)
    for stage in (2, 3):
        tape = played(setup_of(_LOGS[2], stage, buckets=buckets))
        assert peaks(tape, "gradient bucket")[RunPhase.BACKWARD] == 2 << 10
        assert peaks(tape, "gradients")[RunPhase.BACKWARD] <= 2 * 2 * (1 << 16)


@pytest.mark.parametrize(
    ("stage", "ranks", "bucket", "elements"),
    [
        (2, 2, _NUM_ELEMENTS, _NUM_ELEMENTS),  # two ranks' slices are copied into one message
        (2, 1, _NUM_ELEMENTS, 0),  # one rank's are reduced where they lie
        (2, 2, _NUM_ELEMENTS // 2, 0),  # as here, where each bucket holds one rank's
        (2, 4, _NUM_ELEMENTS // 2, _NUM_ELEMENTS // 2),
        (3, 2, _NUM_ELEMENTS, _NUM_ELEMENTS),
        (3, 2, 1 << 16, 0),  # a single gradient that divides by the ranks
    ],
)
def test_reducing_copies_the_bucket_where_it_must(stage: int, ranks: int, bucket: int, elements: int) -> None:
    buckets = replace(_SMALL, reduce_bucket_size=bucket)
    tape = played(setup_of(_LOGS[2], stage, ranks=ranks, buckets=buckets))
    assert peaks(tape, "gradient copy")[RunPhase.BACKWARD] == 2 * elements


@pytest.mark.parametrize(
    ("optimizer", "temporaries", "states"),
    [(None, 4, 8), (OptimizerName.ADAMW, 0, 8), (OptimizerName.SGD, 4, 0)],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizer_decides_states_and_temporaries(
    stage: int, optimizer: OptimizerName | None, temporaries: int, states: int
) -> None:
    tape = played(setup_of(_LOGS[2], stage, optimizer=optimizer, buckets=_SMALL))
    assert peaks(tape, "optimizer temporaries")[RunPhase.STEP] == temporaries * _NUM_ELEMENTS // 2
    assert peaks(tape, "optimizer states")[RunPhase.STEP] == pytest.approx(states * _NUM_ELEMENTS // 2, abs=8)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("optimizer", "states"), [(OptimizerName.ADAMW_8BIT, 2), (OptimizerName.LION_8BIT, 1)]
)
def test_embeddings_keep_32_bit_states(stage: int, optimizer: OptimizerName, states: int) -> None:
    embedding, *others = _LOGS[2].parameters
    log = replace(_LOGS[2], parameters=(replace(embedding, is_embedding=True), *others))
    tape = played(setup_of(log, stage, optimizer=optimizer, buckets=_SMALL))
    shared = 2 if stage else 1
    whole = embedding.num_elements // shared
    in_8_bit = _NUM_ELEMENTS // shared - whole
    held = states * (4 * whole + in_8_bit + 4 * in_8_bit // 256)
    assert peaks(tape, "optimizer states")[RunPhase.STEP] == pytest.approx(held, abs=states * 1024)


@pytest.mark.parametrize(
    ("size", "elements", "copies"),
    [
        # A norm in fp64 of each piece; then the pieces become one tensor, unless there is only one.
        (4, (1000,), [8 * 1000]),
        (4, (1000, 24), [8 * 1000, 8 * 24, 4 * 1024]),
        (4, (999,), [8 * 999, 4 * 1000]),  # one piece, and padding to a multiple of two elements
        # Of 16-bit gradients an fp32 tensor is made.
        (2, (1000,), [8 * 1000, 4 * 1000]),
        (2, (1000, 24), [8 * 1000, 8 * 24, 2 * 1024, 4 * 1024]),
        (2, (999,), [8 * 999, 2 * 1000, 4 * 1000]),
    ],
)
def test_what_the_step_of_stage_2_copies(size: int, elements: tuple[int, ...], copies: list[int]) -> None:
    layer = LayerSizes(elements=(*elements, 8)[:2], trains=(True, len(elements) == 2))
    log = layered_log((layer,), bytes_per_element=size)
    tape = played(setup_of(log, 2, ranks=1, optimizer=OptimizerName.SGD))
    marks = [*tape.marks, (len(tape.entries), None)]
    steps = [(start, end) for (start, phase), (end, _) in pairwise(marks) if phase is RunPhase.STEP]
    assert len(steps) == NUM_STEPS
    for start, end in steps:
        born = [entry - 1 for entry in tape.entries[start:end] if entry > 0]
        assert [tape.sizes[block] for block in born if tape.terms[block] == "gradient copy"] == copies


@pytest.mark.parametrize(("size", "fp32_copies"), [(2, [4 * 500]), (4, [])])
def test_gradients_that_are_not_fp32_are_copied_before_they_go_to_the_host(
    size: int, fp32_copies: list[int]
) -> None:
    log = layered_log((LayerSizes(elements=(1000, 8), trains=(True, False)),), bytes_per_element=size)
    tape = played(setup_of(log, 3, ranks=2, offload="o", buckets=_SMALL))
    copies = [
        num_bytes for num_bytes, term in zip(tape.sizes, tape.terms, strict=True) if term == "gradient copy"
    ]
    # Each rank's part of 500 elements, its norm in fp64, and what the host's optimizer is given.
    assert copies == NUM_STEPS * [size * 500, 8 * 500, *fp32_copies]


def test_sub_groups_bound_the_step_of_stage_3() -> None:
    buckets = Buckets(sub_group_size=1 << 16, stage3_param_persistence_threshold=0)
    tape = played(setup_of(_LOGS[2], 3, ranks=1, buckets=buckets))
    assert peaks(tape, "optimizer temporaries")[RunPhase.STEP] == 4 << 16


def test_frozen_parameters_stay_outside_of_every_partition_but_stage_3() -> None:
    log = layered_log(
        tuple(LayerSizes(elements=(1 << 16, 1 << 16), trains=(False, True)) for _ in range(4)),
        bytes_per_element=2,
    )
    held = {stage: at_end(played(setup_of(log, stage, ranks=4, buckets=_SMALL))) for stage in (2, 3)}
    assert [held[stage]["weights"] for stage in (2, 3)] == [2 * _NUM_ELEMENTS, 2 * _NUM_ELEMENTS // 4]
    assert [held[stage]["master weights"] for stage in (2, 3)] == [4 * _NUM_ELEMENTS // 8] * 2


def test_fp16_looks_for_overflow_at_stage_3_in_a_copy_and_a_mask() -> None:
    copied = []
    for precision in (Precision.BF16, Precision.FP16):
        tape = played(setup_of(_LOGS[2], 3, buckets=_SMALL, precision=precision))
        pairs = zip(tape.terms, tape.sizes, strict=True)
        copied.append(sum(size for term, size in pairs if term == "gradient copy"))
    assert copied[1] - copied[0] == NUM_STEPS * (2 + 1) * _NUM_ELEMENTS // 2


def test_every_term_of_an_engine_has_its_formula_and_source() -> None:
    for stage in range(4):
        setup = setup_of(_LOGS[2], stage)
        engine = play_strategy(setup)
        traced = {kind.value for kind in _LOGS[2].storages.kinds} | {"buffers", "kernel workspaces"}
        assert {term for term in played(setup).terms if engine.explain(term) is None} <= traced
