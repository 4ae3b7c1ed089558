"""A scheduler that wants its node back: all ranks save together, and the next start goes on from there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from captures import LOOP, TRAINER
from planning_problems import spec_of
from runs import environment, run_command

from zerofit.core.plan import plan_to_json
from zerofit.core.rank_observation import read_observation
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.launching.clusters.job import Job, job_to_json
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions
from zerofit.planning.plan_from_flags import choose

pytestmark = pytest.mark.faults
_SCRIPTS = Path(__file__).parents[1] / "clusters" / "scripts"
_ENGINES: dict[str, tuple[dict[str, object], tuple[str, str]]] = {
    "ZeRO-2": ({"zero_stage": ZeroStage(2)}, ("--zero-stage", "2")),
    "FSDP2": ({"engine": Engine.FSDP2}, ("--engine", "fsdp2")),
}
"""Settings of a plan, and the flags that say the same."""
_STEPS = 60
_PATIENCE_S = 150


@pytest.mark.parametrize(
    ("script", "capture", "engine"),
    [
        ("loop.py", LOOP, "ZeRO-2"),
        pytest.param("loop.py", LOOP, "FSDP2", marks=pytest.mark.slow),
        pytest.param("trainer.py", TRAINER, "ZeRO-2", marks=pytest.mark.slow),
        ("trainer.py", TRAINER, "FSDP2"),
    ],
)
def test_a_stopped_run_is_saved_and_its_next_start_trains_the_rest(
    tmp_path: Path, built_ops: None, script: str, capture: object, engine: str
) -> None:
    shutil.copy(_SCRIPTS / script, tmp_path)
    target = (script, str(_STEPS), "0.2")
    settings, flags = _ENGINES[engine]
    spec = spec_of(on_cpu=True, num_processes=2, **settings)
    plan = choose(machine=probe_machine(), versions=probe_versions(), spec=spec)
    plan = replace(plan, saves_when_told=True, capture=replace(capture, target=(str(tmp_path / script),)))
    folder = tmp_path / "run"
    folder.mkdir()
    job = Job(
        run="run",
        target=target,
        work_dir=str(tmp_path),
        run_folder=str(folder),
        engine="slurm",
        num_nodes=1,
        code_digest="",
        max_requeues=1,
        join_limit_s=40,
    )
    (folder / "plan.json").write_text(plan_to_json(plan))
    (folder / "job.json").write_text(job_to_json(job))
    command = (sys.executable, "-m", "zerofit.launching.clusters.node", str(folder))
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"))
    until = time.monotonic() + _PATIENCE_S
    while (one := read_observation(folder / "ranks", 0)) is None or one.step < 5:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    (folder / "stop").touch()
    assert process.wait(timeout=60) == 75
    first = json.loads((folder / "run.json").read_text())
    assert (first["kind"], first["exit_code"]) == ("stopped", 75)
    assert all(record["saved_to"] for record in first["ranks"])

    run_command(command, tmp_path, OMP_NUM_THREADS="1").check()
    again = tmp_path / "plain"
    again.mkdir()
    launch = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--num-processes", "2", *flags)
    run_command((*launch, str(_SCRIPTS / script), str(_STEPS), "0"), again, OMP_NUM_THREADS="1").check()
    assert _losses(tmp_path) == _losses(again)


def _losses(place: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (place / "losses.jsonl").read_text().splitlines()]
    assert [line[0] for line in lines] == list(range(1, _STEPS + 1))  # each step once: none was lost
    return lines
