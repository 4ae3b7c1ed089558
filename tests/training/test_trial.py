"""A trial's clock: each step is noted, and after the last one the rank leaves."""

from __future__ import annotations

from zerofit.core.plan import TrialSteps
from zerofit.training import trial


def test_a_rank_leaves_after_the_last_step_and_not_before() -> None:
    left: list[int] = []
    clock = trial._Clock(
        TrialSteps(num_warm_up=1, num_timed=2, guard="guard"), lambda: left.append(len(clock._done_at))
    )
    for _ in range(2):
        clock.note_step()
        assert left == []
    clock.note_step()
    assert left == [3]
    assert clock._done_at == sorted(clock._done_at)
