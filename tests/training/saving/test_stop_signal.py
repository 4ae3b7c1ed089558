"""When ranks ask each other whether one was told to stop: about once a second, at the same steps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from zerofit.training.saving import stop_signal

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_ranks_ask_after_as_many_steps_as_a_second_takes(tmp_path: Path) -> None:
    stop = stop_signal._Stop(tmp_path)
    stop.asked_at = time.monotonic() - 0.1
    assert stop.agrees(1) is False
    assert stop.next_step == 2  # how long a step takes is not known yet
    stop.asked_at = time.monotonic() - 0.1
    assert stop.agrees(2) is False
    assert 3 <= stop.next_step <= 12  # a step in a tenth of a second, or longer on a busy machine
    asked = stop.next_step
    stop.receive()
    assert stop.agrees(asked - 1) is False
    assert stop.next_step == asked
    assert stop.agrees(asked) is True
    assert stop.is_agreed


def test_steps_that_take_no_time_on_a_coarse_clock_are_a_thousand_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(monotonic=lambda: 5.0))
    stop = stop_signal._Stop(tmp_path)
    for step in (1, 2):
        assert stop.agrees(step) is False
    assert stop.next_step == 1002
