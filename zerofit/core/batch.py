"""The batch triangle: global batch = micro-batch x accumulation x data-parallel ranks, never rounded."""

from __future__ import annotations

from zerofit.core.errors import UserError


def split_global_batch(
    *,
    global_batch_size: int,
    micro_batch_size: int | None,
    gradient_accumulation_steps: int | None,
    data_parallel_size: int,
    is_asked: bool = True,
) -> tuple[int, int]:
    """Return (micro_batch_size, gradient_accumulation_steps) that give exactly the global batch.

    If one of the two is None, it follows from the other; if both are, there is no accumulation.

    Args:
        is_asked: False if the global batch is a script's own, which no flag sets.

    Raises:
        UserError: no integers do; the message names the nearest global batches that are possible.
    """
    known = data_parallel_size * (micro_batch_size or 1) * (gradient_accumulation_steps or 1)
    quotient, remainder = divmod(global_batch_size, known)
    both_given = micro_batch_size is not None and gradient_accumulation_steps is not None
    if remainder or quotient == 0 or (both_given and quotient != 1):
        raise _not_divisible(
            global_batch_size,
            micro_batch_size,
            gradient_accumulation_steps,
            data_parallel_size,
            is_asked=is_asked,
        )
    if micro_batch_size is None:
        return quotient, gradient_accumulation_steps or 1
    return micro_batch_size, gradient_accumulation_steps or quotient


def _not_divisible(
    global_batch_size: int,
    micro_batch_size: int | None,
    gradient_accumulation_steps: int | None,
    data_parallel_size: int,
    *,
    is_asked: bool,
) -> UserError:
    factors = [(_ranks(data_parallel_size), data_parallel_size)]
    if micro_batch_size is not None:
        factors.append((f"micro-batch {micro_batch_size}", micro_batch_size))
    if gradient_accumulation_steps is not None:
        factors.append((f"accumulation {gradient_accumulation_steps}", gradient_accumulation_steps))
    product = 1
    for _, factor in factors:
        product *= factor
    if micro_batch_size is not None and gradient_accumulation_steps is not None:
        choices = [product]
    else:
        below = global_batch_size // product * product
        choices = [size for size in (below, below + product) if size > 0]
    parts = " x ".join(text for text, _ in factors)
    fewer = max(ranks for ranks in range(1, data_parallel_size + 1) if global_batch_size % ranks == 0)
    others = _ranks(fewer) if len(factors) == 1 else None
    fix = f"set --global-batch-size to {' or '.join(map(str, choices))}, "
    fix += f"or use {others}" if others else "or change the other parts"
    whose = "--global-batch-size" if is_asked else "the script's global batch"
    if not is_asked:
        fix = "give --micro-batch-size and --gradient-accumulation-steps whose product is "
        fix += f"{global_batch_size // data_parallel_size}, or one of the two alone"
    return UserError(
        "global-batch-not-divisible",
        "the global batch can't be made from these parts",
        found=f"{whose} {global_batch_size} with {parts}" + (f" = {product}" if len(factors) > 1 else ""),
        why="every rank takes the same whole number of samples, and zerofit never rounds a global batch",
        fix=fix,
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
