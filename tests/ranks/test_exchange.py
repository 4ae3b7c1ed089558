"""Ranks that wait for one another: a failure is heard at once, whoever else is still at work."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from zerofit.core.errors import UserError
from zerofit.ranks.exchange import Progress, Ranks

if TYPE_CHECKING:
    from torch.distributed import HashStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """One store for three ranks in this process."""
    from torch.distributed import HashStore

    one = HashStore()
    monkeypatch.setattr("zerofit.ranks.exchange.all_ranks_store", lambda: one)
    return one


def _progress(rank: int, limit_s: float) -> Progress:
    return Progress(Ranks(rank=rank, size=3), name="call", limit_s=limit_s)


def test_a_failure_is_heard_while_another_rank_is_at_work(store: HashStore) -> None:
    _progress(1, 60).fail(RuntimeError("of the script"))
    with pytest.raises(UserError) as error:
        _progress(2, 60).wait_for_all()
    assert (error.value.summary, error.value.found) == (
        "rank 1 failed, so the results are incomplete",
        "RuntimeError: of the script",
    )


def test_what_one_rank_decides_counts_for_all(store: HashStore) -> None:
    # It came, and gave the others up: who comes later must not go on alone.
    with pytest.raises(UserError) as error:
        _progress(2, 0.1).wait_for_all()
    assert error.value.rule == "generate-rank-silent"
    _progress(1, 60).fail(RuntimeError("of later"))
    for rank in (0, 1):
        with pytest.raises(UserError) as error:
            _progress(rank, 60).wait_for_all()
        assert error.value.summary == "rank 2 failed, so the results are incomplete"


def test_a_rank_is_given_up_when_none_makes_a_token_any_more(store: HashStore) -> None:
    at_work, waits = _progress(0, 60), _progress(2, 1)
    threading.Timer(0.7, at_work.on_token).start()
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        waits.wait_for_all()
    assert (error.value.rule, error.value.summary[:6]) == ("generate-rank-silent", "rank 0")
    assert time.monotonic() - began > 1.6


def test_nothing_is_left_in_the_store(store: HashStore) -> None:
    ranks = [_progress(rank, 60) for rank in range(3)]
    before = store.num_keys()
    for each in ranks:
        each.on_token()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Progress.wait_for_all, ranks))
    for each in ranks:
        each.end()
    assert store.num_keys() == before
