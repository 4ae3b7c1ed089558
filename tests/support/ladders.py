"""Ladders with fixed figures, for tests of what is made of them."""

from __future__ import annotations

from dataclasses import replace

from measuring.ladder import CPU, PUBLISHED_MODEL, Ladder, RungResult, published_of
from measuring.results import TensorBytes, TrialMeasurement, TrialOutcome, TrialPrediction, TrialState

from zerofit.core.facts import Versions
from zerofit.core.units import MIB
from zerofit.launching.rungs import ON_ONE_RANK, baseline, climb, parse_rungs

_PARTS = TensorBytes(weights=87 * MIB, gradients=87 * MIB, optimizer_states=174 * MIB, activations=1100 * MIB)
_GPU_ENDS = {
    "length-64": TrialOutcome(
        state=TrialState.OUT_OF_MEMORY,
        reason="OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB.",
    )
}
_CPU_ENDS = {
    "adafactor": TrialOutcome(
        state=TrialState.KILLED,
        reason="ended by SIGKILL, while taking step 1 of 2; the kernel's OOM killer ended a process",
    ),
    "tf32": TrialOutcome(
        state=TrialState.CANNOT_RUN, reason="tf32 needs a GPU that supports it: there is none"
    ),
}


def on_cpu() -> Ladder:
    """Return a ladder of a small model, with rungs that did not run to their end."""
    return _ladder("baseline,accumulation,tf32,adafactor,length-64", model="all-minilm-l6-v2", device=CPU)


def on_gpu() -> Ladder:
    """Return a ladder like the published one, with a prediction."""
    return _ladder(ON_ONE_RANK, model=PUBLISHED_MODEL, device="NVIDIA H200")


def not_counted() -> Ladder:
    """Return a ladder with a rung whose tensors were not counted, nor its prediction's."""
    ladder = on_gpu()
    first, second, *_ = ladder.rungs
    assert second.measured is not None
    assert second.predicted is not None
    outcome = replace(second.outcome, measured=replace(second.measured, counted=None))
    other = replace(second, outcome=outcome, predicted=replace(second.predicted, parts=None))
    return replace(ladder, rungs=(first, other))


def _ladder(names: str, *, model: str, device: str) -> Ladder:
    base = baseline(batch_size=32, sequence_length=128, attention="eager")
    rungs = []
    for number, step in enumerate(climb(parse_rungs(names), base, is_cumulative=True), 1):
        outcome = TrialOutcome(state=TrialState.DONE, measured=_measured(number, device))
        rungs.append(
            RungResult(
                name=step.rung.name,
                label=step.label,
                strategy=step.run.strategy,
                sequence_length=step.run.sequence_length,
                outcome=(_CPU_ENDS if device == CPU else _GPU_ENDS).get(step.rung.name, outcome),
                predicted=_predicted(number, device),
                published=published_of(model, base, step.run),
            )
        )
    return Ladder(
        model=model,
        architecture="BertForSequenceClassification",
        num_parameters=22_713_986,
        batch_size=32,
        sequence_length=128,
        device=device,
        is_cumulative=True,
        predicted_for=None if device == CPU else device,
        versions=Versions(python="3.11", zerofit="0.1.0", torch="2.13.0"),
        rungs=tuple(rungs),
    )


def _measured(number: int, device: str) -> TrialMeasurement:
    measured = TrialMeasurement(
        process_bytes=1800 * MIB // number,
        process_peak_bytes=2200 * MIB // number,
        step_times_s=(2.0 * number, 2.1 * number, 2.4 * number),
        step_time_s=2.1 * number,
        tokens_per_s=4096 / (2.1 * number),
        losses=(0.72671, 0.70001, 0.61232),
        counted=replace(_PARTS, activations=1100 * MIB // number),
        num_trained_parameters=22_713_986,
        num_threads=2,
    )
    if device == CPU:
        return measured
    return replace(
        measured,
        allocated_bytes=15_000 * MIB // number,
        reserved_bytes=15_500 * MIB // number,
        device_bytes=16_000 * MIB // number,
    )


def _predicted(number: int, device: str) -> TrialPrediction:
    parts = replace(_PARTS, activations=1050 * MIB // number)
    if device == CPU:
        return TrialPrediction(parts=parts)
    return TrialPrediction(
        parts=parts,
        allocated_bytes=14_000 * MIB // number,
        reserved_bytes=14_900 * MIB // number,
        device_bytes=15_900 * MIB // number,
    )
