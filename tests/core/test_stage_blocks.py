"""The blocks of a model among the stages of a pipeline."""

from __future__ import annotations

from itertools import product

import pytest

from zerofit.core.stage_blocks import fill_stages


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 2.5])
@pytest.mark.parametrize("most", [(), (2, 9, 9), (9, 1, 9), (2, 2, 4), (9, 9, 1)])
def test_no_other_sharing_has_a_faster_slowest_stage(head: float, most: tuple[int, ...]) -> None:
    others = [
        blocks
        for blocks in product(range(1, 9), repeat=3)
        if sum(blocks) == 8 and all(one <= limit for one, limit in zip(blocks, most or blocks, strict=True))
    ]

    def slowest(blocks: tuple[int, ...]) -> float:
        return max(*blocks[:2], blocks[2] + head)

    found = fill_stages(8, 3, head=head, most=most)
    assert found in others
    assert slowest(found) == min(map(slowest, others))


def test_stages_that_can_not_hold_all_blocks_are_none() -> None:
    assert fill_stages(8, 3, head=0, most=(2, 2, 3)) == ()
    assert fill_stages(8, 3, head=0, most=(0, 9, 9)) == ()


def test_of_equal_stages_the_later_one_has_more() -> None:
    assert fill_stages(7, 2, head=0) == (3, 4)
