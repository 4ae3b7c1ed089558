"""Recommendations for distributions of lengths, with the whole reason."""

from __future__ import annotations

import itertools

import pytest

from zerofit.data.bucketing import simulated_buckets
from zerofit.data.lengths import LengthHistogram
from zerofit.data.lengths.advice import Batching
from zerofit.data.lengths.padding import Cost
from zerofit.data.lengths.report import BatchSetup, LengthReport, LengthUnit, MeasuredLengths, length_report


def _report(
    counts: dict[int, int],
    *,
    batch_size: int = 16,
    is_causal: bool = False,
    max_length: int | None = None,
    model_max_length: int | None = None,
) -> LengthReport:
    histogram = LengthHistogram.of(counts)
    measured = MeasuredLengths(
        subject="data.jsonl",
        counted="tokens",
        unit=LengthUnit.TOKENS,
        histogram=histogram,
        model_max_length=model_max_length,
    )
    setup = BatchSetup(batch_size=batch_size, is_causal=is_causal, max_length=max_length)
    return length_report(measured, setup, simulated_buckets(histogram, batch_size))


_RAGGED = dict.fromkeys(range(1, 201), 100)
_TAILED = {**dict.fromkeys(range(20, 120), 100), 5000: 2}
_HALVES = {40: 5000, 300: 5000}


@pytest.mark.parametrize(
    ("counts", "said", "expected"),
    [
        (_RAGGED, {}, (200, "it cuts nothing; the longest sample has 200")),
        (
            _RAGGED,
            {"max_length": 100},
            (100, "as you set it: it cuts 50.0% of the samples and loses 25.1% of the tokens"),
        ),
        (
            _RAGGED,
            {"model_max_length": 128},
            (
                128,
                "the tokenizer says that its model takes no more: it cuts 36.0% of the samples and loses "
                "13.1% of the tokens",
            ),
        ),
        (_RAGGED, {"model_max_length": 512}, (200, "it cuts nothing; the longest sample has 200")),
        (
            _TAILED,
            {},
            (
                128,
                "it cuts 0.02% of the samples and loses 1.4% of the tokens; the longest batch shrinks to "
                "2.6% of 5000 tokens, its attention to 0.07%",
            ),
        ),
        ({0: 5}, {}, (8, "it cuts nothing; the longest sample has 0")),
    ],
)
def test_maximum_length(counts: dict[int, int], said: dict[str, int], expected: tuple[int, str]) -> None:
    choice = _report(counts, **said).choice  # type: ignore[arg-type]
    assert (choice.max_length, choice.length_reason) == expected


@pytest.mark.parametrize(
    ("counts", "said", "expected"),
    [
        ({64: 1000}, {}, Batching.FIXED),
        (_RAGGED, {}, Batching.BUCKETED),
        (_RAGGED, {"batch_size": 1}, Batching.DYNAMIC),
        ({16: 10_000, 24: 900}, {"batch_size": 2}, Batching.DYNAMIC),
        (_HALVES, {"is_causal": True}, Batching.BUCKETED),
        # So few samples that nothing is sorted: buckets hold unlike ones, and packed they fill their rows.
        ({10: 4, 100: 4, 200: 4, 400: 4}, {"is_causal": True}, Batching.PACKED),
        ({10: 4, 100: 4, 200: 4, 400: 4}, {"is_causal": False}, Batching.DYNAMIC),
        ({0: 3}, {}, Batching.DYNAMIC),
    ],
)
def test_padding(counts: dict[int, int], said: dict[str, int], expected: Batching) -> None:
    report = _report(counts, **said)  # type: ignore[arg-type]
    assert report.choice.way is expected
    assert (Batching.PACKED in {row.way for row in report.padding}) is bool(said.get("is_causal"))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({64: 1000}, 8),
        ({200: 50, 300: 50, 400: 50}, 8),
        ({1: 1000, 9: 1000, 3: 1000}, None),
    ],
)
def test_multiple_of_eight(counts: dict[int, int], expected: int | None) -> None:
    assert _report(counts).choice.pad_to_multiple_of == expected


def test_a_reason_names_what_it_weighs() -> None:
    choice = _report(_HALVES).choice
    assert choice.way_reason == (
        "it computes 42.7% less than dynamic padding in random order, and 43.5% less than fixed padding"
    )
    assert choice.multiple_reason == "it speeds up tensor cores in 16 bit, and adds only 1.2% of tokens"


def test_the_rows_of_a_report_hold_together() -> None:
    report = _report(_RAGGED, max_length=128, is_causal=True)
    histogram = report.measured.histogram
    padding = {row.way: row for row in report.padding}
    assert padding[Batching.FIXED].cost.tokens == histogram.num_samples * 128
    assert padding[Batching.PACKED].cost == Cost(
        tokens=report.packed_rows * 128, attention=report.packed_rows * 128**2
    )
    assert padding[Batching.FIXED].waste == pytest.approx(
        1 - histogram.cut_to(128).num_tokens / (20_000 * 128)
    )
    assert padding[Batching.PACKED].waste == pytest.approx(
        1 - histogram.num_tokens / (report.packed_rows * 128)
    )
    assert all(row.cost_at_multiple.tokens >= row.cost.tokens for row in report.padding)
    names = {row.max_length: row.names for row in report.cuts}
    assert names == {
        64: ("2^6",),
        128: ("2^7", "yours"),
        180: ("p90",),
        190: ("p95",),
        192: ("p90 to x64", "p95 to x64"),
        198: ("p99",),
        200: ("longest",),
    }
    cut = {row.max_length: (row.samples_cut, row.tokens_lost) for row in report.cuts}
    assert cut[190] == (1000, 100 * sum(range(1, 11)))
    assert cut[200] == (0, 0)


def test_a_longer_maximum_never_cuts_more_or_costs_less() -> None:
    cuts = _report(_TAILED).cuts
    for shorter, longer in itertools.pairwise(cuts):
        assert shorter.samples_cut >= longer.samples_cut
        assert shorter.tokens_lost >= longer.tokens_lost
        for way in ("fixed", "dynamic", "bucketed"):
            assert getattr(shorter, way).tokens <= getattr(longer, way).tokens
