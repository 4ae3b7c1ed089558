"""Tensor-parallel launches train what one process trains, in a loop and with Trainer."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from parallel_dimensions import (
    NUM_STEPS,
    TOLERANCE,
    assert_same_weights,
    assert_trains_as,
    ranks_of,
    script,
)
from runs import Run, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAVED_AT = 4
_FAMILIES = (
    *("llama", "tied", "one key-value head", "three heads"),
    *("qwen2", "qwen3", "mistral", "gemma2", "gpt_neox", "opt"),
)
_PAIR = ("--num-processes", "2", "--tensor-parallel-size", "2")
_TWO_PAIRS = ("--num-processes", "4", "--tensor-parallel-size", "2")


@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
@pytest.mark.parametrize("ranks", [_PAIR, pytest.param(_TWO_PAIRS, marks=pytest.mark.slow)], ids=["2", "4"])
def test_a_script_trains_as_in_one_process(
    ranks: tuple[str, ...],
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    """At ZeRO-2 with clipping, a schedule, held-out data that fill no batch, generation and tied weights."""
    more = ("--trainer",) if by_trainer else ()
    size = "8" if ranks is _PAIR else "4"
    run = launch(*ranks, "--zero-stage", "2", *script(model_of("tied"), "--batch-size", size, *more)).check()
    assert_trains_as(run.folder / "out", one_process("tied", "--batch-size", "8", *more))
    config = json.loads((run.run_folder / "ds_config.json").read_text())
    assert config["tensor_parallel"] == {"autotp_size": 2}


_CASES = {
    "stage 0": (_PAIR, "0", ()),
    "stage 1": (_PAIR, "1", ()),
    "stage 3": (_TWO_PAIRS, "3", ()),
    "stage 2, optimizer on the host": (_PAIR, "2", ("--offload-optimizer", "cpu")),
    "stage 3, all on the host": (_TWO_PAIRS, "3", ("--offload-optimizer", "cpu", "--offload-param", "cpu")),
    "stage 2, checkpointing": (_PAIR, "2", ("--gradient-checkpointing",)),
    "stage 2, micro-batches": (_PAIR, "2", ("--micro-batch-size", "2")),
}


@pytest.mark.evidence
@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_every_stage_trains_alike(
    case: str,
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    ranks, stage, flags = _CASES[case]
    size = "8" if ranks is _PAIR else "4"
    more = ("--trainer",) if by_trainer else ()
    target = script(model_of("llama"), "--batch-size", size, *more)
    run = launch(*ranks, "--zero-stage", stage, *flags, *target).check()
    assert_trains_as(run.folder / "out", one_process("llama", "--batch-size", "8", *more))


@pytest.mark.evidence
@pytest.mark.parametrize("kind", _FAMILIES)
def test_every_family_trains_alike(
    kind: str,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    target = script(model_of(kind), "--batch-size", "8")
    run = launch(*_PAIR, "--zero-stage", "2", *target).check()
    assert_trains_as(run.folder / "out", one_process(kind, "--batch-size", "8"))


@pytest.mark.evidence
@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    stage: str,
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    more = ("--trainer",) if by_trainer else ()
    target = script(model_of("llama"), "--batch-size", "4", f"--save-step={SAVED_AT}", *more)
    run = launch(*_TWO_PAIRS, "--zero-stage", stage, *target).check()
    saved = run.folder / "out" / (f"checkpoint-{SAVED_AT}" if by_trainer else "state")
    kept = run.folder / "kept"
    shutil.move(saved, kept)
    for path in (run.folder / "out", run.folder / "zerofit-runs"):
        shutil.rmtree(path)
    resumed = launch(*_TWO_PAIRS, "--zero-stage", stage, *target, "--resume", str(kept)).check()
    alone = one_process("llama", "--batch-size", "8", *more)
    (first, *_), (whole,) = ranks_of(resumed.folder / "out"), ranks_of(alone)
    assert len(first["steps"]) == NUM_STEPS - SAVED_AT
    losses = [loss for _, loss, _ in whole["steps"][SAVED_AT:]]
    assert [loss for _, loss, _ in first["steps"]] == pytest.approx(losses, rel=TOLERANCE)
    assert_same_weights(resumed.folder / "out", alone)


@pytest.mark.evidence
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_accumulated_batches_make_the_same_steps(
    by_trainer: bool,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    more = ("--accumulation", "2", *(("--trainer",) if by_trainer else ()))
    run = launch(
        *_TWO_PAIRS, "--zero-stage", "2", *script(model_of("llama"), "--batch-size", "4", *more)
    ).check()
    assert_trains_as(run.folder / "out", one_process("llama", "--batch-size", "8", *more))


@pytest.mark.evidence
def test_ranks_that_made_other_weights_start_with_those_of_the_first(
    launch: Callable[..., Run], model_of: Callable[[str], Path], one_process: Callable[..., Path]
) -> None:
    target = script(model_of("llama"), "--batch-size", "4", "--fresh-head")
    run = launch(*_TWO_PAIRS, "--zero-stage", "2", *target).check()
    assert_trains_as(run.folder / "out", one_process("llama", "--batch-size", "8", "--fresh-head"))


@pytest.mark.evidence
def test_a_stream_that_all_groups_would_share_is_refused(
    launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    run = launch(*_TWO_PAIRS, "--zero-stage", "2", *script(model_of("llama"), "--stream"))
    assert run.exit_code == 2
    assert "all groups of ranks would train on the same samples" in run.stderr


@pytest.mark.evidence
def test_a_checkpoint_resumes_with_its_own_size_alone(
    launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    target = script(model_of("llama"), "--batch-size", "4", f"--save-step={SAVED_AT}")
    run = launch(*_PAIR, "--zero-stage", "2", *target).check()
    resumed = launch("--num-processes", "2", "--zero-stage", "2", *target, "--resume", "out/state")
    assert resumed.exit_code == 2
    assert "out/state: layers cut over 2 ranks, and 1 are to go on" in resumed.stderr
    command = [sys.executable, "-m", "zerofit", "export", "out/state", "--out", "whole"]
    exported = run_command(command, run.folder)
    assert exported.exit_code == 2
    assert "export-of-cut-layers" in exported.stderr


REFUSED = {
    "gpt2": "DeepSpeed can't cut this model for tensor parallelism",
    "mixtral": "DeepSpeed can't cut this model for tensor parallelism",
    "dropout": "ranks with other numbers of heads draw other random numbers",
}


@pytest.mark.evidence
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_comes_out_wrong_is_refused(
    kind: str, launch: Callable[..., Run], model_of: Callable[[str], Path]
) -> None:
    run = launch(*_PAIR, "--zero-stage", "2", *script(model_of(kind)))
    assert run.exit_code == 2
    assert REFUSED[kind] in run.stderr
    assert "Traceback" not in run.stderr
