"""Tensor-parallel launches train what one process trains, in a loop and with Trainer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from parallel_dimensions import SAVED_AT, resume_alike, script, train_alike
from runs import Run, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallel_dimensions import Runs

_FAMILIES = (
    *("llama", "tied", "one key-value head", "three heads"),
    *("qwen2", "qwen3", "mistral", "gemma2", "gpt_neox", "opt"),
)
_PAIR = ("--num-processes", "2", "--tensor-parallel-size", "2")
_TWO_PAIRS = ("--num-processes", "4", "--tensor-parallel-size", "2")


@pytest.mark.slow
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
@pytest.mark.parametrize("ranks", [_PAIR, _TWO_PAIRS], ids=["2", "4"])
def test_a_script_trains_as_in_one_process(ranks: tuple[str, ...], by_trainer: bool, runs: Runs) -> None:
    """At ZeRO-2 with clipping, a schedule, held-out data that fill no batch, generation and tied weights."""
    run = train_alike(runs, "tied", (*ranks, "--zero-stage", "2"), by_trainer=by_trainer)
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
def test_every_stage_trains_alike(case: str, by_trainer: bool, runs: Runs) -> None:
    ranks, stage, flags = _CASES[case]
    train_alike(runs, "llama", (*ranks, "--zero-stage", stage, *flags), by_trainer=by_trainer)


@pytest.mark.evidence
@pytest.mark.parametrize("kind", _FAMILIES)
def test_every_family_trains_alike(kind: str, runs: Runs) -> None:
    train_alike(runs, kind, (*_PAIR, "--zero-stage", "2"))


@pytest.mark.evidence
@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(stage: str, by_trainer: bool, runs: Runs) -> None:
    resume_alike(runs, "llama", (*_TWO_PAIRS, "--zero-stage", stage), by_trainer=by_trainer)


@pytest.mark.evidence
@pytest.mark.parametrize("by_trainer", [False, True], ids=["loop", "trainer"])
def test_accumulated_batches_make_the_same_steps(by_trainer: bool, runs: Runs) -> None:
    ranks = (*_TWO_PAIRS, "--zero-stage", "2")
    train_alike(runs, "llama", ranks, "--accumulation", "2", by_trainer=by_trainer)


@pytest.mark.evidence
def test_ranks_that_made_other_weights_start_with_those_of_the_first(runs: Runs) -> None:
    train_alike(runs, "llama", (*_TWO_PAIRS, "--zero-stage", "2"), "--fresh-head")


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
    assert "out/state: saved with tensor parallelism over 2 ranks, resumed with 1" in resumed.stderr
    command = [sys.executable, "-m", "zerofit", "export", "out/state", "--out", "whole"]
    exported = run_command(command, run.folder)
    assert exported.exit_code == 2
    assert "export-of-cut-layers" in exported.stderr


REFUSED = {
    "gpt2": "DeepSpeed can't shard this model for tensor parallelism",
    "mixtral": "DeepSpeed can't shard this model for tensor parallelism",
    "dropout": "ranks with different numbers of heads draw different random numbers",
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
