"""Each rank reads its own shard of the data, and all of them together read everything once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("preset", ["z2", "z3"])
@pytest.mark.parametrize("route", ["accelerate", "trainer"])
def test_each_rank_reads_its_own_shard(route: str, preset: str, launch: Callable[..., Run]) -> None:
    run = launch("--num-processes", "2", "--preset", preset, str(SCRIPTS / "shards.py"), route).check()
    first, second = (json.loads((run.folder / f"read{rank}of2.json").read_text()) for rank in (0, 1))
    assert len(first) == len(second) == 16
    assert sorted(first + second) == list(range(32))
