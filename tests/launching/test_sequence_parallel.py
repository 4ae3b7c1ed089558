"""Sequence-parallel launches train what one process trains, in a loop and with Trainer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from example_runs import (
    FP32_TOLERANCE,
    GLOBAL_BATCH_SIZE,
    accelerate_example,
    accelerate_losses,
    assert_same,
    plain_accelerate_launch,
    trainer_example,
    trainer_losses,
)
from parallel_dimensions import resume_alike, script, train_alike

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallel_dimensions import Runs
    from runs import Run

_PAIR = ("--num-processes", "2", "--sequence-parallel-size", "2")
_TWO_PAIRS = ("--num-processes", "4", "--sequence-parallel-size", "2")
_FOUR = ("--num-processes", "4", "--sequence-parallel-size", "4")


@pytest.mark.slow
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
@pytest.mark.parametrize("ranks", [_PAIR, _TWO_PAIRS], ids=["2", "4"])
def test_a_script_trains_as_in_one_process(ranks: tuple[str, ...], by_trainer: bool, runs: Runs) -> None:
    """At ZeRO-2 with clipping, a schedule, held-out data that fill no batch, generation and an odd length."""
    run = train_alike(runs, "tied", (*ranks, "--zero-stage", "2"), "--length", "15", by_trainer=by_trainer)
    config = json.loads((run.run_folder / "ds_config.json").read_text())
    assert config["sequence_parallel_size"] == 2


_CASES = {
    "stage 0": (_PAIR, "0", ()),
    "stage 1": (_PAIR, "1", ()),
    "stage 3": (_TWO_PAIRS, "3", ()),
    "stage 2, optimizer on the host": (_PAIR, "2", ("--offload-optimizer", "cpu")),
    "stage 3, all on the host": (_TWO_PAIRS, "3", ("--offload-optimizer", "cpu", "--offload-param", "cpu")),
    "stage 2, checkpointing": (_PAIR, "2", ("--gradient-checkpointing",)),
    "stage 3, checkpointing": (_PAIR, "3", ("--gradient-checkpointing",)),
    "stage 2, micro-batches": (_PAIR, "2", ("--micro-batch-size", "2")),
}


@pytest.mark.evidence
@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_every_stage_trains_alike(case: str, by_trainer: bool, runs: Runs) -> None:
    ranks, stage, flags = _CASES[case]
    train_alike(runs, "llama", (*ranks, "--zero-stage", stage, *flags), by_trainer=by_trainer)


_FAMILIES = (
    *("llama", "one key-value head", "six heads", "qwen2", "qwen3", "sliding window"),
    *("gpt2", "gpt_neox", "phi3", "opt", "mixtral"),
)


@pytest.mark.evidence
@pytest.mark.parametrize("kind", _FAMILIES)
def test_every_family_trains_alike(kind: str, runs: Runs) -> None:
    train_alike(runs, kind, (*_PAIR, "--zero-stage", "2"))


@pytest.mark.evidence
def test_ranks_outnumber_the_key_value_heads(runs: Runs) -> None:
    train_alike(runs, "llama", (*_FOUR, "--zero-stage", "2"))


_BATCHES = {
    "padded on the right": ("--layout", "right"),
    "padded on the left, of odd length": ("--layout", "left", "--length", "15"),
    "packed": ("--layout", "packed"),
    "packed, of odd length": ("--layout", "packed", "--length", "15"),
    "a loss of the script's own": ("--own-loss", "--length", "15"),
}


@pytest.mark.evidence
@pytest.mark.parametrize("case", _BATCHES)
@pytest.mark.parametrize("kind", ["llama", "sliding window"])
def test_masks_and_losses_are_those_of_whole_samples(case: str, kind: str, runs: Runs) -> None:
    train_alike(runs, kind, (*_PAIR, "--zero-stage", "2"), *_BATCHES[case])


@pytest.mark.evidence
@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(stage: str, by_trainer: bool, runs: Runs) -> None:
    """At stage 2 without sequence parallelism: each rank has saved its part of whole layers."""
    resumed_on = (*(("--num-processes", "2") if stage == "2" else _TWO_PAIRS), "--zero-stage", stage)
    ranks = (*_TWO_PAIRS, "--zero-stage", stage)
    resume_alike(runs, "llama", ranks, by_trainer=by_trainer, resumed_on=resumed_on)


@pytest.mark.evidence
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_accumulated_batches_make_the_same_steps(by_trainer: bool, runs: Runs) -> None:
    ranks = (*_TWO_PAIRS, "--zero-stage", "2")
    train_alike(runs, "llama", ranks, "--accumulation", "2", by_trainer=by_trainer)


_EXAMPLES = {
    "accelerate": (accelerate_example, accelerate_losses, "--hidden-size=128"),
    "trainer": (trainer_example, trainer_losses, "--hidden_size=128"),
}
"""With two heads of 64."""


@pytest.mark.evidence
@pytest.mark.parametrize("name", _EXAMPLES)
def test_an_example_keeps_its_losses(
    name: str, launch: Callable[..., Run], data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    example, losses, wider = _EXAMPLES[name]
    alone = tmp_path_factory.mktemp("alone")
    plain_accelerate_launch([*example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE), wider], alone)
    target = example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    run = launch(*_TWO_PAIRS, "--zero-stage", "3", *target, wider).check()
    assert_same(losses(run.folder), losses(alone), tolerance=FP32_TOLERANCE)


@pytest.mark.evidence
def test_a_stream_that_all_groups_would_share_is_refused(
    launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    run = launch(*_TWO_PAIRS, "--zero-stage", "2", *script(model_of("llama"), "--stream"))
    assert run.exit_code == 2
    assert "error[sequence-parallel-dispatch]" in run.stderr


REFUSED = {
    "three heads": "3 attention heads over 2 sequence-parallel ranks",
    "gemma2": "attn_implementation=eager over 2 sequence-parallel ranks",
    "recurrent": "MambaForCausalLM over 2 sequence-parallel ranks",
}


@pytest.mark.evidence
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_come_out_wrong_is_refused(
    kind: str, launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    run = launch(*_PAIR, "--zero-stage", "2", *script(model_of(kind)))
    assert run.exit_code == 2
    assert REFUSED[kind] in run.stderr
    assert "Traceback" not in run.stderr
