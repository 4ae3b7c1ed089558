"""Replay: the largest moment of each phase, and where a run ends that has too little memory."""

from __future__ import annotations

from zerofit.core.estimates import RunPhase
from zerofit.core.units import MIB
from zerofit.planning.estimate.device_memory.replay import Replay, Tape, TapePeak, replay, replay_live


def _tape() -> Tape:
    """Weights; then forward twice, with activations that are gone before the step needs its temporaries."""
    tape = Tape()
    tape.begin(RunPhase.LOAD)
    tape.allocate(30 * MIB, "weights")
    tape.begin(RunPhase.INITIALISE)
    for size in (5 * MIB, 12 * MIB):
        tape.begin(RunPhase.FORWARD)
        activation = tape.allocate(size, "activations")
        tape.free(activation)
        tape.begin(RunPhase.STEP)
        tape.free(tape.allocate(40 * MIB, "optimizer temporaries"))
    tape.begin(RunPhase.SAVE)
    return tape


def test_each_phase_is_told_at_its_largest_moment() -> None:
    weights = ("weights", 30 * MIB)
    assert replay(_tape()) == Replay(
        peaks=(
            _peak(RunPhase.LOAD, weights, reserved=30),
            _peak(RunPhase.INITIALISE, weights, reserved=30),
            # In the second forward pass 5 + 20 + 40 MiB are reserved, and 12 MiB are cut from the 20.
            _peak(RunPhase.FORWARD, weights, ("activations", 12 * MIB), reserved=90),
            _peak(RunPhase.STEP, ("optimizer temporaries", 40 * MIB), weights, reserved=90),
            _peak(RunPhase.SAVE, weights, reserved=90),
        )
    )


def _peak(phase: RunPhase, *live: tuple[str, int], reserved: int) -> TapePeak:
    allocated = sum(size for _, size in live)
    return TapePeak(phase=phase, live=live, allocated_bytes=allocated, reserved_bytes=reserved * MIB)


def test_without_an_allocator_what_is_live_is_what_is_reserved() -> None:
    peaks = replay_live(_tape()).peaks
    assert [(peak.phase, peak.live_bytes, peak.reserved_bytes // MIB) for peak in peaks] == [
        (RunPhase.LOAD, 30 * MIB, 30),
        (RunPhase.INITIALISE, 30 * MIB, 30),
        (RunPhase.FORWARD, 42 * MIB, 42),
        (RunPhase.STEP, 70 * MIB, 70),
        (RunPhase.SAVE, 30 * MIB, 30),
    ]


def test_a_run_ends_at_the_request_that_finds_no_room() -> None:
    played = replay(_tape(), capacity=65 * MIB)
    assert not played.ends
    assert [peak.phase for peak in played.peaks] == [
        RunPhase.LOAD,
        RunPhase.INITIALISE,
        RunPhase.FORWARD,
        RunPhase.STEP,
    ]


def test_a_run_gets_through_with_less_than_it_would_reserve() -> None:
    played = replay(_tape(), capacity=75 * MIB)
    assert played.ends
    assert max(peak.reserved_bytes for peak in played.peaks) == 70 * MIB


def test_within_a_limit_the_most_live_tensors_are_described() -> None:
    tape = Tape()
    tape.begin(RunPhase.FORWARD)
    for block in [tape.allocate(20 * MIB, "activations") for _ in range(2)]:
        tape.free(block)
    tape.allocate(42 * MIB, "weights")  # 82 MiB are reserved, of which 40 are cached
    tape.allocate(22 * MIB, "outputs")  # the cached ones are freed for it
    weights, outputs = ("weights", 42 * MIB), ("outputs", 22 * MIB)
    assert replay(tape, capacity=84 * MIB).peaks == (_peak(RunPhase.FORWARD, weights, outputs, reserved=82),)


def test_unless_a_limit_is_reached_the_moment_with_most_reserved_is_described() -> None:
    tape = Tape()
    tape.begin(RunPhase.FORWARD)
    for block in [tape.allocate(20 * MIB, "activations") for _ in range(3)]:
        tape.free(block)
    tape.allocate(22 * MIB, "outputs")  # finds no block that is large enough
    outputs = ("outputs", 22 * MIB)
    for capacity in (None, 82 * MIB):
        assert replay(tape, capacity=capacity).peaks == (_peak(RunPhase.FORWARD, outputs, reserved=82),)


def test_an_emptied_cache_is_not_reserved_any_more() -> None:
    tape = Tape()
    tape.begin(RunPhase.LOAD)
    tape.free(tape.allocate(50 * MIB, "weights"))
    tape.empty_cache()
    tape.allocate(10 * MIB, "weights")
    tape.begin(RunPhase.INITIALISE)
    assert [peak.reserved_bytes for peak in replay(tape).peaks] == [50 * MIB, 10 * MIB]


def test_a_streams_cache_serves_no_other() -> None:
    tape = Tape()
    tape.begin(RunPhase.STEP)
    tape.free(tape.allocate(50 * MIB, "gathered weights", stream=1))
    tape.allocate(50 * MIB, "weights")
    assert replay(tape).peaks[0].reserved_bytes == 100 * MIB
