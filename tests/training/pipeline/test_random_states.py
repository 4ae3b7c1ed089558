"""The order of samples is that of the first rank, whose seed a seedable sampler gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from zerofit.training.pipeline.random_states import synchronize_sampler


@pytest.mark.parametrize("has_seed", [False, True])
def test_a_sampler_draws_from_a_generator_of_its_own_unless_accelerate_seeds_it(*, has_seed: bool) -> None:
    torch.manual_seed(5)
    loader: DataLoader[int] = DataLoader(range(64), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    assert synchronize_sampler(loader, has_seed=has_seed) == 5
    assert (loader.sampler.generator is None) is has_seed  # type: ignore[attr-defined]
    orders = []
    for _ in range(2):
        torch.manual_seed(len(orders))
        again: DataLoader[int] = DataLoader(range(64), batch_size=8, shuffle=True)  # type: ignore[arg-type]
        torch.manual_seed(5)
        synchronize_sampler(again, has_seed=False)
        torch.manual_seed(len(orders))  # as ranks do that seed themselves
        orders.append([batch.tolist() for batch in again])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("is_scripts", [False, True], ids=["no generator", "the script's generator"])
def test_each_rank_draws_the_order_of_the_first(monkeypatch: pytest.MonkeyPatch, *, is_scripts: bool) -> None:
    sent: list[Any] = []

    def broadcast(values: list[Any]) -> None:
        if not sent:  # the first rank
            sent.extend(values)
        values[:] = sent

    monkeypatch.setattr("accelerate.utils.broadcast_object_list", broadcast)
    seeds, orders = [], []
    for seed in (5, 6):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if is_scripts else None
        data: Any = range(64)
        loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
        seeds.append(synchronize_sampler(loader, has_seed=False))
        orders.append([number for batch in loader for number in batch.tolist()])
    assert seeds == [5, 5]
    assert orders[0] == orders[1] != list(range(64))


def test_a_generator_of_the_script_goes_on() -> None:
    generator = torch.Generator().manual_seed(3)
    loader: DataLoader[int] = DataLoader(
        range(64),
        batch_size=8,
        shuffle=True,
        generator=generator,  # type: ignore[arg-type]
    )
    before = generator.get_state()
    synchronize_sampler(loader, has_seed=False)
    assert torch.equal(generator.get_state(), before)
