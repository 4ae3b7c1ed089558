"""What the recorder wrote, read again, and the differences between two trainings."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_SHOWN = 3
"""Differences of one kind that are named; the others are counted."""
LOG_TOLERANCE = 1e-4
"""Of the losses in a Trainer's log, relative: it sums and rounds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far two trainings that mean the same may lie apart."""

    loss: float = 2e-5
    """Of the losses of a step, relative. fp32 sums in another order."""
    way: float = 5e-3
    """Distance of all parameters, against the way that they have gone. Adam's first steps are as long for a
    gradient that is only rounding (the bias of a question-answering head has no other) as for any: 2.5e-3 was
    measured there, 1e-6 elsewhere, and 5e-2 and more where the loss of a step was weighted wrongly."""
    rate: float = 1e-9
    """Of learning rates, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step over all ranks."""

    optimizer: int
    rates: tuple[float, ...]
    """Different learning rates of its groups, sorted."""
    samples: Counter[str]
    loss: float
    """Sum over the backward passes of the step, mean over the ranks."""
    weights: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, from the records of all its ranks."""

    world_size: int
    zero_stage: int | None
    """Of the DeepSpeed engine that stepped; None where none did."""
    is_sharded: bool
    """True if FSDP2 has sharded the model."""
    optimizers: tuple[str, ...]
    steps: tuple[Step, ...]
    initial_weights: dict[str, Any]
    loader_lengths: tuple[int | None, ...]
    trainer: dict[str, Any]


def read_training(folder: Path) -> Training:
    """Return what the ranks of one training have recorded in a folder.

    Raises:
        ValueError: a rank has left no record, or the ranks have not taken the same number of steps.
    """
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    if not ranks or len(ranks) != ranks[0]["world_size"]:
        raise ValueError(f"records of {len(ranks)} ranks in {folder}")
    if len({len(rank["steps"]) for rank in ranks}) != 1:
        raise ValueError(f"the ranks took {[len(rank['steps']) for rank in ranks]} steps")
    first = ranks[0]
    return Training(
        world_size=first["world_size"],
        zero_stage=first["zero_stage"],
        is_sharded=first["is_sharded"],
        optimizers=tuple(first["optimizers"]),
        steps=tuple(_step(parts) for parts in zip(*(rank["steps"] for rank in ranks), strict=True)),
        initial_weights=first["initial_weights"],
        loader_lengths=tuple(first["loader_lengths"]),
        trainer=first["trainer"],
    )


def _step(parts: tuple[dict[str, Any], ...]) -> Step:
    return Step(
        optimizer=parts[0]["optimizer"],
        rates=tuple(sorted(set(parts[0]["rates"]))),
        samples=Counter(sample for part in parts for sample in part["samples"]),
        loss=sum(math.fsum(part["losses"]) for part in parts) / len(parts),
        weights=parts[0]["weights"],
    )


def differences(
    expected: Training, seen: Training, tolerance: Tolerance | None = None, *, same_optimizer: bool = True
) -> list[str]:
    """Return one sentence for each way in which a training is not what was expected; none if it is.

    Args:
        expected: the script by itself.
        seen: the script under zerofit.
        tolerance: how far both may lie apart.
        same_optimizer: whether the parameters have to go the same way.
    """
    tolerance = tolerance or Tolerance()
    if not expected.steps:
        return ["the script took no optimizer step by itself"]
    if len(seen.steps) != len(expected.steps):
        return [f"{len(seen.steps)} optimizer steps, not {len(expected.steps)}"]
    pairs = list(zip(expected.steps, seen.steps, strict=True))
    found = [
        *_of_steps(pairs, "optimizer", lambda a, b: a.optimizer == b.optimizer, lambda step: step.optimizer),
        *_of_steps(
            pairs,
            "learning rates",
            lambda a, b: _all_close(a.rates, b.rates, tolerance.rate),
            lambda step: step.rates,
        ),
        *_of_samples(pairs),
        *_of_start(expected, seen),
    ]
    if same_optimizer:
        found += _of_steps(
            pairs,
            "loss",
            lambda a, b: _close(a.loss, b.loss, tolerance.loss),
            lambda step: f"{step.loss:.8g}",
        )
        found += _of_way(pairs, tolerance.way)
    if expected.loader_lengths != seen.loader_lengths and not expected.trainer:
        found.append(f"len() of the DataLoaders {seen.loader_lengths}, not {expected.loader_lengths}")
    return found + _of_trainer(expected, seen, tolerance if same_optimizer else None)


def distance(expected: Training, seen: Training) -> float:
    """Return how far the parameters lie apart in the end, against the way that they have gone."""
    return _distance(expected.steps[-1].weights, seen.steps[-1].weights)


def _of_steps(
    pairs: list[tuple[Step, Step]],
    what: str,
    same: Callable[[Step, Step], bool],
    show: Callable[[Step], Any],
) -> list[str]:
    wrong = [
        f"{what} of step {number}: {show(seen)}, not {show(expected)}"
        for number, (expected, seen) in enumerate(pairs, start=1)
        if not same(expected, seen)
    ]
    return _shortened(wrong, what)


def _of_samples(pairs: list[tuple[Step, Step]]) -> list[str]:
    wrong = []
    for number, (expected, seen) in enumerate(pairs, start=1):
        if expected.samples != seen.samples:
            missing, added = expected.samples - seen.samples, seen.samples - expected.samples
            wrong.append(
                f"samples of step {number}: {missing.total()} of {expected.samples.total()} missing, "
                f"{added.total()} others"
            )
    return _shortened(wrong, "samples")


def _of_start(expected: Training, seen: Training) -> list[str]:
    start, other = expected.initial_weights, seen.initial_weights
    if _close(start["squares"], other["squares"], 1e-6):
        return []
    return [f"squares of all weights before training {other['squares']:.8g}, not {start['squares']:.8g}"]


def _of_way(pairs: list[tuple[Step, Step]], tolerance: float) -> list[str]:
    wrong = []
    for number, (expected, seen) in enumerate(pairs, start=1):
        apart = _distance(expected.weights, seen.weights)
        if not apart <= tolerance:
            wrong.append(f"weights after step {number}: {apart:.1e} of their way apart")
    return _shortened(wrong, "weights")


def _distance(expected: dict[str, Any], seen: dict[str, Any]) -> float:
    apart = [a - b for a, b in zip(expected["projections"], seen["projections"], strict=True)]
    mean_square = math.fsum(part * part for part in apart) / len(apart)
    if expected["way"] == 0:
        return 0.0 if mean_square == 0 else math.inf
    return math.sqrt(mean_square) / float(expected["way"])


def _of_trainer(expected: Training, seen: Training, tolerance: Tolerance | None) -> list[str]:
    wanted, told = expected.trainer, seen.trainer
    found = [
        f"Trainer's {name} is {told.get(name)}, not {wanted[name]}"
        for name in ("global_step", "max_steps", "epoch")
        if wanted.get(name) != told.get(name)
    ]
    if tolerance is None or not wanted:
        return found
    # Batches of an evaluation are other ones on another number of ranks, and so are the means over them.
    keys = ("loss", "learning_rate", *(("eval_loss",) if expected.world_size == seen.world_size else ()))
    logs = [
        [(log["step"], key, log[key]) for log in one.get("logs", ()) for key in keys if key in log]
        for one in (wanted, told)
    ]
    if [entry[:2] for entry in logs[0]] != [entry[:2] for entry in logs[1]]:
        return [*found, "Trainer's logs have other entries"]
    wrong = [
        f"Trainer's log of step {step}: {key} {value}, not {right}"
        for (step, key, right), (_, _, value) in zip(*logs, strict=True)
        if not _close(right, value, tolerance.rate if key == "learning_rate" else LOG_TOLERANCE)
    ]
    return found + _shortened(wrong, "logs")


def _shortened(sentences: list[str], what: str) -> list[str]:
    if len(sentences) <= MOST_SHOWN:
        return sentences
    return [*sentences[:MOST_SHOWN], f"{what}: {len(sentences) - MOST_SHOWN} more"]


def _all_close(expected: Iterable[float], seen: Iterable[float], tolerance: float) -> bool:
    left, right = tuple(expected), tuple(seen)
    return len(left) == len(right) and all(_close(a, b, tolerance) for a, b in zip(left, right, strict=True))


def _close(expected: float, seen: float, tolerance: float) -> bool:
    return math.isclose(expected, seen, rel_tol=tolerance, abs_tol=1e-12)
