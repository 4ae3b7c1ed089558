"""The comparison of two trainings finds each way in which they can differ."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from records import differences, read_training

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def weights(*, way: float, projection: float) -> dict[str, Any]:
    return {"sum": 1.0, "squares": 4.0, "way": way, "projections": [projection, -projection]}


def step(number: int, rank: int) -> dict[str, Any]:
    return {
        "optimizer": 0,
        "rates": [0.1 * number, 0.1 * number],
        "samples": [f"step {number}, rank {rank}, first", f"step {number}, rank {rank}, second"],
        "losses": [2.0 / number, 1.0 / number],
        "weights": weights(way=number, projection=number),
    }


def record(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": 2,
        "is_sharded": False,
        "zero_stage": None,
        "optimizers": ["AdamW"],
        "loader_lengths": [8],
        "initial_weights": weights(way=0, projection=0),
        "steps": [step(number, rank) for number in (1, 2, 3)],
        "samples_without_step": [],
        "trainer": {},
    }


def write(folder: Path, ranks: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for rank in ranks:
        (folder / f"rank{rank['rank']}.json").write_text(json.dumps(rank))
    return folder


def swap_between_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["steps"][1]["samples"] for rank in ranks)
    first[0], second[0] = second[0], first[0]


def swap_between_steps(ranks: list[dict[str, Any]]) -> None:
    first, second = (ranks[0]["steps"][number]["samples"] for number in (0, 1))
    first[0], second[0] = second[0], first[0]


def regroup_losses(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["steps"][0]["losses"] = [1.5, 0.75, 0.75]


def lose_a_step(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rank["steps"].pop()


def set_in_step(key: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    def act(ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            rank["steps"][1][key] = value

    return act


def set_in_record(key: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda ranks: [rank.update({key: value}) for rank in ranks] and None


CASES = [
    pytest.param(lambda ranks: None, [], id="the same"),
    pytest.param(swap_between_ranks, [], id="a sample on another rank of the same step"),
    pytest.param(regroup_losses, [], id="other micro-batches of the same step"),
    pytest.param(lose_a_step, ["2 optimizer steps, not 3"], id="a step less"),
    pytest.param(
        swap_between_steps,
        [
            "samples of step 1: 1 of 4 missing, 1 others",
            "samples of step 2: 1 of 4 missing, 1 others",
        ],
        id="a sample in another step",
    ),
    pytest.param(
        set_in_step("rates", [0.2, 0.3]),
        ["learning rates of step 2: (0.2, 0.3), not (0.2,)"],
        id="another learning rate",
    ),
    pytest.param(
        set_in_step("losses", [1.0, 0.5001]), ["loss of step 2: 1.5001, not 1.5"], id="another loss"
    ),
    pytest.param(
        set_in_step("weights", weights(way=2, projection=2.1)),
        ["weights after step 2: 5.0e-02 of their way apart"],
        id="another gradient",
    ),
    pytest.param(
        set_in_record("initial_weights", {**weights(way=0, projection=0), "squares": 4.1}),
        ["squares of all weights before training 4.1, not 4"],
        id="another start",
    ),
    pytest.param(
        set_in_record("loader_lengths", [16]),
        ["len() of the DataLoaders (16,), not (8,)"],
        id="another number of batches",
    ),
]


@pytest.mark.parametrize(("change", "expected"), CASES)
def test_each_difference_is_named(
    change: Callable[[list[dict[str, Any]]], None], expected: list[str], tmp_path: Path
) -> None:
    ranks = [record(0), record(1)]
    changed = copy.deepcopy(ranks)
    change(changed)
    one, other = write(tmp_path / "one", ranks), write(tmp_path / "other", changed)
    assert differences(read_training(one), read_training(other)) == expected


def test_a_rank_without_a_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records of 1 ranks"):
        read_training(write(tmp_path / "one", [record(0)]))


def test_ranks_with_different_numbers_of_steps_are_an_error(tmp_path: Path) -> None:
    ranks = [record(0), record(1)]
    ranks[1]["steps"].pop()
    with pytest.raises(ValueError, match=r"the ranks took \[3, 2\] steps"):
        read_training(write(tmp_path / "one", ranks))
