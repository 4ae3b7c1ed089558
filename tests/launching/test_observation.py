"""The live file says what a rank does, in each kind of training loop and engine."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from runs import SCRIPTS, Launch, Run, run_command

from zerofit.core.checkpoints import MANIFEST_NAME, inspect_checkpoint
from zerofit.core.rank_observation import Phase, read_observation

_PHASES = str(SCRIPTS / "phases.py")
_TRAINING = {
    "start": ["loading 0"],
    "forward": ["forward 0", "forward 1"],
    "backward": ["backward 0", "backward 1"],
    "step": ["optimizer step 0", "optimizer step 1"],
}


def _seen(run: Run, rank: int) -> dict[str, Any]:
    return json.loads((run.folder / f"seen{rank}.json").read_text())


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        pytest.param("native", 1, marks=pytest.mark.slow),
        ("deepspeed", 2),
        pytest.param("native", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_an_accelerate_loop(engine: str, ranks: int, launch: Launch) -> None:
    run = launch("--engine", engine, "--num-processes", str(ranks), _PHASES).check()
    for rank in range(ranks):
        seen = _seen(run, rank)
        assert {place: seen[place] for place in _TRAINING} == _TRAINING
        assert seen["after"] == ["between steps 1", "between steps 2"]
        assert seen["saving"] == ["saving 2"]
        assert "evaluating 2" in seen["evaluation"]
        assert "waiting for data 0" in seen["data"]
        last = read_observation(run.run_folder / "ranks", rank)
        assert last is not None
        assert (last.phase, last.step, last.checkpoint_step) == (Phase.ENDED, 2, 2)
        assert last.checkpoint == str(run.folder / "saved")
        assert last.host_bytes > 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "has_manifest"),
    [("native", True), ("native", False), ("deepspeed", True), ("fsdp2", True), ("fsdp2", False)],
)
def test_a_resumed_run_counts_from_its_checkpoint(engine: str, launch: Launch, *, has_manifest: bool) -> None:
    flags = ("--engine", engine, "--num-processes", "1", _PHASES)
    saved = launch(*flags).check().folder / "saved"
    if not has_manifest:  # as saved without zerofit
        (saved / MANIFEST_NAME).unlink()
    resumed = launch(*flags, "resume")
    assert _seen(resumed, 0)["forward"] == ["forward 2", "forward 3"]
    manifest = inspect_checkpoint(resumed.folder / "saved").manifest
    assert manifest is not None
    assert manifest.step == 4


def test_a_trainer(launch: Launch) -> None:
    run = launch("--engine", "native", "--num-processes", "1", _PHASES, "trainer").check()
    seen = _seen(run, 0)
    assert {place: seen[place] for place in _TRAINING} == _TRAINING
    assert seen["evaluation"] == ["evaluating 1", "evaluating 2"]
    last = read_observation(run.run_folder / "ranks", 0)
    assert last is not None
    assert (last.phase, last.step, last.num_steps, last.checkpoint_step) == (Phase.ENDED, 2, 2, 2)
    assert last.checkpoint == str(run.folder / "out" / "checkpoint-2")
    assert re.fullmatch(
        r"zerofit: ended well after \d+ s, step 2 of 2, [\d.]+ [MG]iB of host memory in a rank; "
        f"its record is in {run.run_folder}",
        run.stderr.splitlines()[-1],
    )
    status = run_command((sys.executable, "-m", "zerofit", "runs", "status"), run.folder).check().stdout
    assert "ranks:  1, step 2 of 2\n" in status
