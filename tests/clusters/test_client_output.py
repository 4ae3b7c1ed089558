"""What the schedulers' clients print, of any shape, is a state and an id, or none: never an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerofit.launching.clusters import kubernetes, skypilot, slurm
from zerofit.launching.clusters.clients import ENGINES

_JOB = "trainjob.trainer.kubeflow.org/zf-x"
_ROW = {"job_id": 7, "status": "RUNNING", "job_name": "zf-x"}


def _object(*conditions: Any, kind: str = "TrainJob", name: str = "zf-x") -> str:
    return json.dumps({"kind": kind, "metadata": {"name": name}, "status": {"conditions": [*conditions]}})


def _condition(
    of: str, status: str = "True", at: str = "2026-01-01T00:00:00Z", **more: str
) -> dict[str, str]:
    return {"type": of, "status": status, "lastTransitionTime": at, **more}


_MISLEADING = "x JobState=COMPLETED Reason=None"
"""A job's name, comment or command, which any user may choose."""
_STATES: tuple[tuple[Any, str, str, str | None], ...] = (
    (slurm, "7 PENDING Priority", "7", "PENDING (Priority)"),
    (slurm, " 7 RUNNING None\r\n", "7", "RUNNING"),
    (slurm, "7 RUNNING", "7", "RUNNING"),
    (
        slurm,
        "7 PENDING ReqNodeNotAvail, UnavailableNodes:n1",
        "7",
        "PENDING (ReqNodeNotAvail, UnavailableNodes:n1)",
    ),
    (slurm, "module loaded\n17 COMPLETED None\n7 RUNNING None\n71 FAILED None", "7", "RUNNING"),
    (slurm, f"JobId=7 JobName={_MISLEADING} UserId=me(1) JobState=RUNNING Reason=None", "7", None),
    (slurm, "17 COMPLETED None", "7", None),
    (slurm, "7|RUNNING", "7", None),
    (kubernetes, '{"kind": "TrainJob", "metadata": {"name": "zf-x"}}', _JOB, "Running"),
    (
        kubernetes,
        '{"kind": "TrainJob", "metadata": {"name": "zf-x"}, "status": {"conditions": null}}',
        _JOB,
        "Running",
    ),
    (kubernetes, _object(_condition("Suspended", "False")), _JOB, "Running"),
    (kubernetes, _object(_condition("Complete")), _JOB, "Complete"),
    (
        kubernetes,
        _object(_condition("Failed", reason="Deadline"), _condition("Started")),
        _JOB,
        "Failed (Deadline)",
    ),
    (
        kubernetes,
        _object(_condition("Suspended"), _condition("Resumed", at="2026-01-02T00:00:00Z")),
        _JOB,
        "Resumed",
    ),
    (kubernetes, _object(_condition("Complete"), kind="JobSet"), _JOB, None),
    (kubernetes, _object(_condition("Complete"), name="zf-y"), _JOB, None),
    (kubernetes, _object(None), _JOB, None),
    (kubernetes, '{"kind": "List", "metadata": {"resourceVersion": ""}, "items": []}', _JOB, None),
    (kubernetes, '{"kind": "TrainJobList", "metadata": {"name": "zf-x"}, "items": []}', _JOB, None),
    (kubernetes, '{"items": []}', _JOB, None),
    (kubernetes, "{}", _JOB, None),
    (skypilot, f"[12]\n[]\n{json.dumps([_ROW], indent=2)}", "7", "RUNNING"),
    (
        skypilot,
        json.dumps([{**_ROW, "job_id": 8, "job_name": '[{"job_id": 7, "status": "FAILED"}]'}, _ROW]),
        "7",
        "RUNNING",
    ),
    (skypilot, "[]", "7", None),
    (skypilot, f"[1/2] asks its server\n{json.dumps([_ROW], indent=2)}\nsee: sky jobs logs", "7", "RUNNING"),
    (skypilot, f"\x1b[32m{json.dumps([_ROW])}\x1b[0m", "7", "RUNNING"),
    (skypilot, json.dumps([{"job_id": ["x"]}, {"status": 3}, None, _ROW]), "7", "RUNNING"),
    (skypilot, json.dumps([{**_ROW, "job_id": "7", "status": None}]), "7", None),
)


@pytest.mark.parametrize(("scheduler", "output", "job_id", "state"), _STATES)
def test_the_state_is_found_among_whatever_else_is_printed(
    scheduler: Any, output: str, job_id: str, state: str | None
) -> None:
    assert scheduler.state_of(output, job_id) == state


_IDS: tuple[tuple[Any, str, str | None], ...] = (
    (slurm, "sbatch: lua: checked\n12\r\n", "12"),
    (slurm, "Submitted batch job 12 on cluster a", "12"),
    (slurm, "12;a", "12"),
    (slurm, "12 13", None),
    (kubernetes, f"configmap/zf-x\n{_JOB}\r\n", _JOB),
    (kubernetes, f"{_JOB} created", None),
    (skypilot, "Managed Job ID: \x1b[1m7\x1b[0m", "7"),
    (skypilot, "Job ID: soon", None),
)


@pytest.mark.parametrize(("scheduler", "output", "job_id"), _IDS)
def test_the_id_is_found_among_whatever_else_is_printed(
    scheduler: Any, output: str, job_id: str | None
) -> None:
    assert scheduler.job_id_of(output) == job_id


_STRANGE = ("", "\0", "null", "7.0", '"x"', "[null]", "[[]]", "{}", "[{}]", "[" * 100_000, "[\n" * 100_000)
_STRANGE += ("9" * 6000, f"[{'9' * 6000}]", "\ud800", '[{"job_id": 1e999}]', '{"status": []}', "Job ID: ")
_STRANGE += (
    "JobState= Reason=",
    "7 running",
    '[{"status": "\\ud800"}]',
    '{"status": {"conditions": [{"status": true}]}}',
)


@pytest.mark.parametrize("scheduler", ENGINES.values(), ids=ENGINES)
def test_output_of_no_known_shape_is_no_error(scheduler: Any) -> None:
    for output in _STRANGE:
        assert scheduler.job_id_of(output) is None
        assert scheduler.state_of(output, "7") is None
        assert scheduler.found_ids(output, "zf-x", Path("x")) == ()
