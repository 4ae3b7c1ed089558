"""Gathered parameters of ZeRO stage 3: recorded, prefetched, kept and released as DeepSpeed does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_logs import LayerSizes, LogBuilder, layered_log
from zero_plays import at_end, peaks, played, setup_of

from zerofit.core.allocation_log import AllocationLog, Event, TensorKind
from zerofit.core.estimates import RunPhase
from zerofit.core.strategy import Buckets
from zerofit.planning.estimate.device_memory.replay import Tape
from zerofit.planning.estimate.engines.zero_stage3 import DeepSpeedStage3
from zerofit.planning.estimate.model_use import ModelUse

_SIZE = 1 << 16
_LAYERS = tuple(LayerSizes(elements=(_SIZE, _SIZE)) for _ in range(4))
_NUM_ELEMENTS = 8 * _SIZE
_WHOLE = 2 * _NUM_ELEMENTS
_NONE_PERSISTS = Buckets(stage3_param_persistence_threshold=0)


def _traced_stack() -> AllocationLog:
    """Return a log in which every module tells when its forward and backward begin and end, once each."""
    made = LogBuilder()
    modules = [made.module(f"layers.{index}") for index in range(8)]
    for module in modules:
        made.parameter(module, _SIZE, bytes_per_element=2)
    made.note(Event.FORWARD_ENTER, 0)
    for module in modules:
        made.note(Event.FORWARD_ENTER, module)
        made.note(Event.FORWARD_LEAVE, module)
    made.note(Event.FORWARD_LEAVE, 0)
    made.note(Event.FORWARD_ENDS)
    made.note(Event.BACKWARD_ENTER, 0)
    for number, module in reversed(list(enumerate(modules))):
        made.note(Event.BACKWARD_ENTER, module)
        made.gradient(number)
        made.note(Event.BACKWARD_LEAVE, module)
    made.note(Event.BACKWARD_LEAVE, 0)
    return made.build()


_LOG = _traced_stack()


def _gathered(*, accumulation: int = 1, **buckets: int) -> dict[RunPhase, int]:
    sizes = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, **buckets}
    setup = setup_of(_LOG, 3, buckets=Buckets(**sizes), gradient_accumulation_steps=accumulation)
    return peaks(played(setup), "gathered weights")


def test_a_small_model_stays_whole_within_the_default_reuse_distance() -> None:
    assert _gathered()[RunPhase.BACKWARD] == _WHOLE


@pytest.mark.parametrize(
    ("distance", "at_once"),
    [
        (0, 1),
        (1, 1),  # the last module comes again at once
        (2 * _SIZE, 1),  # the one before it after the last one's two passes, 2 * _SIZE away
        (2 * _SIZE + 1, 2),
        (4 * _SIZE + 1, 3),
    ],
)
def test_a_parameter_outside_the_reuse_distance_is_released(distance: int, at_once: int) -> None:
    largest = _gathered(stage3_max_reuse_distance=distance)
    assert largest[RunPhase.BACKWARD] == at_once * 2 * _SIZE


def test_the_recorded_pass_releases_everything_at_once() -> None:
    tape = Tape()
    engine = DeepSpeedStage3(setup_of(_LOG, 3, buckets=_NONE_PERSISTS), tape)
    engine.forward_enter(0)
    engine.forward_enter(1)
    engine.forward_leave(1)
    engine.forward_enter(2)
    assert at_end(tape)["gathered weights"] == 2 * _SIZE


@pytest.mark.parametrize(
    ("prefetch", "most", "at_once"),
    [
        (0, 10**9, 1),
        (_SIZE, 10**9, 2),
        (2 * _SIZE, 10**9, 6),  # each module fetches two ahead and frees one
        (8 * _SIZE, 2 * _SIZE, 2),  # no more than may live
    ],
)
def test_prefetching_is_bounded_by_its_bucket_and_by_what_may_live(
    prefetch: int, most: int, at_once: int
) -> None:
    largest = _gathered(
        stage3_prefetch_bucket_size=prefetch,
        stage3_max_live_parameters=most,
        stage3_max_reuse_distance=0,
    )
    assert largest[RunPhase.FORWARD] == at_once * 2 * _SIZE


def test_the_flat_buffer_of_a_prefetch_lives_until_its_last_parameter_is_used() -> None:
    setup = setup_of(_LOG, 3, buckets=_NONE_PERSISTS)
    largest = peaks(played(setup), "gathered weights", "all-gather buffer")
    assert largest[RunPhase.FORWARD] == 2 * _WHOLE


def test_persistent_parameters_are_whole_between_steps_from_the_first_step_on() -> None:
    setup = setup_of(_LOG, 3, buckets=Buckets(stage3_param_persistence_threshold=_SIZE))
    assert at_end(played(setup)).get("gathered weights", 0) == 0  # released for the checkpoint
    tape = Tape()
    engine = DeepSpeedStage3(setup, tape)
    engine.load()
    engine.initialise()
    before = at_end(tape)["gathered weights"]
    engine.step()
    assert (before, at_end(tape)["gathered weights"]) == (0, _WHOLE)


def test_each_parameter_is_padded_to_the_ranks() -> None:
    made = LogBuilder()
    made.parameter(made.module("only"), 10, bytes_per_element=2)
    made.note(Event.FORWARD_ENTER, 0)
    made.note(Event.FORWARD_ENTER, 1)
    made.note(Event.FORWARD_LEAVE, 1)
    made.note(Event.FORWARD_LEAVE, 0)
    made.note(Event.FORWARD_ENDS)
    made.gradient(0)
    setup = setup_of(made.build(), 3, ranks=4, buckets=_NONE_PERSISTS)
    tape = played(setup)
    assert at_end(tape)["master weights"] == 4 * 3
    assert peaks(tape, "gathered weights")[RunPhase.FORWARD] == 2 * 12


def test_one_rank_uses_the_part_that_it_has() -> None:
    setup = setup_of(_LOG, 3, ranks=1, buckets=_NONE_PERSISTS)
    assert peaks(played(setup), "gathered weights")[RunPhase.FORWARD] == 0


def test_a_model_partitioned_after_loading_lies_whole_on_the_gpu_at_first() -> None:
    setup = setup_of(_LOG, 3, ranks=4, buckets=Buckets())
    largest = []
    for makes_model_first in (False, True):
        tape = played(replace(setup, use=ModelUse(makes_model_first=makes_model_first)))
        largest.append(peaks(tape, "weights", "gathered weights"))
    # The last parameter is made in fp32, and cast, beside the parts of the others.
    assert largest[0][RunPhase.LOAD] == (_WHOLE - 2 * _SIZE) // 4 + (4 + 2) * _SIZE
    assert (largest[1][RunPhase.LOAD], largest[1][RunPhase.INITIALISE]) == (0, _WHOLE + 2 * _SIZE // 4)


def test_a_module_whose_backward_pass_never_ends_is_released_with_the_micro_batch() -> None:
    made = LogBuilder()
    embedding = made.module("embedding")
    made.parameter(embedding, _SIZE, bytes_per_element=2)
    for event, module in ((Event.FORWARD_ENTER, 0), (Event.FORWARD_ENTER, embedding)):
        made.note(event, module)
    made.note(Event.FORWARD_LEAVE, embedding)
    output = made.allocate(TensorKind.OUTPUT, 0, fixed=512)
    made.note(Event.FORWARD_LEAVE, 0)
    made.note(Event.FORWARD_ENDS)
    made.note(Event.BACKWARD_ENTER, embedding)
    made.gradient(0)
    made.free(output)
    tape = played(setup_of(made.build(), 3, buckets=_NONE_PERSISTS))
    assert at_end(tape).get("gathered weights", 0) == 0


def test_gathering_and_reducing_run_on_streams_of_their_own() -> None:
    tape = played(setup_of(layered_log(_LAYERS, bytes_per_element=2), 3, buckets=_NONE_PERSISTS))
    by_stream = {
        stream: {tape.terms[block] for block, at in tape.streams.items() if at == stream} for stream in (1, 2)
    }
    assert by_stream == {1: {"gathered weights", "all-gather buffer"}, 2: {"gradient copy"}}
