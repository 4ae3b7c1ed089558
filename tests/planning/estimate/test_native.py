"""NativeEngine: what lives when, in one process and under DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_logs import LayerSizes, layered_log

from zerofit.core.allocation_log import AllocationLog
from zerofit.core.estimates import RunPhase
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import OptimizerName, Strategy
from zerofit.core.units import MIB
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.optimizers import STATES
from zerofit.planning.estimate.device_memory.replay import Tape, TapePeak, replay_live
from zerofit.planning.estimate.engines.engine import Setup, bucket_sizes

_P = 3 * MIB
"""Elements of the made model: two layers of 512 Ki and 1 Mi elements."""
_LAYER = LayerSizes(elements=(MIB // 2, MIB), per_sample=(MIB, 2 * MIB))
_VERSIONS = Versions(python="3.11", zerofit="0")


def _peaks(
    strategy: Strategy, *, ranks: int = 1, trains: bool = True, frozen: bool = False
) -> dict[RunPhase, TapePeak]:
    layer = LayerSizes(elements=_LAYER.elements, per_sample=_LAYER.per_sample, trains=(not frozen, True))
    log = layered_log((layer, layer), buffer_bytes=(4096,))
    tape = _tape(log, strategy, ranks=ranks, trains=trains)
    return {peak.phase: peak for peak in replay_live(tape).peaks}


def _tape(log: AllocationLog, strategy: Strategy, *, ranks: int = 1, **fields: Any) -> Tape:
    topology = Topology(world_size=ranks)
    setup = Setup(**{"log": log, "strategy": strategy, "topology": topology, "versions": _VERSIONS, **fields})
    return play_strategy(setup).tape


def _sizes(tape: Tape, term: str) -> list[int]:
    return [size for size, named in zip(tape.sizes, tape.terms, strict=True) if named == term]


def _of(peak: TapePeak, term: str) -> int:
    return dict(peak.live).get(term, 0)


def test_bytes_for_each_parameter_in_fp32_with_foreach_adamw() -> None:
    peaks = _peaks(Strategy(gradient_clipping=0.0))
    assert dict(peaks[RunPhase.LOAD].live) == {"weights": 4 * _P, "buffers": 4096}
    assert dict(peaks[RunPhase.SAVE].live) == {
        "optimizer states": 8 * _P,
        "weights": 4 * _P,
        "kernel workspaces": 2 * 8_519_680,
        "buffers": 4096,
    }
    assert dict(peaks[RunPhase.STEP].live) == {
        "optimizer states": 8 * _P,
        "weights": 4 * _P,
        "gradients": 4 * _P,
        "optimizer temporaries": 4 * _P,
        "kernel workspaces": 2 * 8_519_680,
        "buffers": 4096,
    }


def test_ddp_holds_a_bucket_beside_every_gradient() -> None:
    """Checked on real ranks: 4 P weights + 4 P buckets + 4 P gradients (DistributedDataParallel, fp32)."""
    peaks = _peaks(Strategy(gradient_clipping=0.0), ranks=2)
    assert _of(peaks[RunPhase.STEP], "gradient bucket") == 4 * _P
    assert _of(peaks[RunPhase.FORWARD], "gradient bucket") == 4 * _P
    assert _of(_peaks(Strategy())[RunPhase.STEP], "gradient bucket") == 0


def test_gradients_are_there_in_the_forward_pass_only_while_accumulating() -> None:
    once, thrice = (_peaks(Strategy(gradient_accumulation_steps=steps)) for steps in (1, 4))
    assert _of(once[RunPhase.FORWARD], "gradients") == 0
    assert _of(thrice[RunPhase.FORWARD], "gradients") == 4 * _P
    # The last gradient of a later micro-batch is there beside the sum of those before.
    assert once[RunPhase.BACKWARD].live_bytes < thrice[RunPhase.BACKWARD].live_bytes


@pytest.mark.parametrize(("torch", "expected"), [("1.13.1", 4 * _P), ("2.13.0", 0), (None, 0)])
def test_gradients_outlived_the_step_before_torch_2(torch: str | None, expected: int) -> None:
    versions = Versions(python="3.11", zerofit="0", torch=torch)
    tape = _tape(layered_log((_LAYER, _LAYER)), Strategy(), versions=versions)
    saved = next(peak for peak in replay_live(tape).peaks if peak.phase is RunPhase.SAVE)
    assert _of(saved, "gradients") == expected


def test_the_fused_optimizer_makes_no_temporaries_and_keeps_its_step_on_the_gpu() -> None:
    peak = _peaks(Strategy(optimizer=OptimizerName.ADAMW, gradient_clipping=0.0))[RunPhase.STEP]
    assert _of(peak, "optimizer temporaries") == 0
    assert _of(peak, "optimizer states") == 8 * _P + 4 * 4


def test_clipping_costs_one_norm_a_tensor_and_its_partial_sums() -> None:
    strategy = Strategy(optimizer=OptimizerName.ADAMW, gradient_clipping=1.0)
    # 4 tensors of at most 1 Mi elements, 16 chunks of 64 Ki each.
    assert _of(_peaks(strategy)[RunPhase.STEP], "optimizer temporaries") == 4 * 16 * 4 + 4 * 4


def test_what_is_frozen_has_neither_gradient_nor_state_nor_bucket() -> None:
    peak = _peaks(Strategy(gradient_clipping=0.0), frozen=True, ranks=2)[RunPhase.STEP]
    trained = 2 * MIB
    assert dict(peak.live) == {
        "weights": 4 * _P,
        "optimizer states": 8 * trained,
        "gradients": 4 * trained,
        "gradient bucket": 4 * trained,
        "optimizer temporaries": 4 * trained,
        "kernel workspaces": 2 * 8_519_680,
        "buffers": 4096,
    }


def test_without_training_there_is_a_forward_pass_and_no_more() -> None:
    peaks = _peaks(Strategy(), trains=False)
    assert list(peaks) == [RunPhase.LOAD, RunPhase.INITIALISE, RunPhase.FORWARD]


def test_after_the_first_backward_pass_the_one_bucket_becomes_many() -> None:
    tape = _tape(layered_log((LayerSizes(elements=(4 * MIB, 5 * MIB)),) * 2), Strategy(), ranks=2)
    # Gradients come from the last layer's second half on: 20, 16, 20 and 16 MiB.
    assert _sizes(tape, "gradient bucket") == [72 * MIB, 20 * MIB, 36 * MIB, 16 * MIB]


def test_the_second_step_runs_with_the_many_buckets_and_one_process_has_none() -> None:
    log = layered_log((LayerSizes(elements=(4 * MIB, 5 * MIB)),) * 2)
    born = []
    for ranks in (1, 2):
        tape = _tape(log, Strategy(), ranks=ranks)
        blocks = [block for block, term in enumerate(tape.terms) if term == "gradient bucket"]
        # Steps begun before each bucket is made.
        steps = [place for place, phase in tape.marks if phase is RunPhase.STEP]
        born.append([sum(place <= tape.entries.index(block + 1) for place in steps) for block in blocks])
    assert born == [[], [0, 1, 1, 1]]


def test_rank_0s_weights_go_out_in_flat_copies() -> None:
    strategy = Strategy()
    assert _of(_peaks(strategy, ranks=2)[RunPhase.INITIALISE], "weights") == 4 * _P
    layer = LayerSizes(elements=(70 * MIB, 70 * MIB))
    tape = _tape(layered_log((layer, layer)), strategy, ranks=2)
    assert _sizes(tape, "kernel workspaces").count(280 * MIB) == 4


@pytest.mark.parametrize(
    ("sizes", "limits", "expected"),
    [
        ((3, 4, 5), (), [12]),
        ((3, 4, 5), (3, 100), [3, 9]),
        ((1, 1, 1, 9, 1, 1), (2, 10), [2, 10, 2]),
        ((20, 20), (2, 10), [20, 20]),
        ((), (2, 10), []),
    ],
)
def test_buckets_are_full_once_they_reach_their_limit(
    sizes: tuple[int, ...], limits: tuple[int, ...], expected: list[int]
) -> None:
    assert bucket_sizes(sizes, limits) == expected


def test_buckets_are_those_of_torch() -> None:
    import torch
    from torch import distributed

    shapes = (7000, 260_000, 1_000, 30, 6_000_000, 7_000_000, 9_000, 2_000_000, 100)
    tensors = [torch.empty(shape) for shape in shapes]
    indices, _ = distributed._compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    real = sorted(sum(tensors[index].nbytes for index in bucket) for bucket in indices)
    assert sorted(bucket_sizes([tensor.nbytes for tensor in tensors], (MIB, 25 * MIB))) == real


@pytest.mark.parametrize(("is_embedding", "num_bytes"), [(False, 2), (True, 8)])
def test_8_bit_states_of_what_an_embedding_holds_are_fp32(is_embedding: bool, num_bytes: int) -> None:
    log = layered_log((_LAYER,))
    named = replace(log.parameters[0], name="embed_out.weight", is_embedding=is_embedding)
    log = replace(log, parameters=(named, *log.parameters[1:]))
    states = sum(_sizes(_tape(log, Strategy(optimizer=OptimizerName.ADAMW_8BIT)), STATES))
    others = sum(one.num_elements for one in log.parameters[1:])
    scales = 8 * (others + (0 if is_embedding else named.num_elements)) // 256
    assert states == num_bytes * named.num_elements + 2 * others + scales + 2 * 1024
