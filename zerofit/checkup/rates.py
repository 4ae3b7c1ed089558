"""A calibration to lines: what this node achieves, and what was not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checkup.line import CheckupLine, ok
from zerofit.rates import Unit

if TYPE_CHECKING:
    from zerofit.rates import Calibration, Rate

_SCALES = {
    Unit.FLOPS_PER_S: (1e12, "TFLOPS"),
    Unit.BYTES_PER_S: (1e9, "GB/s"),
    Unit.ELEMENTS_PER_S: (1e9, "billion parameters/s"),
    Unit.SECONDS: (1e-6, "us"),
    Unit.FRACTION: (1.0, "of the peak"),
}


def calibration_lines(calibration: Calibration) -> tuple[CheckupLine, ...]:
    """Return a line for each rate and one for each thing that was not measured."""
    measured = tuple(
        ok("measured", f"{rate.name}: {format_rate(rate)} ({rate.source})") for rate in calibration.rates
    )
    return (*measured, *(ok("not measured", what) for what in calibration.left_out))


def format_rate(rate: Rate) -> str:
    """Return a rate as a person reads it, such as "21.4 GB/s"."""
    scale, unit = _SCALES[rate.unit]
    return f"{rate.value / scale:.3g} {unit}"
