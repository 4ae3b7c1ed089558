"""A length report as the JSON of `zerofit data --json`; docs/reference/files.md describes its fields."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from zerofit.data.lengths.report import MULTIPLE, PERCENTILES, LengthUnit

if TYPE_CHECKING:
    from zerofit.data.lengths.padding import Cost
    from zerofit.data.lengths.report import LengthReport

DATA_JSON_VERSION = 1
"""Raised whenever a field changes its meaning or is removed."""


def data_json(report: LengthReport) -> str:
    """Return the document."""
    measured, histogram = report.measured, report.measured.histogram
    document = {
        "version": DATA_JSON_VERSION,
        "source": measured.subject,
        "counted": measured.counted,
        "unit": measured.unit.value,
        "is_whole": measured.is_whole,
        "model_max_length": measured.model_max_length,
        "notes": list(measured.notes),
        "num_samples": histogram.num_samples,
        "num_tokens": histogram.num_tokens,
        "shortest": histogram.shortest,
        "mean": histogram.num_tokens / histogram.num_samples,
        **{f"p{share}": histogram.percentile(share) for share in PERCENTILES},
        "longest": histogram.longest,
        "batch_size": report.setup.batch_size,
        "is_causal": report.setup.is_causal,
        "padding_max_length": report.choice.max_length,
        "padding": [
            {
                "way": row.way.value,
                **_cost(row.cost),
                "padding_share": row.waste,
                f"at_multiple_of_{MULTIPLE}": _cost(row.cost_at_multiple),
            }
            for row in report.padding
        ],
        "packing": {
            "row_length": report.choice.max_length,
            "rows": report.packed_rows,
            "rows_split_anywhere": report.concatenated_rows,
        },
        "bucketing": {
            "samples_simulated": report.buckets.padded.num_samples,
            "seed": report.buckets.seed,
        },
        "max_lengths": [
            {
                "max_length": row.max_length,
                "names": list(row.names),
                "samples_cut": row.samples_cut,
                "tokens_lost": row.tokens_lost,
                "fixed": _cost(row.fixed),
                "dynamic": _cost(row.dynamic),
                "bucketed": _cost(row.bucketed),
            }
            for row in report.cuts
        ],
        "recommendation": dataclasses.asdict(report.choice) if measured.unit is LengthUnit.TOKENS else None,
        "histogram": [list(pair) for pair in histogram.counts],
    }
    return _compact_pairs(document)


def _cost(cost: Cost) -> dict[str, Any]:
    return {"tokens": round(cost.tokens), "attention_pairs": round(cost.attention)}


def _compact_pairs(document: dict[str, Any]) -> str:
    """Return the document as text, with the pairs of the histogram on one line."""
    pairs = json.dumps(document.pop("histogram"))
    text = json.dumps(document, indent=2)
    return f'{text.removesuffix("}").rstrip()},\n  "histogram": {pairs}\n}}'
