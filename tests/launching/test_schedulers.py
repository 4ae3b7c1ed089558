"""Learning rates under offload, where accelerate swaps AdamW, are those of the script's own scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow


def test_a_parameter_group_without_parameters_is_no_failure(launch: Callable[..., Run]) -> None:
    # One rank, as a prepared scheduler steps once a rank.
    run = launch("--num-processes", "1", "--preset", "z2-offload", str(SCRIPTS / "empty_group.py")).check()
    rates = [tuple(map(float, line.split())) for line in run.stdout.splitlines() if line.startswith("0.")]
    expected = [0.2, 0.2 / 2, 0.2 / 3]
    assert rates == [pytest.approx((rate, rate)) for rate in expected]
