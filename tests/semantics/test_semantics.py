"""A script under zerofit takes the same steps on the same samples to the same losses as by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from records import differences
from trainings import ARGUMENTS, Ended, assert_same, run_by_stock_deepspeed, run_by_zerofit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How zerofit is to run a script."""

    num_processes: int
    flags: tuple[str, ...]
    """Of `zerofit launch`."""
    zero_stage: int | None = None
    """What has to come of them; None is without DeepSpeed."""
    is_sharded: bool = False
    """True if FSDP2 has to come of them."""
    is_captured: bool = False
    """True if the script is captured and planned for first, for GPUs that its ranks are rehearsed for."""

    @property
    def all_flags(self) -> tuple[str, ...]:
        ranks = ("--num-processes", str(self.num_processes), *self.flags)
        gpus = ("--gpus", f"h100-80gb:{self.num_processes}", "--mixed-precision", "no")
        return (*gpus, *ranks) if self.is_captured else ranks


SMALLER = ("--micro-batch-size", "2")
FSDP2 = ("--engine", "fsdp2", "--mixed-precision", "no")
NO_OFFLOAD = ("--offload-optimizer", "none")
WAYS = {
    "micro-batch": Way(num_processes=1, flags=SMALLER),
    "checkpointing": Way(num_processes=1, flags=(*SMALLER, "--gradient-checkpointing")),
    "data parallel, micro-batch": Way(num_processes=2, flags=("--engine", "native", *SMALLER)),
    "ZeRO-2": Way(num_processes=2, flags=("--preset", "z2"), zero_stage=2),
    "ZeRO-2, micro-batch": Way(num_processes=2, flags=("--preset", "z2", *SMALLER), zero_stage=2),
    "ZeRO-3, micro-batch": Way(num_processes=2, flags=("--preset", "z3", *SMALLER), zero_stage=3),
    "ZeRO-3, uneven micro-batch": Way(
        num_processes=2, flags=("--preset", "z3", "--micro-batch-size", "3"), zero_stage=3
    ),
    "ZeRO-3, checkpointing": Way(
        num_processes=2, flags=("--preset", "z3", "--gradient-checkpointing"), zero_stage=3
    ),
    "FSDP2": Way(num_processes=2, flags=FSDP2, is_sharded=True),
    "FSDP2, uneven micro-batch": Way(
        num_processes=2, flags=(*FSDP2, "--micro-batch-size", "3"), is_sharded=True
    ),
    "FSDP2 without resharding, checkpointing": Way(
        num_processes=2,
        flags=(*FSDP2, "--no-reshard-after-forward", "--gradient-checkpointing"),
        is_sharded=True,
    ),
    "captured, micro-batch": Way(num_processes=1, flags=("--engine", "native", *SMALLER), is_captured=True),
    "captured, ZeRO-2, micro-batch": Way(
        num_processes=2, flags=("--zero-stage", "2", *NO_OFFLOAD, *SMALLER), zero_stage=2, is_captured=True
    ),
    "captured, ZeRO-3, micro-batch": Way(
        num_processes=2, flags=("--zero-stage", "3", *NO_OFFLOAD, *SMALLER), zero_stage=3, is_captured=True
    ),
}
AT_EACH_CHANGE = {
    ("loop_by_hand", "ZeRO-3, uneven micro-batch"),
    ("two_optimizers", "data parallel, micro-batch"),
    ("trainer_own_parts", "ZeRO-3, checkpointing"),
    ("trainer_padding_free", "ZeRO-2"),
}
"""What `make test` runs: what the covering array's loop and Trainer are not. The others: `make semantics`."""
NOT_TOGETHER = {
    ("loop_by_hand", "checkpointing"): "its model is none of transformers",
    ("loop_by_hand", "FSDP2 without resharding, checkpointing"): "its model is none of transformers",
    ("loop_by_hand", "ZeRO-3, checkpointing"): "its model is none of transformers",
    **{
        ("trainer_seq2seq", way): "its encoder's embeddings are tied, which FSDP2 refuses to train"
        for way in WAYS
        if "FSDP2" in way
    },
    **{
        ("two_optimizers", way): "DeepSpeed trains one model with one optimizer"
        for way in WAYS
        if "ZeRO" in way or way == "checkpointing"
    },
    **{
        ("trainer_padding_free", way): "its batches are one row, which is refused in parts"
        for way in WAYS
        if "micro-batch" in way or way == "checkpointing"
    },
}


