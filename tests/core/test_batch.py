"""The batch triangle: exactly the global batch, or a message that names the nearest."""

from __future__ import annotations

import itertools

import pytest

from zerofit.core.batch import split_global_batch
from zerofit.core.errors import UserError


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "accumulation", "data_parallel_size", "expected"),
    [
        (64, 4, None, 8, (4, 2)),
        (64, None, 4, 8, (2, 4)),
        (64, None, None, 8, (8, 1)),
        (64, 4, 2, 8, (4, 2)),
        (1, None, None, 1, (1, 1)),
        (6, 1, None, 3, (1, 2)),
        (8, 8, None, 1, (8, 1)),
    ],
)
def test_what_is_missing_follows_from_the_rest(
    global_batch_size: int,
    micro_batch_size: int | None,
    accumulation: int | None,
    data_parallel_size: int,
    expected: tuple[int, int],
) -> None:
    assert expected == split_global_batch(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        data_parallel_size=data_parallel_size,
    )


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "accumulation", "data_parallel_size", "found", "fix"),
    [
        (10, 4, None, 2, "10 with 2 ranks x micro-batch 4 = 8", "8 or 16, or change the other parts"),
        (10, None, 4, 2, "10 with 2 ranks x accumulation 4 = 8", "8 or 16, or change the other parts"),
        (10, None, None, 4, "10 with 4 ranks", "8 or 12, or use 2 ranks"),
        (4, 4, None, 2, "4 with 2 ranks x micro-batch 4 = 8", "8, or change the other parts"),
        (3, None, None, 8, "3 with 8 ranks", "8, or use 3 ranks"),
        (7, None, None, 2, "7 with 2 ranks", "6 or 8, or use 1 rank"),
        (5, 2, None, 1, "5 with 1 rank x micro-batch 2 = 2", "4 or 6, or change the other parts"),
        (
            32,
            4,
            2,
            2,
            "32 with 2 ranks x micro-batch 4 x accumulation 2 = 16",
            "16, or change the other parts",
        ),
        (8, 4, 2, 2, "8 with 2 ranks x micro-batch 4 x accumulation 2 = 16", "16, or change the other parts"),
    ],
)
def test_no_request_is_rounded(
    global_batch_size: int,
    micro_batch_size: int | None,
    accumulation: int | None,
    data_parallel_size: int,
    found: str,
    fix: str,
) -> None:
    with pytest.raises(UserError) as error:
        split_global_batch(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation,
            data_parallel_size=data_parallel_size,
        )
    assert str(error.value) == (
        "error[global-batch-not-divisible]: the global batch can't be made from these parts\n"
        f"  found: --global-batch-size {found}\n"
        "  why:   every rank takes the same whole number of samples, and zerofit never rounds "
        "a global batch\n"
        f"  fix:   set --global-batch-size to {fix}"
    )


def test_a_scripts_own_global_batch_is_named_as_such() -> None:
    with pytest.raises(UserError) as error:
        split_global_batch(
            global_batch_size=16,
            micro_batch_size=4,
            gradient_accumulation_steps=4,
            data_parallel_size=2,
            is_asked=False,
        )
    assert (error.value.found, error.value.fix) == (
        "the script's global batch 16 with 2 ranks x micro-batch 4 x accumulation 4 = 32",
        "give --micro-batch-size and --gradient-accumulation-steps whose product is 8, "
        "or one of the two alone",
    )


def test_the_parts_always_make_the_global_batch_and_keep_what_was_given() -> None:
    sizes = (None, 1, 2, 3, 4)
    for global_batch_size, micro, steps, ranks in itertools.product(range(1, 25), sizes, sizes, range(1, 6)):
        try:
            made = split_global_batch(
                global_batch_size=global_batch_size,
                micro_batch_size=micro,
                gradient_accumulation_steps=steps,
                data_parallel_size=ranks,
            )
        except UserError:
            known = ranks * (micro or 1) * (steps or 1)
            exact = global_batch_size == known if micro and steps else global_batch_size % known == 0
            assert not exact
        else:
            assert made[0] * made[1] * ranks == global_batch_size
            assert (micro or made[0], steps or made[1]) == made
