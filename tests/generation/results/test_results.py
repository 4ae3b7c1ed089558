"""Results of several ranks in one file, also where the ranks are on nodes with disks of their own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerofit.generation.results.results import open_results
from zerofit.ranks.exchange import Ranks


class _ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    __slots__ = ("barrier", "values")

    def __init__(self, rank: int, barrier: threading.Barrier, values: dict[int, Any]) -> None:
        super().__init__(rank=rank, size=barrier.parties)
        object.__setattr__(self, "barrier", barrier)
        object.__setattr__(self, "values", values)

    def share(self, value: Any) -> list[Any]:
        self.barrier.wait()
        self.values[self.rank] = value
        self.barrier.wait()
        return [self.values[rank] for rank in range(self.size)]


def test_nodes_whose_copies_of_the_model_have_other_times_write_one_file(tmp_path: Path) -> None:
    """Each node computes the fingerprint of its own copy."""
    out = tmp_path / "out.jsonl"
    barrier, values = threading.Barrier(2, timeout=20), dict[int, Any]()

    def of_rank(rank: int) -> bool:
        ranks = _ThreadRanks(rank, barrier, values)
        options = SimpleNamespace(out=out, resume=True, fingerprint=f"of node {rank}", describe=None)
        request: Any = SimpleNamespace(prompts=([1], [2]), batch_size=4, options=options)
        with open_results(ranks, request) as results:
            barrier.wait()  # a rank that ends before its first result takes its file away
            return results.has_all([0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(of_rank, range(2))) == [False, False]
