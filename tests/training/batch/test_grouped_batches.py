"""The hook of --group-by-length, for loops and a Trainer: what it groups, what stays, and what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import hooked, quiet, settings
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from trainer_training import causal_model, planned_trainer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from zerofit.training.batch import grouped_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zerofit.training.changes import Changes


LENGTHS = torch.randint(1, 50, (61,), generator=torch.Generator().manual_seed(0)).tolist()
DATA = [{"input_ids": [number] * length} for number, length in enumerate(LENGTHS)]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def collate(samples: list[dict[str, list[int]]]) -> torch.Tensor:
    return torch.tensor([sample["input_ids"][0] for sample in samples])


def grouping(**wanted: Any) -> tuple[Any, Changes]:
    """Return an Accelerator under the hook, and its list of changes."""
    accelerator_class, changes = hooked(group_by_length=True, **wanted)
    return accelerator_class(cpu=True), changes


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_everything_but_the_order_of_samples_stays() -> None:
    generator = torch.Generator().manual_seed(3)
    script = DataLoader(
        DATA,
        batch_size=4,
        shuffle=True,
        collate_fn=collate,
        drop_last=True,
        generator=generator,
        num_workers=0,
    )
    accelerator, changes = grouping()
    prepared = accelerator.prepare(script)
    assert len(prepared) == len(script) == 15
    assert (prepared.collate_fn, prepared.generator, prepared.dataset) == (collate, generator, DATA)
    assert (prepared.total_batch_size, prepared._drop_last) == (4, True)
    assert isinstance(script.batch_sampler, BatchSampler)
    epochs = [numbers(prepared) for _ in range(2)]
    assert [len({one for batch in epoch for one in batch}) for epoch in epochs] == [60, 60]
    assert epochs[0] != epochs[1]
    spread = [max(LENGTHS[one] for one in batch) - min(LENGTHS[one] for one in batch) for batch in epochs[0]]
    assert sum(spread) / len(spread) < 20  # of 49
    assert changes.lines == ("batches are made of samples of like length, in a new order in each epoch",)


def test_the_last_batch_is_as_small_as_it_was() -> None:
    loader = grouping()[0].prepare(DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=collate))
    firsts = [next(iter(loader)).tolist() for _ in range(3)]
    assert firsts[0] != firsts[1] != firsts[2]  # nor is an epoch that the script leaves early read again
    found = numbers(loader)
    assert [len(batch) for batch in found] == [4] * 15 + [1]
    assert sorted(one for batch in found for one in batch) == list(range(61))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_follows_from_the_scripts_seed(seed: int) -> None:
    def order() -> list[list[int]]:
        torch.manual_seed(seed)
        loader = grouping()[0].prepare(DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=collate))
        torch.rand(3)
        return numbers(loader)

    first = order()
    assert first == order()
    seed += 1
    assert first != order()


class Same(list):
    lengths = [5] * 8


_LEFT = [
    (lambda: DataLoader(Stream(), batch_size=4), "its samples come as a stream"),
    (
        lambda: DataLoader(DATA, batch_size=4),
        "it does not shuffle: the order of its samples is the script's (SequentialSampler)",
    ),
    (
        lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]),
        "its batches are the script's own (list)",
    ),
    (
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True)),
        "it does not read every sample once in an epoch",
    ),
    (
        lambda: DataLoader(DATA, batch_size=4, sampler=LengthGroupedSampler(4, lengths=LENGTHS)),
        "the order of its samples comes from a sampler of its own (LengthGroupedSampler)",
    ),
    (lambda: DataLoader(DATA, shuffle=True), "batches of one sample have no padding"),
    (
        lambda: DataLoader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=2, shuffle=True),
        "neither a column input_ids or length nor a field lengths gives the length of its samples",
    ),
    (lambda: DataLoader(Same(range(8)), batch_size=2, shuffle=True), "all of its samples have 5 tokens"),
]


@pytest.mark.parametrize(("make", "why"), _LEFT, ids=[why[:30] for _, why in _LEFT])
def test_what_can_not_be_grouped_is_left_and_told_at_the_first_step(
    make: Callable[[], DataLoader], why: str
) -> None:
    accelerator, changes = grouping()
    loader = make()
    prepared = accelerator.prepare(loader)
    assert (
        prepared.batch_sampler is loader.batch_sampler
        or loader.batch_sampler is None
        or (type(prepared.batch_sampler) is type(loader.batch_sampler))
    )
    assert changes.lines == ()
    accelerator.backward(torch.ones(1, requires_grad=True).sum())
    assert changes.lines == (f"batches are not grouped by length: a DataLoader is left as it is, as {why}",)


def test_of_a_loader_for_evaluation_beside_it_nothing_is_said() -> None:
    accelerator, changes = grouping()
    loaders = accelerator.prepare(
        DataLoader(DATA, batch_size=4, collate_fn=collate),
        DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=collate),
    )
    assert isinstance(loaders[0].batch_sampler.sampler, SequentialSampler)
    accelerator.backward(torch.ones(1, requires_grad=True).sum())
    assert len(changes.lines) == 1


def shuffled() -> DataLoader:
    return DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=collate)


def test_what_is_prepared_anew_after_free_memory_resumes_in_order(tmp_path: Path) -> None:
    torch.manual_seed(1)
    accelerator = grouping()[0]
    next(iter(accelerator.prepare(shuffled())))
    accelerator.free_memory()  # as find_executable_batch_size() has it
    torch.manual_seed(2)
    loader = accelerator.prepare(shuffled())
    numbers(loader)
    accelerator.save_state(str(tmp_path))
    expected = numbers(loader)
    torch.manual_seed(3)
    other, changes = grouping()
    resumed = other.prepare(shuffled())
    other.load_state(str(tmp_path))
    assert numbers(resumed) == expected
    assert len(changes.lines) == 1


def test_a_state_of_another_number_of_loaders_is_left_and_told(tmp_path: Path) -> None:
    accelerator = grouping()[0]
    accelerator.prepare(shuffled(), shuffled())
    accelerator.save_state(str(tmp_path))
    other, changes = grouping()
    other.prepare(shuffled())
    other.load_state(str(tmp_path))
    assert changes.lines[1:] == (
        f"the order of batches is not restored from {tmp_path}: it was saved for 2 DataLoaders with grouped "
        "batches, and the script has 1",
    )


@pytest.mark.parametrize(
    ("sizes", "num_ranks"),
    [({"dp_shard": 8}, 8), ({"dp_replicate": 2, "tp": 4}, 2), ({"cp": 2, "tp": 4}, 1), (None, 8)],
)
def test_ranks_that_read_the_same_count_as_one(sizes: dict[str, int] | None, num_ranks: int) -> None:
    class Mesh(dict):
        mesh_dim_names = tuple(sizes or ())

    parts = {name: SimpleNamespace(size=lambda size=size: size) for name, size in (sizes or {}).items()}
    mesh = None if sizes is None else Mesh(parts)
    accelerator = SimpleNamespace(num_processes=8, torch_device_mesh=mesh)
    assert grouped_batches._num_ranks(accelerator) == num_ranks


def test_ranks_of_a_tensor_parallel_group_under_deepspeed_count_as_one() -> None:
    plugin = SimpleNamespace(deepspeed_config={"tensor_parallel": {"autotp_size": 4}})
    accelerator = SimpleNamespace(num_processes=8, torch_device_mesh=None, deepspeed_plugin=plugin)
    assert grouped_batches._num_ranks(accelerator) == 2


def test_a_negative_seed_is_that_which_torch_takes_it_for() -> None:
    accelerator = grouping()[0]
    accelerator.dataloader_config.data_seed = -1
    loader = accelerator.prepare(shuffled())
    assert loader.batch_sampler.seed == 2**64 - 1
    assert len(numbers(loader)) == 16


TRAINER_LENGTHS = torch.randint(2, 30, (32,), generator=torch.Generator().manual_seed(0)).tolist()
TRAINER_DATA = [{"input_ids": [number, *range(1, length)]} for number, length in enumerate(TRAINER_LENGTHS)]
STEPS_PER_EPOCH = 8
STOPPED_AT = 11
"""In the second epoch."""


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == STOPPED_AT


def trained(
    folder: Path, *, is_grouped: bool = True, stops: bool = False, resume: bool = False
) -> tuple[list[list[int]], list[float], tuple[str, ...]]:
    """Return the samples of each batch, the learning rate of each step, and what was changed."""
    read: list[list[int]] = []

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(one["input_ids"]) for one in samples)
        ids = torch.tensor([one["input_ids"] + [0] * (width - len(one["input_ids"])) for one in samples])
        return {"input_ids": ids, "labels": ids}

    changes = quiet()
    base: Any = Trainer
    if is_grouped:
        base = planned_trainer(Trainer, settings(group_by_length=True), changes)

    class Own(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            read.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *args)

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Own(
        model=causal_model(),
        args=arguments,
        train_dataset=TRAINER_DATA,
        data_collator=collate,
        callbacks=[Stop()] if stops else [],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert all(line["loss"] == line["loss"] for line in trainer.state.log_history if "loss" in line)
    return read, rates, changes.lines


def test_a_trainer_reads_every_sample_once_in_other_batches_and_resumes_among_them(tmp_path: Path) -> None:
    plain, plain_rates, _ = trained(tmp_path / "plain", is_grouped=False)
    read, rates, changes = trained(tmp_path / "whole")
    assert "batches are made of samples of like length, in a new order in each epoch" in changes
    assert rates == plain_rates
    assert len(read) == len(plain) == 2 * STEPS_PER_EPOCH
    epochs = [read[:STEPS_PER_EPOCH], read[STEPS_PER_EPOCH:]]
    for epoch in epochs:
        assert sorted(one for batch in epoch for one in batch) == list(range(32))
    assert epochs[0] != epochs[1]
    assert widths(read) < 0.85 * widths(plain)
    first, _, _ = trained(tmp_path / "parts", stops=True)
    second, _, _ = trained(tmp_path / "parts", resume=True)
    assert first == read[:STOPPED_AT]
    assert second == read[STOPPED_AT:]


def widths(read: list[list[int]]) -> int:
    """Return the tokens of all batches, with padding."""
    return sum(max(TRAINER_LENGTHS[one] for one in batch) * len(batch) for batch in read)