def cases() -> list[object]:
    """Every script in every way."""
    return [
        pytest.param(
            script,
            way,
            id=f"{script}-{way}",
            marks=() if (script, way) in AT_EACH_CHANGE else pytest.mark.slow,
        )
        for script in ARGUMENTS
        for way in WAYS
        if (script, way) not in NOT_TOGETHER
    ]


@pytest.mark.parametrize(("script", "way"), cases())
def test_a_script_trains_as_it_does_by_itself(
    script: str, way: str, by_itself: Callable[..., Ended], tmp_path: Path
) -> None:
    seen = run_by_zerofit(script, tmp_path, flags=WAYS[way].all_flags)
    assert_same(seen, by_itself(script, num_processes=WAYS[way].num_processes))
    assert (seen.training.zero_stage, seen.training.is_sharded) == (
        WAYS[way].zero_stage,
        WAYS[way].is_sharded,
    )


@pytest.mark.slow
def test_the_recorder_sees_what_stock_deepspeed_does_to_accumulation_by_hand(
    by_itself: Callable[..., Ended], tmp_path: Path
) -> None:
    seen = run_by_stock_deepspeed("loop_by_hand", tmp_path)
    expected = by_itself("loop_by_hand", num_processes=1)
    assert seen.result["steps"] == expected.result["steps"] == 10  # what the script itself believes
    assert differences(expected.training, seen.training) == ["20 optimizer steps, not 10"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["z2", "z3"])
def test_dropout_falls_as_by_itself_where_no_batch_is_split(
    preset: str, by_itself: Callable[..., Ended], tmp_path: Path
) -> None:
    dropout = ("--dropout", "0.2")
    seen = run_by_zerofit(
        "plain_loop", tmp_path, *dropout, flags=("--num-processes", "2", "--preset", preset)
    )
    assert_same(seen, by_itself("plain_loop", *dropout, num_processes=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "class_name"), [("sgd", "SGD"), ("adafactor", "Adafactor"), ("adamw-8bit", "AdamW8bit")]
)
def test_another_optimizer_steps_as_often_at_the_same_rates_on_the_same_samples(
    optimizer: str, class_name: str, by_itself: Callable[..., Ended], tmp_path: Path
) -> None:
    flags = ("--num-processes", "1", "--optimizer", optimizer, *SMALLER)
    seen = run_by_zerofit("plain_loop", tmp_path, flags=flags)
    expected = by_itself("plain_loop", num_processes=1)
    assert seen.training.optimizers == (class_name,)
    assert differences(expected.training, seen.training, same_optimizer=False) == []
    assert seen.result["losses"][0] == pytest.approx(expected.result["losses"][0], rel=2e-5)
    assert seen.result["losses"][-1] != pytest.approx(expected.result["losses"][-1], rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [SMALLER, ("--preset", "z2", *SMALLER), ("--preset", "z3", *SMALLER)])
def test_a_resumed_script_goes_on_as_if_it_had_not_stopped(
    flags: tuple[str, ...], by_itself: Callable[..., Ended], tmp_path: Path
) -> None:
    flags = ("--num-processes", "2", *flags)
    run_by_zerofit("accumulating_loop", tmp_path, "--save-at", "4", "--stop-at", "4", flags=flags)
    resumed = run_by_zerofit("accumulating_loop", tmp_path, "--resume", "out/step_4", flags=flags)
    whole = by_itself("accumulating_loop", num_processes=2)
    assert resumed.result["steps"] == whole.result["steps"]
    steps, expected = resumed.training.steps, whole.training.steps[4:]
    assert [step.samples for step in steps] == [step.samples for step in expected]
    assert [step.rates[0] for step in steps] == pytest.approx([step.rates[0] for step in expected], rel=1e-9)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=2e-5)
