"""The short table's ladder: what nvidia-smi shows, and epochs, beside the published figures."""

from __future__ import annotations

from gpu_truth.ladder import LADDER
from gpu_truth.results import MachineRecord, Results
from gpu_truth.table import short_table
from kept_cases import measurement

from zerofit.core.facts import Versions
from zerofit.core.units import GIB
from zerofit.measuring.ladder import Ladder, Published, RungResult
from zerofit.measuring.results import TrialOutcome, TrialPrediction, TrialState

VERSIONS = Versions(python="3.12.0", zerofit="0.1.0", torch="2.11.0")
GPU = MachineRecord(
    device="NVIDIA H200",
    memory_bytes=140 * GIB,
    compute_capability=(9, 0),
    driver="580.1",
    num_cpu_cores=2,
    cpu="",
    host_memory_bytes=GIB,
)


def _rung(index: int, *, step_time_s: float, device_used: int | None, published: Published) -> RungResult:
    measured = measurement(
        step_time_s,
        allocated_bytes=10 * GIB,
        reserved_bytes=12 * GIB,
        device_bytes=13 * GIB,
        device_used_bytes=device_used,
        losses=(),
    )
    return RungResult(
        name=LADDER[index].key,
        label=f"rung {index}",
        strategy=LADDER[index].strategy,
        sequence_length=128,
        outcome=TrialOutcome(state=TrialState.DONE, measured=measured),
        predicted=TrialPrediction(parts=None, allocated_bytes=11 * GIB),
        published=published,
    )


def _ladder(*rungs: RungResult) -> Results:
    ladder = Ladder(
        model="chinese-macbert-large",
        architecture="BertForSequenceClassification",
        num_parameters=1,
        batch_size=32,
        sequence_length=128,
        device=GPU.device,
        is_cumulative=True,
        predicted_for=GPU.device,
        versions=VERSIONS,
        rungs=rungs,
    )
    return Results(machine=GPU, versions=VERSIONS, date="2026-01-01T00:00:00+00:00", ladder=ladder)


FIRST = _rung(
    0, step_time_s=0.25, device_used=14 * GIB, published=Published(memory_g=15.1, epoch_time_s=40.0)
)
SECOND = _rung(1, step_time_s=0.5, device_used=None, published=Published(memory_g=7.5, epoch_time_s=120.0))


def _rows(results: Results) -> list[str]:
    _, table = short_table(results).split("\nladder\n")
    return [" ".join(line.split()) for line in table.splitlines()]


def test_device_figure_and_epochs_stand_beside_the_published_ones() -> None:
    head, first, second = _rows(_ladder(FIRST, SECOND))
    assert head == "rung allocated predicted device published G s a step x first published x"
    assert first == "rung 0 10.0 GiB 11.0 GiB 14.0 GiB 15.1 0.25 1.00 1.00"
    assert second == "rung 1 10.0 GiB 11.0 GiB 13.0 GiB 7.5 0.5 2.00 3.00"
