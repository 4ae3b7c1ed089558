"""Launches in pipeline stages train what one process trains, in a loop and with Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from parallel_dimensions import (
    NUM_SAMPLES,
    NUM_STEPS,
    SAVED_AT,
    ranks_of,
    resume_alike,
    script,
    train_alike,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallel_dimensions import Runs
    from runs import Run

_PAIR = ("--num-processes", "2", "--pipeline-parallel-size", "2")
_FOUR = ("--num-processes", "4", "--pipeline-parallel-size", "4")
_TWO_PAIRS = ("--num-processes", "4", "--pipeline-parallel-size", "2")
_TWO_EACH = ("--pipeline-stages-per-rank", "2")


@pytest.mark.slow
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_script_trains_as_in_one_process(by_trainer: bool, runs: Runs) -> None:
    """With tied embeddings, clipping, a schedule, held-out data that fill no batch, generation."""
    run = train_alike(runs, "tied", _PAIR, by_trainer=by_trainer)
    assert not (run.run_folder / "ds_config.json").exists()
    said = run.stdout + run.stderr
    assert "the model trains in 2 pipeline stages, of blocks 0, 1" in said
    assert "a batch of 8 rows runs in 8 micro-batches of 1\n" in said


@pytest.mark.slow
def test_stages_shuffle_alike_where_a_script_seeds_each_rank_by_itself(
    launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    run = launch(*_TWO_PAIRS, *script(model_of("llama"), "--batch-size", "4", "--seed-by-rank")).check()
    seen = [[row for batch in rank["seen"] for row in batch] for rank in ranks_of(run.folder / "out")]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    samples = torch.randint(3, 128, (NUM_SAMPLES, 16), generator=torch.manual_seed(1))  # as in the script
    assert sorted([*seen[0], *seen[2]]) == sorted(samples.sum(1).tolist())
    assert [*seen[0], *seen[2]] != samples.sum(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("resumed_on", [_PAIR, ("--num-processes", "1")], ids=["a pipeline", "one process"])
def test_a_group_that_is_added_while_it_trains_is_trained_saved_and_resumed(
    resumed_on: tuple[str, ...], runs: Runs
) -> None:
    """A block of the last stage alone, so that the group is empty on rank 0."""
    resume_alike(runs, "tied", _PAIR, "--late-group", resumed_on=resumed_on)


_CASES = {
    "two pipelines": ("gpt2", _TWO_PAIRS, ()),
    "two pipelines, tied": ("tied", _TWO_PAIRS, ()),
    "untied": ("llama", _PAIR, ()),
    "alibi": ("alibi", _PAIR, ()),
    "four stages": ("qwen3, four blocks", _FOUR, ()),
    "interleaved": ("qwen3, four blocks", (*_PAIR, *_TWO_EACH), ()),
    "interleaved, two pipelines": ("tied, four blocks", (*_TWO_PAIRS, *_TWO_EACH), ("--accumulation", "2")),
    "interleaved, three ranks": (
        "llama, seven blocks",
        ("--num-processes", "3", "--pipeline-parallel-size", "3", *_TWO_EACH),
        (),
    ),
    "interleaved, micro-batches of 3": (
        "tied, four blocks",
        (*_PAIR, *_TWO_EACH, "--micro-batch-size", "3", "--gradient-checkpointing"),
        ("--layout", "left"),
    ),
    "checkpointing": ("llama", (*_PAIR, "--gradient-checkpointing"), ()),
    "micro-batches of 2": ("tied", (*_PAIR, "--micro-batch-size", "2"), ()),
    "micro-batches of 3": ("llama", (*_TWO_PAIRS, "--micro-batch-size", "3"), ()),
    "padded on the left": ("llama", _PAIR, ("--layout", "left")),
    "accumulation": ("tied", _TWO_PAIRS, ("--accumulation", "2")),
    "ranks with other weights": ("llama", _PAIR, ("--fresh-head",)),
}


@pytest.mark.evidence
@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_every_kind_of_run_trains_alike(case: str, by_trainer: bool, runs: Runs) -> None:
    kind, ranks, arguments = _CASES[case]
    train_alike(runs, kind, ranks, *arguments, by_trainer=by_trainer)


@pytest.mark.evidence
def test_a_stream_is_read_by_each_pipeline(runs: Runs) -> None:
    train_alike(runs, "llama", _TWO_PAIRS, "--stream")


@pytest.mark.evidence
def test_a_trainer_goes_back_to_its_best_weights(runs: Runs) -> None:
    run = train_alike(runs, "tied", _PAIR, "--best", by_trainer=True)
    best, last = (run.folder / "out" / f"checkpoint-{step}" for step in (SAVED_AT, NUM_STEPS))
    saved = (run.folder / "out" / "model" / "model.safetensors").read_bytes()
    assert (best / "model.safetensors").read_bytes() == saved
    assert (last / "model.safetensors").read_bytes() != saved


@pytest.mark.evidence
@pytest.mark.parametrize("resumed_by", ["a pipeline", "interleaved stages", "one process"])
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    resumed_by: str, by_trainer: bool, runs: Runs
) -> None:
    """A checkpoint is that of one process, and so resumes there too."""
    resumed_on = {
        "a pipeline": _PAIR,
        "interleaved stages": (*_PAIR, *_TWO_EACH),
        "one process": ("--num-processes", "1"),
    }[resumed_by]
    resume_alike(runs, "tied, four blocks", _PAIR, by_trainer=by_trainer, resumed_on=resumed_on)


REFUSED = {
    "opt": (_PAIR, "it is not a stack of equal blocks between embeddings and a head"),
    "mixtral with a balancing loss": (
        _PAIR,
        "a pipeline can't compute the load-balancing loss of a mixture of experts",
    ),
    "llama": (_FOUR, "a pipeline has at most as many stages as the model has blocks"),
}


@pytest.mark.evidence
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_can_not_be_cut_is_refused(
    kind: str, launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    ranks, says = REFUSED[kind]
    run = launch(*ranks, *script(model_of(kind)))
    assert run.exit_code == 2
    assert says in run.stderr
    assert "Traceback" not in run.stderr
