"""A calibration as lines of doctor."""

from __future__ import annotations

import pytest

from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit
from zerofit.machine.doctor import calibration_lines, format_rate


def _rate(value: float, unit: Unit) -> Rate:
    return Rate(name=RateName.HOST_MEMORY, value=value, unit=unit, basis=Basis.MEASURED, source="copy")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (2.14e10, Unit.BYTES_PER_S, "21.4 GB/s"),
        (2.71e14, Unit.FLOPS_PER_S, "271 TFLOPS"),
        (1.5e9, Unit.ELEMENTS_PER_S, "1.5 billion parameters/s"),
        (4e-5, Unit.SECONDS, "40 us"),
        (0.8, Unit.FRACTION, "0.8 of the peak"),
    ],
)
def test_a_rate_in_words(value: float, unit: Unit, expected: str) -> None:
    assert format_rate(_rate(value, unit)) == expected


def test_a_line_for_each_rate_and_for_each_thing_left_out() -> None:
    calibration = Calibration(rates=(_rate(2e10, Unit.BYTES_PER_S),), left_out=("disk: no --nvme-path",))
    assert [(line.topic, line.found) for line in calibration_lines(calibration)] == [
        ("measured", "host memory: 20 GB/s (copy)"),
        ("not measured", "disk: no --nvme-path"),
    ]
