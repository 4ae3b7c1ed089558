"""The control: without zerofit, uneven prompts under ZeRO-3 hang or fail, and the tests' hearts notice it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from runs_of_ranks import HERE, RanksEnd, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.evidence

_LIMIT_S = 60
"""ASSUMPTION: a call that takes a second or two has hung by then, whatever else runs on the machine."""


@pytest.fixture(scope="module", autouse=True)
def _ops(built_ops: None) -> None:
    """Build DeepSpeed's ops first."""


def run_stock(way: str, folder: Path) -> RanksEnd:
    """Run one of stock_ranks.WAYS on 2 ranks."""
    return run_ranks(HERE / "stock_ranks.py", way, world_size=2, folder=folder, limit_s=_LIMIT_S)


def test_calls_in_step_end_so_that_the_others_fail_for_being_out_of_it(tmp_path: Path) -> None:
    end = run_stock("in step", tmp_path)
    assert end.exit_code == 0, end.said
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [[6, 4], [3, 9]]


@pytest.mark.parametrize(
    ("way", "waiting"),
    [
        ("uneven lengths, synced_gpus=False", "prompt 0"),
        ("uneven numbers of prompts, synced_gpus=True", "prompt 1"),
    ],
)
def test_a_rank_waits_for_ever_for_one_that_has_ended(way: str, waiting: str, tmp_path: Path) -> None:
    end = run_stock(way, tmp_path)
    assert end.has_stopped, end.said
    assert end.places == ("end", waiting)
    assert "parameter_offload.py" in end.said  # it waits for the other's part of the weights


def test_a_rank_that_waits_near_its_models_last_position_outgrows_it(tmp_path: Path) -> None:
    end = run_stock("waits near its last position", tmp_path)
    assert end.exit_code != 0
    assert not end.has_stopped
    assert "IndexError: index out of range" in end.said
