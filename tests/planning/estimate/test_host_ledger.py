"""HostLedger: pinned blocks in powers of two, kept when they are let go; pageable ones as asked for."""

from __future__ import annotations

from collections import Counter

import pytest

from zerofit.core.estimates import Holder, RunPhase
from zerofit.planning.estimate.host_memory import CHECKPOINT, ROUNDING, HostLedger


def _total(ledger: HostLedger, phase: RunPhase = RunPhase.LOAD) -> int:
    return sum(ledger.largest[phase].values())


@pytest.mark.parametrize(
    ("num_bytes", "is_pinned", "held"),
    [(1000, False, 1000), (1000, True, 1024), (1024, True, 1024), (1025, True, 2048), (0, True, 0)],
)
def test_what_one_block_takes(num_bytes: int, is_pinned: bool, held: int) -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.take(num_bytes, "weights", is_pinned=is_pinned)
    assert _total(ledger) == held


def test_a_pinned_block_that_is_let_go_serves_the_next_of_its_size() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.drop(ledger.take(1000, "a", is_pinned=True))
    ledger.take(600, "b", is_pinned=True)
    ledger.begin(RunPhase.STEP)
    assert ledger.largest[RunPhase.STEP] == {
        ("a", Holder.PINNED): 0,
        ("b", Holder.PINNED): 600,
        (ROUNDING, Holder.PINNED): 424,
    }


def test_a_pinned_block_of_another_size_is_new_memory() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.drop(ledger.take(1000, "a", is_pinned=True))
    ledger.take(2000, "b", is_pinned=True)
    assert _total(ledger) == 1024 + 2048


def test_pinning_holds_both_copies_for_a_moment() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.LOAD)
    ledger.pin(1024, "a", pins=True)
    ledger.begin(RunPhase.STEP)
    assert (_total(ledger), _total(ledger, RunPhase.STEP)) == (2048, 1024)


def test_a_phase_that_comes_twice_keeps_its_larger_moment() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.FORWARD)
    block = ledger.take(10, "a")
    ledger.begin(RunPhase.STEP)
    ledger.drop(block)
    ledger.begin(RunPhase.FORWARD)
    assert _total(ledger, RunPhase.FORWARD) == 10


def test_pages_of_mapped_files_do_not_decide_the_largest_moment() -> None:
    ledger = HostLedger()
    ledger.begin(RunPhase.INITIALISE)
    ledger.drop(ledger.take(5000, CHECKPOINT))
    ledger.take(1000, "cast weights")
    assert +Counter(ledger.largest[RunPhase.INITIALISE]) == {("cast weights", Holder.PAGEABLE): 1000}
