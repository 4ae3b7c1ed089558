"""Launches in pipeline stages train what one process trains, in a loop and with Trainer."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from parallel_dimensions import NUM_STEPS, TOLERANCE, assert_same_weights, assert_trains_as, ranks_of, script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runs import Run

SAVED_AT = 4
_PAIR = ("--num-processes", "2", "--pipeline-parallel-size", "2")
_TWO_PAIRS = ("--num-processes", "4", "--pipeline-parallel-size", "2")


@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_script_trains_as_in_one_process(
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    """With tied embeddings, clipping, a schedule, held-out data that fill no batch, generation."""
    more = ("--trainer",) if by_trainer else ()
    run = launch(*_PAIR, *script(model_of("tied"), "--batch-size", "8", *more)).check()
    assert_trains_as(run.folder / "out", one_process("tied", "--batch-size", "8", *more))
    assert not (run.run_folder / "ds_config.json").exists()
    assert "the model trains in 2 pipeline stages, of blocks 0, 1" in run.stdout + run.stderr


_CASES = {
    "two pipelines": ("gpt2", _TWO_PAIRS, (), ()),
    "untied": ("llama", _PAIR, (), ()),
    "four stages": ("qwen3, four blocks", ("--num-processes", "4", "--pipeline-parallel-size", "4"), (), ()),
    "checkpointing": ("llama", _PAIR, ("--gradient-checkpointing",), ()),
    "micro-batches of 2": ("tied", _PAIR, ("--micro-batch-size", "2"), ()),
    "micro-batches of 3": ("llama", _TWO_PAIRS, ("--micro-batch-size", "3"), ()),
    "accumulation": ("tied", _TWO_PAIRS, (), ("--accumulation", "2")),
    "ranks with other weights": ("llama", _PAIR, (), ("--fresh-head",)),
}


@pytest.mark.evidence
@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_every_kind_of_run_trains_alike(
    case: str,
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    kind, ranks, flags, arguments = _CASES[case]
    more = (*arguments, *(("--trainer",) if by_trainer else ()))
    size = "4" if ranks is _TWO_PAIRS else "8"
    run = launch(*ranks, *flags, *script(model_of(kind), "--batch-size", size, *more)).check()
    group = 4 if "4" in ranks and ranks is not _TWO_PAIRS else 2
    assert_trains_as(run.folder / "out", one_process(kind, "--batch-size", "8", *more), group=group)


@pytest.mark.evidence
@pytest.mark.parametrize("resumed_by", ["a pipeline", "one process"])
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    resumed_by: str,
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    """A checkpoint is that of one process, and so resumes there too."""
    more = ("--trainer",) if by_trainer else ()
    target = script(model_of("tied"), "--batch-size", "8", f"--save-step={SAVED_AT}", *more)
    run = launch(*_PAIR, *target).check()
    kept = run.folder / "kept"
    shutil.move(run.folder / "out" / (f"checkpoint-{SAVED_AT}" if by_trainer else "state"), kept)
    for path in (run.folder / "out", run.folder / "zerofit-runs"):
        shutil.rmtree(path)
    ranks = _PAIR if resumed_by == "a pipeline" else ("--num-processes", "1")
    resumed = launch(*ranks, *target, "--resume", str(kept)).check()
    alone = one_process("tied", "--batch-size", "8", *more)
    (first, *_), (whole,) = ranks_of(resumed.folder / "out"), ranks_of(alone)
    assert len(first["steps"]) == NUM_STEPS - SAVED_AT
    losses = [loss for _, loss, _ in whole["steps"][SAVED_AT:]]
    assert [loss for _, loss, _ in first["steps"]] == pytest.approx(losses, rel=TOLERANCE)
    assert_same_weights(resumed.folder / "out", alone)


@pytest.mark.evidence
def test_a_stream_is_read_by_each_pipeline(
    launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    launch(*_TWO_PAIRS, *script(model_of("llama"), "--batch-size", "4", "--stream")).check()


REFUSED = {
    "opt": (_PAIR, "it is not a stack of equal blocks between embeddings and a head"),
    "alibi": (_PAIR, "this model can't be cut into the stages of a pipeline"),
    "llama": (
        ("--num-processes", "4", "--pipeline-parallel-size", "4"),
        "a pipeline has at most as many stages as the model has blocks",
    ),
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
