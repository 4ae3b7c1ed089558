"""model.generate under `zerofit launch` and ZeRO-3: in step, or ended with an error; never a hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SCRIPTS, Launch, Run, environment

GENERATES = SCRIPTS / "generates.py"
TRAINER_GENERATES = SCRIPTS / "trainer_generates.py"
ZERO3 = ("--num-processes", "2", "--zero-stage", "3", "--no-check")
WATCHED = (*ZERO3, "--generate-limit", "3")
HEADLINE = "error[generate-not-on-all-ranks]: model.generate() was not called on all ranks"


def _line(code: str) -> str:
    """Return where a line of code stands in the script."""
    lines = GENERATES.read_text().splitlines()
    (number,) = (at for at, text in enumerate(lines, start=1) if code in text)
    return f"{GENERATES}:{number}"


GENERATE = _line("return inner.generate(prompt, max_new_tokens=num_tokens")
TRAIN = f"{_line('accelerator.backward')} (called at"


def _results(run: Run) -> list[list[object]]:
    return [json.loads((run.folder / f"done.{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_call_that_says_it_is_not_synced_goes_in_step_and_a_trainers_stays_as_it_is(
    launch: Launch,
) -> None:
    run = launch(*ZERO3, str(TRAINER_GENERATES), "done").check()
    assert _results(run) == [[[6, 20], [3, 3]], [[6, 20], [8, 8]]]
    notes = [line for line in run.stderr.splitlines() if line.endswith("synced_gpus=True")]
    first, second = (
        at
        for at, text in enumerate(TRAINER_GENERATES.read_text().splitlines(), start=1)
        if "trainer.model.generate(" in text
    )
    assert notes == [
        f"zerofit: {TRAINER_GENERATES}:{line}: generate(synced_gpus=False) under ZeRO-3 would leave ranks "
        "waiting for longer completions: synced_gpus=True"
        for line in (first, second)
    ]
    ranks = run.record()["ranks"]
    assert isinstance(ranks, list)
    for rank in ranks:
        assert [f"zerofit: {note}" for note in rank["changes"] if "synced_gpus" in note] == notes


@pytest.mark.evidence
def test_a_call_on_one_rank_ends_the_run_with_where_the_other_is(launch: Launch) -> None:
    run = launch(*WATCHED, str(GENERATES), "on_one_rank", "done")
    assert run.exit_code == 2, run.stderr
    assert run.stderr.count(HEADLINE) == 2  # the error, and the cause in zerofit's last line
    found = (
        f"  found: {GENERATE} (called at {_line('generate(4)  # alone')}) on rank 0 alone; "
        f"rank 1 is at {TRAIN} {_line('    return train()')}): accelerator.backward("
    )
    assert found in run.stderr
    record = run.record()
    assert record["exit_code"] == 2
    assert record["cause"] == f"rank 0 exited with 2: {HEADLINE}"


@pytest.mark.slow
def test_a_script_that_catches_the_error_goes_on_in_step_until_a_rank_has_ended(
    launch: Launch,
) -> None:
    run = launch(*WATCHED, str(GENERATES), "on_one_rank_and_caught", "done")
    assert run.exit_code == 2, run.stderr
    (before_training, none, chunked, num_tokens), (nothing, before_barrier, _, more_tokens) = _results(run)
    assert (none, nothing, num_tokens, more_tokens) == (None, None, 5, 11)
    assert run.record()["cause"] == f"rank 0 exited with 2: {HEADLINE}"
    assert "on rank 0 alone; rank 1 is at " + TRAIN in str(before_training)
    wait = _line("accelerator.wait_for_everyone()")
    assert f"on rank 1 alone; rank 0 is at {wait}" in str(before_barrier)
    assert str(chunked).startswith(
        "error[generate-passes-differ]: prefill_chunk_size can't be used on a model that ZeRO-3 partitions\n"
        f"  found: {_line('prefill_chunk_size')}"
    )
    assert (
        f"(called at {_line('        generate(6)')}) on rank 0 alone; the script of rank 1 has ended"
        in run.stderr
    )


@pytest.mark.evidence
def test_what_one_rank_generates_under_zero_2_is_its_own_matter(launch: Launch) -> None:
    flags = ("--num-processes", "2", "--zero-stage", "2", "--no-check", "--generate-limit", "3")
    run = launch(*flags, str(GENERATES), "on_one_rank", "done").check()
    assert _results(run) == ["trained", "trained"]
    assert "generate-not-on-all-ranks" not in run.stderr


@pytest.mark.evidence
def test_a_script_that_waits_for_the_others_in_finally_is_ended_too(launch: Launch) -> None:
    run = launch(*WATCHED, str(GENERATES), "in_a_last_act", "done")
    assert run.exit_code == 2, run.stderr
    assert run.record()["cause"] == f"rank 0 exited with 2: {HEADLINE}"
    assert f"rank 1 is at {TRAIN}" in run.stderr


@pytest.mark.evidence
def test_unwatched_the_same_call_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerofit", "launch", "--cpu", *ZERO3, "--generate-limit", "0"]
    run = subprocess.Popen([*command, str(GENERATES), "on_one_rank", "done"], cwd=tmp_path, env=environment())
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(timeout=120)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) == 128 + signal.SIGTERM
