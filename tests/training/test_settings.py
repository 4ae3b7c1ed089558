"""What the settings of a plan say of batches: which are split, and which accumulation is the script's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from accelerators import settings
from captures import LOOP

from zerofit.core.plan import Origin, Reason


@pytest.mark.parametrize(
    ("m", "origin", "rows"),
    [(8, Origin.PLANNER, None), (8, Origin.FLAG, 16), (4, Origin.PLANNER, 8), (None, Origin.PLANNER, None)],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_the_plan_leaves_whole_is_not_split_and_rows_are_not_samples(
    num_ranks: int, m: int | None, origin: Origin, rows: int | None
) -> None:
    """A batch of 8 samples is one of 16 rows at the model, where a collator makes pairs."""
    wanted = settings(micro_batch_size=m)
    pairs = replace(LOOP, micro_batch_size=8, gradient_accumulation_steps=1, rows_per_sample=2)
    chosen = (Reason(field="micro_batch_size", value="", origin=origin, why=""),)
    ranks = replace(wanted.plan.topology, world_size=num_ranks)
    plan = replace(wanted.plan, capture=pairs, reasons=chosen, topology=ranks)
    assert replace(wanted, plan=plan).most_rows == rows


@pytest.mark.parametrize(
    ("m", "accumulation", "forced"), [(None, None, None), (None, 4, 4), (2, 4, None), (2, None, None)]
)
def test_accumulation_beside_a_micro_batch_counts_pieces(
    m: int | None, accumulation: int | None, forced: int | None
) -> None:
    plan = settings(micro_batch_size=m, gradient_accumulation_steps=accumulation)
    assert plan.forced_accumulation == forced
