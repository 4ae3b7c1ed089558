"""The published ladder: its figures stand beside the same runs only, and which peaks are compared."""

from __future__ import annotations

import pytest
from ladders import on_cpu, on_gpu
from measuring.ladder import PUBLISHED_MODEL, Published, published_of
from measuring.results import peak_of

from zerofit.launching.rungs import ON_ONE_RANK, LadderRun, baseline, climb, parse_rungs

_BASE = baseline(batch_size=32, sequence_length=128, attention="eager")


def _runs(text: str) -> list[LadderRun]:
    return [step.run for step in climb(parse_rungs(text), _BASE, is_cumulative=True)]


_DEFAULT = _runs(ON_ONE_RANK)


@pytest.mark.parametrize(
    ("model", "base", "run", "expected"),
    [
        (PUBLISHED_MODEL, _BASE, _DEFAULT[0], Published(memory_g=15.1, epoch_time_s=44.1)),
        (PUBLISHED_MODEL, _BASE, _DEFAULT[5], Published(memory_g=3.4, epoch_time_s=110.0)),
        (PUBLISHED_MODEL, _BASE, _runs("adafactor")[0], None),
        ("bert-large-uncased", _BASE, _DEFAULT[0], None),
        (PUBLISHED_MODEL, baseline(batch_size=16, sequence_length=128, attention="eager"), _DEFAULT[0], None),
        (PUBLISHED_MODEL, baseline(batch_size=32, sequence_length=64, attention="eager"), _DEFAULT[0], None),
    ],
)
def test_published_figures_stand_beside_the_same_run_only(
    model: str, base: LadderRun, run: LadderRun, expected: Published | None
) -> None:
    assert published_of(model, base, run) == expected


def test_rungs_are_compared_by_torchs_peak_on_a_gpu_and_by_the_process_elsewhere() -> None:
    for ladder, field in ((on_cpu(), "process_bytes"), (on_gpu(), "allocated_bytes")):
        measured = ladder.rungs[0].measured
        assert measured is not None
        assert peak_of(measured) == getattr(measured, field)
