"""The made logs that other tests use: each storage is born once, dies once at most, gradients never."""

from __future__ import annotations

from hypothesis import given, settings
from made_logs import layered_log, random_logs

from zerofit.core.allocation_log import AllocationLog, Event, TensorKind


@settings(max_examples=25, deadline=None)
@given(log=random_logs())
def test_storages_are_born_and_die_in_order(log: AllocationLog) -> None:
    alive = set()
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.ALLOCATE:
            assert argument not in alive
            alive.add(argument)
        elif code == Event.FREE:
            alive.remove(argument)
        elif code == Event.GRADIENT_READY:
            assert log.gradient_storages[argument] in alive
    assert alive == {storage for storage in log.gradient_storages if storage >= 0}
    assert [storage >= 0 for storage in log.gradient_storages] == [one.trains for one in log.parameters]


def test_checkpointing_keeps_less_and_computes_again() -> None:
    kinds = [set(layered_log(checkpointing=one).storages.kinds) for one in (False, True)]
    assert kinds[1] - kinds[0] == {TensorKind.RECOMPUTED}
