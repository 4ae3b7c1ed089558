"""`zerofit runs status --json`: a run's state as fields, with times that any program can parse."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from captures import TRAINER
from clients import path_with
from small_runs import PLAN

from zerofit.core.plan import plan_to_json
from zerofit.core.rank_observation import LiveFile, Phase
from zerofit.launching.clusters.clients import ClusterEngine
from zerofit.launching.clusters.follow import followed_run, run_status, status_lines
from zerofit.launching.clusters.pace import last_loss
from zerofit.launching.clusters.submitted import SubmittedJob, now, write_submitted

_ENDED = {
    "started_at": "2026-11-28T10:00:00+00:00",
    "ended_at": "2026-11-28T12:30:00+00:00",
    "exit_code": 1,
    "cause": "rank 3 ran out of memory",
    "kind": "out-of-memory",
}
_TIMES = ("submitted_at", "started_at", "ended_at", "updated_at", "eta")


def _run(folder: Path, *, steps: dict[int, int] | None = None, num_steps: int = 0, **record: Any) -> Path:
    """Make a run's folder: ranks by their steps, 2 s each, the last one just now; and its record, if any."""
    folder.mkdir()
    (folder / "plan.json").write_text(plan_to_json(PLAN))
    process = {"host": os.uname().nodename, "pid": os.getpid(), "started_at": psutil.Process().create_time()}
    launcher = {**process, "noted_at": 1_790_000_000.5}
    (folder / "launcher.json").write_text(json.dumps(launcher))
    now = time.time()
    for rank, step in (steps or {}).items():
        live = LiveFile(folder / "ranks", rank)
        numbers = (os.getpid(), step, num_steps, 61, 500, 0, 0, 1)
        live.write(Phase.FORWARD, numbers, (now, 0.0, now - 2.0 * (step - 1)))
    if record:
        (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_a_running_run_has_its_pace_and_its_end(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", steps={0: 41, 1: 42}, num_steps=101)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank0.log").write_text("{'loss': '2.125', 'grad_norm': '1.5', 'epoch': '0.4'}\n")
    status = run_status(followed_run(folder))
    assert (status["is_running"], status["step"], status["num_steps"], status["loss"]) == (
        True,
        41,
        101,
        2.125,
    )
    assert status["s_per_step"] == pytest.approx(2.0, abs=0.01)
    assert status["remaining_s"] == pytest.approx(120, abs=2)
    assert status["started_at"] == "2026-09-21T14:13:20+00:00"
    eta = datetime.fromisoformat(status["eta"]) - datetime.now(UTC)
    assert abs(eta - timedelta(seconds=120)) < timedelta(seconds=5)
    assert (status["ended_at"], status["cause"], status["exit_code"], status["end"]) == (None,) * 4
    (pace,) = (line for line in status_lines(followed_run(folder)) if line.startswith("pace:"))
    assert pace.startswith("pace:   2 s a step, loss 2.125, ends in ")


def test_an_ended_run_has_its_cause_and_no_time_left(tmp_path: Path) -> None:
    status = run_status(followed_run(_run(tmp_path / "run", steps={0: 41}, num_steps=101, **_ENDED)))
    assert {name: status[name] for name in _ENDED} == _ENDED
    assert (status["is_running"], status["remaining_s"], status["eta"]) == (False, None, None)
    assert status["s_per_step"] == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("record", [{}, _ENDED])
@pytest.mark.parametrize("steps", [{}, {0: 1}, {0: 5, 1: 4}])
@pytest.mark.parametrize("num_steps", [0, 10])
def test_every_status_has_the_same_fields_and_times_with_a_zone(
    tmp_path: Path, record: dict[str, Any], steps: dict[int, int], num_steps: int
) -> None:
    status = run_status(followed_run(_run(tmp_path / "run", steps=steps, num_steps=num_steps, **record)))
    assert list(status) == list(run_status(followed_run(_run(tmp_path / "other"))))
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    for name in _TIMES:
        if status[name] is not None:
            assert datetime.fromisoformat(status[name]).tzinfo is not None
    known = bool(num_steps and not record and steps.get(0, 0) > 1)
    assert (status["eta"] is not None) == known


def test_the_steps_of_a_plan_count_where_the_script_says_none(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", steps={0: 5})
    capture = replace(TRAINER, trainer_arguments={"max_steps": 90}, steps_done=0)
    (folder / "plan.json").write_text(plan_to_json(replace(PLAN, capture=capture)))
    status = run_status(followed_run(folder))
    assert (status["num_steps"], status["remaining_s"]) == (90, pytest.approx(170, abs=2))


def test_a_waiting_job_has_the_time_of_its_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _run(tmp_path / "run")
    (folder / "launcher.json").unlink()
    write_submitted(folder, SubmittedJob(engine=ClusterEngine.SLURM, job_id="7", submitted_at=now()))
    monkeypatch.setenv("PATH", path_with(tmp_path, "squeue", script="echo 7 PENDING Priority"))
    status = run_status(followed_run(folder))
    assert (status["scheduler"], status["job_id"], status["started_at"]) == ("slurm", "7", None)
    since = datetime.now(UTC) - datetime.fromisoformat(status["submitted_at"])
    assert timedelta(0) <= since < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("{'loss': 0.6931, 'learning_rate': 5e-05, 'epoch': 0.1}", 0.6931),
        ("{'loss': '0.6931', 'grad_norm': '2', 'epoch': '1'}", 0.6931),
        ("epoch 1 step 40 | loss 2.5 | lr 1e-4", 2.5),
        ("Epoch 0:  40%|████      | 4/10 [00:02<00:03, 1.9it/s, loss=1.25e-1]", 0.125),
        ("train_loss: 3.5", 3.5),
        ("train/loss = 3.5", 3.5),
        ("Loss: tensor(7.25, grad_fn=<NllLossBackward0>)", 7.25),
        ('{"step": 3, "loss": 1.5}', 1.5),
        ("loss: nan", "nan"),
        ("loss=inf", "inf"),
        ("loss 2.5\n{'eval_loss': 9.0, 'eval_runtime': 3}", 2.5),
        ("loss 2.5\nvalidation loss: 9.0", 2.5),
        ("loss 2.5\nloss_fn = CrossEntropyLoss()", 2.5),
        ("loss 3.5\nloss 2.5", 2.5),
        ("{'train_runtime': 12.5, 'train_loss': 2.5}", 2.5),
        ("a loss of precision: 2 values", None),
        ("lossless 3.0", None),
        ("weight loss program", None),
        ("", None),
    ],
)
def test_the_last_loss_is_read_as_scripts_print_it(
    tmp_path: Path, line: str, loss: float | str | None
) -> None:
    log = tmp_path / "rank0.log"
    log.write_text(f"step 1\n{line}\n")
    assert last_loss(log) == loss


def test_a_long_log_is_read_from_its_end_in_no_time(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("loss " * 10_000_000 + "\nloss 2.5\n")
    began = time.monotonic()
    assert last_loss(log) == 2.5
    assert time.monotonic() - began < 1
    assert last_loss(tmp_path / "nowhere.log") is None
