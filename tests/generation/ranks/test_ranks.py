"""Ranks that wait for one another: a failure is heard at once, whoever else is still at work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zerofit.core.errors import UserError
from zerofit.generation.ranks.ranks import Progress, Ranks

if TYPE_CHECKING:
    from torch.distributed import HashStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """One store for three ranks in this process."""
    from torch.distributed import HashStore

    one = HashStore()
    monkeypatch.setattr("zerofit.generation.ranks.ranks.all_ranks_store", lambda: one)
    return one


def _progress(rank: int, limit_s: float) -> Progress:
    return Progress(Ranks(rank=rank, size=3), name="call", limit_s=limit_s)


def test_a_failure_is_heard_while_another_rank_is_at_work(store: HashStore) -> None:
    _progress(1, 60).fail(RuntimeError("of the script"))
    with pytest.raises(UserError) as error:
        _progress(2, 60).wait_for_all("done")
    assert (error.value.summary, error.value.found) == (
        "rank 1 failed, so that the results are not complete",
        "RuntimeError: of the script",
    )


def test_what_one_rank_decides_counts_for_all(store: HashStore) -> None:
    # It came, and gave the others up: who comes later must not go on alone.
    with pytest.raises(UserError) as error:
        _progress(2, 0.1).wait_for_all("done")
    assert error.value.rule == "generate-rank-silent"
    _progress(1, 60).fail(RuntimeError("of later"))
    for rank in (0, 1):
        with pytest.raises(UserError) as error:
            _progress(rank, 60).wait_for_all("done")
        assert error.value.summary == "rank 2 failed, so that the results are not complete"


def test_a_silent_rank_is_given_up_while_another_is_at_work(store: HashStore) -> None:
    class AtWork(Progress):
        def _last_said(self, rank: int) -> bytes:
            self.looks = getattr(self, "looks", 0) + 1
            return str(self.looks).encode() if rank == 0 else b""

    with pytest.raises(UserError) as error:
        AtWork(Ranks(rank=2, size=3), name="call", limit_s=0.2).wait_for_all("done")
    assert (error.value.rule, error.value.summary[:6]) == ("generate-rank-silent", "rank 1")


def test_nothing_is_left_in_the_store(store: HashStore) -> None:
    ranks = [_progress(rank, 60) for rank in range(3)]
    before = store.num_keys()
    for each in ranks:
        each.go_on()
        store.set(each._key("done", 2), "1") if each is ranks[2] else store.set(each._key("done", 0), "1")
    store.set(ranks[0]._key("done", 1), "1")
    ranks[2].wait_for_all("done")
    for each in ranks:
        each.end("done")
    assert store.num_keys() == before
