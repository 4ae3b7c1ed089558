"""Windows for a loop of one's own: weights that make one batch of a window's batches."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import refusal
from torch.utils.data import DataLoader
from trainer_training import TOKENS
from window_trainings import BATCH_SIZE, KINDS, RATE, SAME, SAMPLES, STEPS, off_from_big_batches

import zerofit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_steps_as_with_the_big_batch(kind: str) -> None:
    make, collate, loss_of = KINDS[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TOKENS["samples"](SAMPLES), batch_size=BATCH_SIZE, collate_fn=collate)
    shifts = kind == "causal language model"
    sizes = []
    for window in zerofit.accumulation_windows(loader, STEPS, shifts_labels=shifts):
        sizes.append(len(window))
        assert sum(weight for _, weight in window) == pytest.approx(1)
        for batch, weight in window:
            (loss_of(model, batch) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sizes == [4, 3]
    assert off_from_big_batches(list(model.parameters()), kind) < SAME


LABELS = torch.tensor([[5, 1, -100], [6, -100, -100]])


@pytest.mark.parametrize(
    ("batches", "arguments", "weights"),
    [
        ([torch.zeros(3, 2), torch.zeros(1, 2)], {}, [0.75, 0.25]),
        ([(torch.zeros(2), torch.zeros(2)), (torch.zeros(6), torch.zeros(6))], {}, [0.25, 0.75]),
        ([{"labels": LABELS}, {"labels": LABELS[:1]}], {}, [0.6, 0.4]),
        ([{"labels": LABELS}, {"labels": LABELS[:1]}], {"shifts_labels": True}, [0.5, 0.5]),
        ([{"labels": LABELS.float()}, {"labels": LABELS[:1].float()}], {}, [2 / 3, 1 / 3]),
        ([{"labels": torch.tensor([1, -100])}, {"labels": torch.tensor([1, 0])}], {}, [1 / 3, 2 / 3]),
        (["a", "bcd"], {"items": len}, [0.25, 0.75]),
        ([{"labels": LABELS[:0]}], {}, [0.0]),
    ],
)
def test_batches_count_by_their_items(
    batches: list[Any], arguments: dict[str, Callable[[Any], float]], weights: list[float]
) -> None:
    ((*window,),) = zerofit.accumulation_windows(batches, 2, **arguments)
    assert [weight for _, weight in window] == pytest.approx(weights)
    assert [batch for batch, _ in window] == batches


@pytest.mark.parametrize(
    ("batches", "steps", "rule"),
    [([torch.zeros(1)], 0, "no-accumulation-steps"), (["text"], 1, "items-not-counted")],
)
def test_what_has_no_weights_is_refused(batches: list[Any], steps: int, rule: str) -> None:
    assert refusal(lambda: list(zerofit.accumulation_windows(batches, steps))).rule == rule


def _on_rank(rank: int, file: str, sizes: list[list[int]], found: Any) -> None:
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(sizes))
    weights: list[Any] = []
    try:
        for window in zerofit.accumulation_windows([torch.zeros(one) for one in sizes[rank]], 2):
            weights.append([weight for _, weight in window])
    except zerofit.UserError as refused:
        weights.append(refused.rule)
    found.put((rank, weights))
    group.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ([[1, 2, 3], [4, 1, 1]], [[[0.25, 0.5], [1.5]], [[1.0, 0.25], [0.5]]]),
        ([[1, 2, 3], [4, 1]], [[[0.25, 0.5], "unlike-windows"], [[1.0, 0.25], "unlike-windows"]]),
    ],
)
def test_ranks_count_together_and_need_as_many_windows(
    sizes: list[list[int]], weights: list[Any], tmp_path: Path
) -> None:
    """DistributedDataParallel averages: a window's weights of two ranks sum to 2."""
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    ranks = [
        context.Process(target=_on_rank, args=(rank, str(tmp_path / "meeting"), sizes, found))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        assert sorted(found.get(timeout=60) for _ in ranks) == list(enumerate(weights))
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
