"""Runs that users reported (`zerofit runs report`): what was predicted, beside what was measured.

Reads every *.json of a folder, also of folders in it. A report may come from anyone: a file that is none is
named and skipped.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from published_steps import errors_of

from zerofit.cli.output.run_comparison import ComparedNumber
from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.foreign_text import printable
from zerofit.core.run_report import LARGEST_REPORT, ReportedModel, RunReport, report_from_json
from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes
from zerofit.core.validation import short_reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEADER = ("report", "GPUs", "model", "strategy", "tensors", "reserved", "step")
_OUT_OF_MEMORY = "gpu-out-of-memory"


def comparisons(report: RunReport) -> dict[str, ComparedNumber]:
    """Return what a report allows to compare; empty without a prediction, or without anything measured.

    A run that was out of memory has no peak: it only says that it needed more.
    """
    predicted, measured = report.predicted, report.measured
    if predicted is None:
        return {}
    ran = report.end is None or report.end.kind != _OUT_OF_MEMORY
    tensors = max((phase.tensors_bytes for phase in predicted.phases), default=0)
    reserved = max((phase.reserved_bytes for phase in predicted.phases), default=0)
    pairs = {
        "tensors": (tensors, measured.allocated_bytes if ran else None, predicted.uncertainty),
        "reserved": (reserved, measured.reserved_bytes if ran else None, predicted.uncertainty),
        "step": (predicted.step_time_s, measured.step_time_s, predicted.step_time_uncertainty or 0.0),
    }
    return {
        name: ComparedNumber(
            name=name, predicted=expected, measured=found, uncertainty=uncertainty, is_time=name == "step"
        )
        for name, (expected, found, uncertainty) in pairs.items()
        if expected and found
    }


def print_reports(folder: Path) -> None:
    """Print each report of a folder, then how far predictions are off."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        try:
            found[path.relative_to(folder)] = report_from_json(
                read_bounded_text(path, most_bytes=LARGEST_REPORT)
            )
        except (OSError, ValueError) as error:
            print(f"{printable(str(path))}: no report of this version: {printable(short_reason(error))}")
    rows = [_HEADER, *(_row(str(path), report) for path, report in found.items())]
    print("\n".join(table_lines(rows, width=None, leaves_out=())))
    print(json.dumps(summary(found.values()), indent=2))


def summary(reports: Any) -> dict[str, Any]:
    """Return the errors of all comparisons by what is compared."""
    found: dict[str, list[tuple[float, bool]]] = {}
    for report in reports:
        for name, number in comparisons(report).items():
            error = number.error or 0.0
            found.setdefault(name, []).append((error, abs(error) <= (number.uncertainty or 0.0)))
    return {
        name: errors_of([error for error, _ in errors], [is_within for _, is_within in errors])
        for name, errors in found.items()
    }


def _row(name: str, report: RunReport) -> tuple[str, ...]:
    gpus = ", ".join(f"{gpu.count} x {gpu.name or format_bytes(gpu.memory_bytes)}" for gpu in report.gpus)
    nodes = report.strategy.num_nodes
    model = report.model
    return (
        printable(name),
        (f"{nodes} x " if nodes > 1 else "") + (gpus or "CPU"),
        "-" if model is None else _model_words(model),
        ", ".join(_strategy_words(report)),
        *_cells(report),
    )


def _model_words(model: ReportedModel) -> str:
    number = (model.num_trained + model.num_frozen) / 1e9
    return f"{model.class_name or 'own class'}, {number:.3g} B"


def _strategy_words(report: RunReport) -> Iterator[str]:
    strategy = report.strategy
    yield f"ZeRO-{strategy.zero_stage.value}" if strategy.zero_stage else strategy.engine.value
    yield f"{strategy.micro_batch_size or '-'} x {strategy.gradient_accumulation_steps or '-'}"
    if strategy.lora_rank is not None:
        yield f"LoRA {strategy.lora_rank}"
    if strategy.quantization is not None:
        yield strategy.quantization.value


def _cells(report: RunReport) -> tuple[str, ...]:
    numbers = comparisons(report)
    return tuple(
        _words(numbers[name]) if name in numbers else "-" for name in ("tensors", "reserved", "step")
    )


def _words(number: ComparedNumber) -> str:
    _, predicted, measured, error = number.cells
    return f"{predicted} of {measured} {error}"
