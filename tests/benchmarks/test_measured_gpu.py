"""Measurements on a GPU: recorded predictions are today's, and documents state what the file holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.errors import ALL, Quantity, case_errors, summaries
from gpu_truth.machine import gpu_of
from gpu_truth.predictions import Circumstances, predict
from gpu_truth.results import Results, results_from_json

from zerofit.core.facts import Machine
from zerofit.machine.rates import catalog_rates
from zerofit.planning.estimate.step_time import SHORT_STEPS

_ROOT = Path(__file__).parents[2]
_MEASURED = results_from_json((_ROOT / "benchmarks/measured/nvidia-h200.json").read_text(encoding="utf-8"))
_FEW = frozenset({"vit-base-16x1-fp32-foreach"})
_CASES = {one.case.key: one for one in (*_MEASURED.accuracy, *_MEASURED.ranks) if one.outcome.measured}


def _circumstances(results: Results) -> Circumstances:
    gpu, machine = gpu_of(results.machine), results.machine
    assert gpu
    return Circumstances(
        machine=Machine(
            gpus=(gpu,),
            num_cpu_cores=machine.num_cpu_cores,
            host_memory_bytes=machine.host_memory_bytes,
            host_memory_available_bytes=machine.host_memory_bytes,
        ),
        versions=results.versions,
        rates=catalog_rates(),
    )


@pytest.mark.parametrize(
    "key",
    [
        *sorted(_FEW),
        *(
            pytest.param(key, marks=[pytest.mark.evidence, *([pytest.mark.slow] if number % 3 else [])])
            for number, key in enumerate(sorted(_CASES.keys() - _FEW))
        ),
    ],
)
def test_a_recorded_prediction_is_todays(key: str) -> None:
    recorded = _CASES[key]
    found = predict(recorded.case, _circumstances(_MEASURED)).predicted
    assert found
    assert recorded.predicted
    assert found == replace(recorded.predicted, step_time_s=pytest.approx(recorded.predicted.step_time_s))


def test_the_documents_state_the_errors_of_the_file() -> None:
    found = {one.quantity: one for one in summaries(case_errors(_MEASURED.accuracy)) if one.group == ALL}
    rows = {
        "tensors (torch's peak allocated)": found[Quantity.ALLOCATED],
        "torch's peak reserved": found[Quantity.RESERVED],
        "driver's figure": found[Quantity.DEVICE],
        "step time": found[Quantity.STEP_TIME],
    }
    text = (_ROOT / "docs/measured.md").read_text(encoding="utf-8")
    for name, one in rows.items():
        cells = (f"{value:.1%}".replace("%", " %") for value in (one.median, one.percentile_90, one.worst))
        assert f"| {name} | {' | '.join(cells)} |\n" in text
        assert one.num_cases == 50
    allocated = rows["tensors (torch's peak allocated)"]
    readme = " ".join((_ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"tensors were predicted within {100 * allocated.median:.1f} % in the median and "
        f"{100 * allocated.percentile_90:.1f} % in nine cases of ten; "
        f"the worst was {100 * allocated.worst:.1f} % off"
    ) in readme
    time = rows["step time"]
    assert (
        f"Step times were {100 * time.median:.1f} % off in the median, {100 * time.worst:.1f} % at worst"
    ) in readme


def test_short_steps_state_what_was_measured() -> None:
    longer = [
        one.measured / one.predicted - 1
        for one in case_errors(_MEASURED.accuracy)
        if one.quantity is Quantity.STEP_TIME
    ]
    said = f"took {-100 * min(longer):.0f} % less to {100 * max(longer):.0f} % longer than estimated"
    uncertainty, source = SHORT_STEPS
    assert said in source
    assert all(abs(one) <= uncertainty for one in longer)
