"""The steps of a run: those of its own world size and global batch, and what they follow from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captures import LOOP, TRAINER
from planning_problems import machine

from zerofit.core.capture import Capture, CapturedLoop, CapturedScheduler
from zerofit.core.facts import Versions
from zerofit.core.plan import Plan, Topology
from zerofit.core.run_length import RunLength, run_length
from zerofit.core.strategy import Strategy


def _length(
    capture: Capture | None, ranks: int, *target: str, strategy: Strategy | None = None, **groups: int
) -> RunLength:
    topology = Topology(num_nodes=1, world_size=ranks, **groups)
    versions = Versions(python="3.11", zerofit="1")
    plan = Plan(
        strategy=strategy or Strategy(),
        topology=topology,
        machine=machine(),
        versions=versions,
        capture=capture,
    )
    return run_length(plan, ("train.py", *target))


def _loop(num_epochs: int | None, max_steps: int | None = None, **more: Any) -> CapturedLoop:
    return CapturedLoop(where="train.py:9", num_epochs=num_epochs, max_steps=max_steps, **more)


def _with(
    loop: CapturedLoop | None,
    *,
    samples: int | None,
    batch: int,
    passes: int = 1,
    drops_last: bool = False,
    **more: Any,
) -> Capture:
    assert LOOP.loader is not None
    batches = None if samples is None else samples // batch if drops_last else -(-samples // batch)
    loader = replace(
        LOOP.loader, batch_size=batch, num_batches=batches, num_samples=samples, drops_last=drops_last
    )
    return replace(
        LOOP, loop=loop, loader=loader, micro_batch_size=batch, gradient_accumulation_steps=passes, **more
    )


_FOLLOWS = {"max_steps_follow_data": True}


@pytest.mark.parametrize(
    ("capture", "ranks", "target", "steps"),
    [
        # 5,000 samples, 4 a rank: epochs are of the planned world, not of the process that was captured
        (_with(_loop(2), samples=5000, batch=4), 1, (), 2500),
        (_with(_loop(2), samples=5000, batch=4), 16, (), 2 * 79),
        (_with(_loop(2), samples=5000, batch=4, drops_last=True), 16, (), 2 * 78),
        (_with(_loop(2), samples=5000, batch=4, passes=8), 16, (), 2 * 10),
        (_with(_loop(3), samples=100, batch=8), 64, (), 3),  # fewer batches than ranks
        (_with(_loop(3), samples=960, batch=96, splits_batches=True), 8, (), 30),
        # a limit that a user sets holds in any world
        (_with(_loop(1, 700, epochs_follow_steps=True), samples=5000, batch=4), 16, (), 700),
        (_with(_loop(50, 700), samples=5000, batch=4), 16, (), 700),
        (_with(_loop(2, 700), samples=5000, batch=4), 16, (), 158),  # the epochs end first
        (_with(_loop(None, 700), samples=None, batch=4), 16, (), 700),
        # accelerate's examples compute the limit from the length of one process's data
        (_with(_loop(2, 2500, **_FOLLOWS), samples=5000, batch=4), 16, (), 158),
        (_with(_loop(2, 2500, **_FOLLOWS), samples=5000, batch=4), 16, ("--max_train_steps", "2500"), 158),
        (_with(_loop(2, 626, **_FOLLOWS), samples=5000, batch=4, passes=4), 16, (), 40),
        (_with(_loop(None, 3750, **_FOLLOWS), samples=5000, batch=4), 16, (), 3 * 79),
        (_with(_loop(2, 700, **_FOLLOWS), samples=50_000, batch=4), 16, (), 700),
        (
            _with(_loop(2, 2500, epochs_follow_steps=True, **_FOLLOWS), samples=5000, batch=4),
            16,
            ("--max_train_steps=2500",),
            2500,
        ),
    ],
)
def test_a_loop_has_the_steps_of_its_world(
    capture: Capture, ranks: int, target: tuple[str, ...], steps: int
) -> None:
    assert _length(capture, ranks, *target).num_steps == steps


@pytest.mark.parametrize(
    ("arguments", "done", "ranks", "steps"),
    [
        ({"num_train_epochs": 3.0}, 0, 1, 150),
        ({"num_train_epochs": 3.0}, 0, 8, 3 * 7),
        ({"num_train_epochs": 0.5}, 0, 8, 4),
        ({"num_train_epochs": 3.0, "max_steps": -1}, 0, 50, 3),
        ({"num_train_epochs": 3.0, "max_steps": 1234}, 0, 50, 1234),
        ({"num_train_epochs": 3.0}, 14, 8, 7),
        ({"max_steps": 1234}, 1000, 8, 234),
        ({"max_steps": 1234}, 2000, 8, 0),
    ],
)
def test_a_trainer_has_the_steps_of_its_arguments(
    arguments: dict[str, Any], done: int, ranks: int, steps: int
) -> None:
    capture = replace(TRAINER, trainer_arguments=arguments, steps_done=done)
    assert _length(capture, ranks).num_steps == steps


def test_a_global_batch_that_the_user_sets_decides() -> None:
    capture = _with(_loop(1), samples=5000, batch=4)
    strategy = Strategy(micro_batch_size=8, gradient_accumulation_steps=2)
    assert _length(capture, 16, strategy=strategy).num_steps == 20
    kept = Strategy(micro_batch_size=2, gradient_accumulation_steps=2)  # the script's own, split otherwise
    assert _length(capture, 16, strategy=kept).num_steps == 79


def test_ranks_that_share_samples_do_not_share_the_epoch() -> None:
    capture = _with(_loop(1), samples=512, batch=4)
    assert _length(capture, 16, tensor_parallel_size=4).num_steps == 32
    assert _length(capture, 16, sequence_parallel_size=2).num_steps == 16


def _schedule(num_steps: int | None) -> CapturedScheduler:
    return CapturedScheduler(
        class_path="torch.optim.lr_scheduler.LambdaLR",
        initial_lrs=(1e-3,),
        num_steps=num_steps,
        is_prepared=True,
    )


@pytest.mark.parametrize(
    ("scheduled", "samples", "steps"),
    [
        (2500, 5000, 158),  # two epochs of one process
        (3000, 5000, 3000),  # no whole number of epochs: a number of its own
        (10, 5000, None),  # may count epochs
        (None, 5000, None),
        (3000, None, 3000),
    ],
)
def test_a_loop_that_shows_no_length_has_that_of_its_schedule(
    scheduled: int | None, samples: int | None, steps: int | None
) -> None:
    capture = _with(None, samples=samples, batch=4, schedulers=(_schedule(scheduled),))
    length = _length(capture, 16)
    assert length.num_steps == steps
    assert ("assumed" in length.source) == (steps is not None)


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        (("--max_train_steps", "2000"), 2000),
        (("--max_steps=40",), 40),
        (("--max-steps", "40", "--save_steps", "10"), 40),
        (("--num_train_steps", "7", "--warmup_steps", "3"), 7),
        (("--max_steps", "-1"), None),
        (("--logging_steps", "10", "--epochs", "3"), None),
        ((), None),
    ],
)
def test_a_script_that_was_not_run_sets_its_steps_or_they_are_unknown(
    target: tuple[str, ...], steps: int | None
) -> None:
    assert _length(None, 8, *target).num_steps == steps


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        (
            _with(_loop(3), samples=2049, batch=2),
            "99 steps: 2049 samples / 64 per step = 33 steps per epoch, 3 epochs (train.py:9)",
        ),
        (
            _with(_loop(1), samples=2049, batch=2, drops_last=True),
            "32 steps: 2049 samples / 64 per step, without the last = 32 steps per epoch, 1 epoch "
            "(train.py:9)",
        ),
        (_with(_loop(None, 90), samples=2049, batch=2), "90 steps (train.py:9)"),
        (
            _with(_loop(None, 90, micro_batches=4), samples=2049, batch=2),
            "90 steps of 4 batches each (train.py:9)",
        ),
        (
            _with(_loop(2), samples=None, batch=2),
            "the number of steps is unknown: its data has no length, and train.py:9 sets no limit",
        ),
        (
            replace(TRAINER, trainer_arguments={"max_steps": 90}, steps_done=30),
            "60 steps (max_steps=90), after the 30 of its checkpoint",
        ),
    ],
)
def test_the_derivation_is_one_sentence(capture: Capture, words: str) -> None:
    assert str(_length(capture, 32)) == words


@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize(("samples", "batch", "ranks"), [(100, 3, 4), (97, 8, 3), (64, 4, 16), (1000, 7, 6)])
def test_epochs_have_the_batches_that_accelerate_deals_out(
    samples: int, batch: int, ranks: int, drops_last: bool
) -> None:
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    sampler = BatchSampler(SequentialSampler(range(samples)), batch, drops_last)
    shards = [BatchSamplerShard(sampler, num_processes=ranks, process_index=rank) for rank in range(ranks)]
    (dealt,) = {len(list(shard)) for shard in shards}
    capture = _with(_loop(1), samples=samples, batch=batch, drops_last=drops_last)
    assert _length(capture, ranks).num_steps == dealt
