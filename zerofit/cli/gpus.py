"""zerofit gpus: the GPUs that --gpus knows by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.output.console import echo, terminal_width
from zerofit.cli.parameters import CONTEXT, Verb
from zerofit.cli.shared_options import json_option
from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes
from zerofit.machine.gpu_catalog import load_gpus

if TYPE_CHECKING:
    from zerofit.machine.gpu_catalog import CatalogGpu

_HEADER = ("name", "usable memory", "GB/s", "bf16 TFLOPS", "fp32 TFLOPS", "also called")
_LESS_IMPORTANT = (4, 2, 3, 5)
"""Columns that narrow terminals leave out, the first one first."""


@click.command(cls=Verb, context_settings=CONTEXT)
@json_option
def gpus(*, as_json: bool) -> None:
    """List the GPUs that --gpus knows by name, as in --gpus 8xA100-80G.

    Other GPUs are named by their memory alone, as in --gpus 4x24G.
    """
    known = load_gpus()
    if as_json:
        echo(json.dumps([_fields(gpu) for gpu in known], indent=2))
    else:
        rows = [_HEADER, *map(_row, known)]
        echo("\n".join(table_lines(rows, width=terminal_width(), leaves_out=_LESS_IMPORTANT)))


def _fields(gpu: CatalogGpu) -> dict[str, Any]:
    spec = gpu.spec
    return {
        "name": gpu.name,
        "aliases": list(gpu.aliases),
        "driver_names": list(gpu.driver_names),
        "memory_bytes": spec.memory_bytes,
        "usable_bytes": spec.usable_bytes,
        "memory_bytes_per_s": spec.memory_bytes_per_s,
        "fp32_flops_per_s": spec.fp32_flops_per_s,
        "bf16_flops_per_s": spec.bf16_flops_per_s,
        "compute_capability": spec.compute_capability,
        "sources": list(gpu.sources),
    }


def _row(gpu: CatalogGpu) -> tuple[str, ...]:
    spec = gpu.spec
    return (
        gpu.name,
        format_bytes(spec.usable_bytes),
        _rate(spec.memory_bytes_per_s, 1e9),
        _rate(spec.bf16_flops_per_s, 1e12),
        _rate(spec.fp32_flops_per_s, 1e12),
        ", ".join(gpu.aliases),
    )


def _rate(number: float | None, unit: float) -> str:
    return "-" if number is None else f"{number / unit:.4g}"
