"""A summary of a capture, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.command import Route
from zerofit.core.facts import parameters
from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes
from zerofit.scripts.target import script_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture, CapturedEvaluation


def capture_lines(capture: Capture, *, is_cached: bool = False) -> tuple[str, ...]:
    """Return a line on the model, a line for each further fact, and the notes.

    Args:
        capture: the capture.
        is_cached: whether it is from the cache.
    """
    rows = [("", *pair) for pair in (*_facts(capture), *_costs(capture, is_cached=is_cached))]
    return (_headline(capture), *table_lines(rows), *(f"  note: {note}" for note in capture.notes))


def capture_summary(capture: Capture) -> dict[str, Any]:
    """Return the capture for `zerofit plan --json`; docs/reference/files.md describes its fields."""
    optimizer, lengths = capture.optimizer, capture.lengths
    return {
        "target": list(capture.target),
        "route": capture.route.value,
        "trainer_class": capture.trainer_class or None,
        "stopped_at": capture.stopped_at or None,
        "model": {
            "class": capture.model.class_path,
            "name": capture.model.name,
            "num_parameters": capture.model.facts.num_parameters,
            "num_trainable_parameters": _num_trainable(capture),
            "weight_dtype": capture.model.weight_dtype,
            "adapters": list(capture.model.adapters),
            "gradient_checkpointing": capture.model.checkpoints,
        },
        "optimizer": optimizer.class_path if optimizer is not None else None,
        "num_optimizers": len(capture.optimizers),
        "micro_batch_size": capture.micro_batch_size,
        "gradient_accumulation_steps": capture.gradient_accumulation_steps,
        "accumulates_by_hand": capture.accumulates_by_hand,
        "splits_batches": capture.splits_batches,
        "mixed_precision": capture.mixed_precision,
        "lengths": None
        if lengths is None
        else {
            "num_samples": lengths.num_samples,
            "is_whole": lengths.is_whole,
            "p50": lengths.p50,
            "p90": lengths.p90,
            "p99": lengths.p99,
            "longest": lengths.longest,
        },
        "evaluation": None if capture.evaluation is None else _evaluation(capture.evaluation),
        "notes": list(capture.notes),
        "wall_time_s": capture.wall_time_s,
        "peak_host_bytes": capture.peak_host_bytes,
    }


def _evaluation(captured: CapturedEvaluation) -> dict[str, Any]:
    return {
        "batch_size": captured.batch_size,
        "num_samples": captured.num_samples,
        "longest": None if captured.lengths is None else captured.lengths.longest,
        "keeps_predictions": captured.keeps_predictions,
        "moves_every": captured.moves_every,
        "concatenates": captured.concatenates,
        "takes_batches": captured.takes_batches,
        "is_certain": captured.is_certain,
    }


def class_name(path: str) -> str:
    """Return the class name of a dotted path."""
    return path.rpartition(".")[2]


def _num_trainable(capture: Capture) -> int:
    return sum(module.num_trainable_parameters for module in capture.model.modules)


def _headline(capture: Capture) -> str:
    model = capture.model
    name = class_name(model.class_path)
    of = f" of {model.name}" if model.name and model.name != name else ""
    return f"{script_words(capture.target)} trains {name}{of}, {parameters(model.facts)} parameters"


def _facts(capture: Capture) -> Iterator[tuple[str, str]]:
    yield "loop", _loop(capture)
    yield "weights", _weights(capture)
    yield "optimizer", _optimizer(capture)
    yield "batch on each rank", _batch(capture)
    if capture.lengths is not None:
        lengths = capture.lengths
        of = f"{lengths.num_samples} samples" + (", all there are" if lengths.is_whole else "")
        shares = f"half up to {lengths.p50}, 90% up to {lengths.p90}, longest {lengths.longest}"
        yield "tokens", f"{shares} ({of})"
    if capture.evaluation is not None:
        yield "evaluation", _evaluation_words(capture.evaluation)
    yield "mixed precision", _precision(capture)
    if capture.engine:
        yield "engine", f"{capture.engine}, replaced by the plan's"


def _costs(capture: Capture, *, is_cached: bool) -> Iterator[tuple[str, str]]:
    if not capture.wall_time_s:
        return
    took = f"{capture.wall_time_s:.1f} s"
    if capture.peak_host_bytes:
        took += f", {format_bytes(capture.peak_host_bytes)} of host memory"
    yield ("captured earlier", f"took {took}") if is_cached else ("captured in", took)


def _loop(capture: Capture) -> str:
    where = f", begins at {capture.stopped_at}" if capture.stopped_at else ""
    if capture.route is Route.TRAINER:
        return f"{class_name(capture.trainer_class) or 'Trainer'}{where}"
    return f"its own, with Accelerator{', accumulate()' if capture.accumulates else ''}{where}"


def _evaluation_words(captured: CapturedEvaluation) -> str:
    samples = "samples" if captured.num_samples is None else f"{captured.num_samples} samples"
    words = f"{samples} in batches of {captured.batch_size} on each rank"
    if not captured.keeps_predictions:
        return words
    moved = captured.moves_every
    until = "the end" if moved is None else "each batch's end" if moved == 1 else f"{moved} batches are done"
    return f"{words}, predictions on the GPU until {until}"


def _precision(capture: Capture) -> str:
    if capture.mixed_precision != "no":
        return capture.mixed_precision
    return "no, as it says" if capture.names_precision else "none named"


def _weights(capture: Capture) -> str:
    model = capture.model
    words = [model.weight_dtype]
    trainable, total = _num_trainable(capture), model.facts.num_parameters
    if model.modules and trainable < total:
        words.append(f"{trainable:,} of {total:,} train")
    words += [f"adapters: {', '.join(model.adapters)}"] if model.adapters else []
    words += ["quantized"] if model.is_quantized else []
    words += ["gradient checkpointing"] if model.checkpoints else []
    return ", ".join(words)


def _optimizer(capture: Capture) -> str:
    made = capture.optimizer
    if made is None:
        names = [class_name(optimizer.class_path) for optimizer in capture.optimizers]
        return f"{len(names)}: {', '.join(names)}" if names else "none was seen"
    rates = sorted({group.settings["lr"] for group in made.groups if "lr" in group.settings})
    words = [class_name(made.class_path)]
    words += [f"lr {' and '.join(f'{rate:g}' for rate in rates)}"] if rates else []
    words += [f"{len(made.groups)} parameter groups"] if len(made.groups) > 1 else []
    return ", ".join(words)


def _batch(capture: Capture) -> str:
    if capture.micro_batch_size is None:
        return f"not known, accumulation of {capture.passes_per_step}"
    words = batch_words(capture)
    if capture.rows_per_sample > 1:
        words += f", {capture.rows_per_sample * capture.micro_batch_size} rows at the model"
    return f"{words}, split over all ranks (split_batches)" if capture.splits_batches else words


def batch_words(capture: Capture) -> str:
    """Return the script's batch: "8 x 2", or "8 x 1, stepped every 4" if the loop counts passes itself."""
    words = f"{capture.micro_batch_size} x {capture.gradient_accumulation_steps}"
    by_hand = capture.accumulates_by_hand
    return f"{words}, stepped every {by_hand}" if by_hand else words
