"""The plan's micro-batch, accumulation and global batch against the script's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from accelerators import settings
from refusals import refusal
from torch.utils.data import DataLoader

from zerofit.core.plan import Origin, Reason
from zerofit.training.setup.batch_size import batch_sizes, check_batch


def check(b: int | None, a: int, n: int, wanted: dict[str, int | None]) -> None:
    names = {"m": "micro_batch_size", "A": "gradient_accumulation_steps", "G": "global_batch_size"}
    plan = settings(**{names[key]: value for key, value in wanted.items()})
    check_batch(plan, batch_size=b, accumulation=a, num_ranks=n)


@pytest.mark.parametrize(
    ("b", "a", "n", "wanted"),
    [
        (8, 1, 2, {}),
        (8, 1, 2, {"m": 3}),
        (8, 1, 2, {"m": 8}),
        (8, 4, 2, {"A": 4}),  # a number that Accelerator() was given by then
        (8, 1, 2, {"m": 2, "A": 4}),
        (8, 1, 2, {"m": 3, "A": 3}),  # pieces of 3, 3 and 2
        (8, 2, 2, {"m": 4, "A": 4}),
        (8, 2, 2, {"m": 3, "A": 6}),
        (5, 2, 2, {"m": 2, "A": 5}),  # five whole ones, of which a pass makes 2, 2 and 1
        (8, 2, 2, {"G": 32}),
        (8, 1, 2, {"G": 16, "m": 2, "A": 4}),
        (8, 4, 2, {"G": 64, "A": 4}),
        (None, 1, 2, {"G": 16, "m": 64, "A": 4}),  # a loader that tells no size
    ],
)
def test_numbers_that_keep_the_scripts_step(b: int, a: int, n: int, wanted: dict[str, int]) -> None:
    check(b, a, n, wanted)


@pytest.mark.parametrize(
    ("b", "a", "n", "wanted", "rule", "found", "fix"),
    [
        (
            4,
            1,
            1,
            {"m": 8},
            "micro-batch-too-large",
            "4 samples on each rank, and micro-batches of 8 in the plan",
            "plan again with the script as it is now, or give the script a larger batch size",
        ),
        (
            4,
            2,
            1,
            {"m": 2, "A": 2},
            "accumulation-differs-from-script",
            "micro-batches of 2, accumulated 2 times, and 4 x 2 samples on each rank in a step of the script",
            "give --micro-batch-size and --gradient-accumulation-steps whose product is 8, or "
            "--micro-batch-size alone",
        ),
        (
            4,
            1,
            2,
            {"G": 16},
            "global-batch-differs",
            "global batch 16, and 4 samples on each of 2 ranks in the script, which makes 8",
            "take a global batch of 8, or a batch size of 8 in the script, or an accumulation of 2 in the "
            "script",
        ),
        (
            4,
            2,
            1,
            {"G": 6, "m": 2},
            "global-batch-differs",
            "global batch 6, and 4 x 2 samples on each of 1 rank in the script, which makes 8",
            "take a global batch of 8, or a batch size of 3 in the script",
        ),
    ],
)
def test_numbers_that_would_change_it_are_refused(
    b: int, a: int, n: int, wanted: dict[str, Any], rule: str, found: str, fix: str
) -> None:
    refused = refusal(check, b, a, n, wanted)
    assert (refused.rule, refused.found, refused.fix) == (rule, found, fix)


def test_a_flag_is_named_where_it_was_typed() -> None:
    chosen = settings(micro_batch_size=8)
    typed = Reason(field="micro_batch_size", value="8", origin=Origin.FLAG, why="")
    chosen = replace(chosen, plan=replace(chosen.plan, reasons=(typed,)))
    refused = refusal(check_batch, chosen, batch_size=4, accumulation=1, num_ranks=1)
    assert refused.found == "4 samples on each rank, and --micro-batch-size 8"
    assert refused.fix == "set --micro-batch-size to 4 or less, or give the script a larger batch size"


@pytest.mark.parametrize(("splits", "sizes"), [(True, [4, 1]), (False, [8, 1])])
def test_a_batch_that_accelerate_splits_over_the_ranks_counts_by_the_part_of_one(
    splits: bool, sizes: list[int]
) -> None:
    own = SimpleNamespace(split_batches=splits, num_processes=2)
    loaders = (DataLoader(range(16), batch_size=8), DataLoader(range(16), batch_size=1), None)
    assert batch_sizes(own, loaders, settings(), shuffled=False) == sizes
