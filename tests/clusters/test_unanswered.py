"""A submission without an answer: the folder of a job that may be queued is kept, and the job is found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from clients import path_with
from runs import Run
from small_runs import PLAN
from zerofit_in_process import run_in_process

from zerofit.core.errors import UserError
from zerofit.core.plan import plan_to_json
from zerofit.launching.clusters import clients as clients_module
from zerofit.launching.clusters import submit as submit_module
from zerofit.launching.clusters.clients import ClusterEngine
from zerofit.launching.clusters.job import Rendered
from zerofit.launching.clusters.submitted import SubmittedJob, now, read_submitted, write_submitted
from zerofit.launching.run_folder import RunFolder

_SCRIPTS = Path(__file__).parent / "scripts"
_NO_CAPTURE = ("--model", "gpt2", "--sequence-length", "64", "--global-batch-size", "8", "--fast")
_ON = {
    "slurm": ("--on", "slurm", "--gpus", "1xA100-80G"),
    "kubernetes": ("--on", "kubernetes", "--image", "i:1", "--gpus", "1xA100-80G"),
    "skypilot": ("--on", "skypilot", "--gpus", "1xA100-80G"),
}
_PROGRAMS = {
    "slurm": ("sbatch", "squeue", "scontrol", "scancel"),
    "kubernetes": ("kubectl",),
    "skypilot": ("sky",),
}
_CHECKS = '[ "$1" = --test-only ] && exit 0; case "$*" in *--dry-run=server*) exit 0;; esac'
"""What a client answers to a check in advance."""
_IS_SUBMIT = 'case "$0 $*" in *"sbatch "*|*"kubectl create"*|*"kubectl --namespace"*create*|*"jobs launch"*)'


def _clients(place: Path, engine: str, *, submits: str, then: str = "exit 1") -> str:
    """Return a PATH with clients that submit by a shell script, and answer anything else by another."""
    script = f'echo "$(basename $0) $*" >>{place}/calls\n{_CHECKS}\n{_IS_SUBMIT}\n{submits}\n;; esac\n{then}'
    return path_with(place, *_PROGRAMS[engine], script=script)


def _submit(place: Path, engine: str, path: str) -> Run:
    shutil.copy(_SCRIPTS / "loop.py", place)
    words = ("submit", *_ON[engine], *_NO_CAPTURE, "loop.py", "8", "0")
    done = run_in_process(words, cwd=place, environment={"PATH": path})
    return Run(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr, folder=place)


def _hand_over(place: Path, engine: str, path: str, patch: pytest.MonkeyPatch, limit_s: float = 60) -> str:
    """Submit by a scheduler's command, without planning; return the id, or the error's."""
    patch.setenv("PATH", path)
    folder = RunFolder(path=place / "zerofit-runs" / "2026-01-01_00-00-00-train")
    folder.path.mkdir(parents=True)
    job = SubmittedJob(engine=ClusterEngine(engine), job_id=None, name=_NAMES[engine], submitted_at=now())
    command = _COMMANDS[engine]
    rendered = Rendered(files={}, command=command, job_name=_NAMES[engine], limit_s=limit_s)
    try:
        return submit_module._handed_over(job, folder, rendered)
    except UserError as error:
        return error.rule


_NAMES = {
    "slurm": "zerofit-x",
    "kubernetes": "trainjob.trainer.kubeflow.org/zf-x",
    "skypilot": "zf-x",
}
_COMMANDS = {
    "slurm": ("sbatch", "job"),
    "kubernetes": ("kubectl", "create", "job"),
    "skypilot": ("sky", "jobs", "launch", "job"),
}


def _folders(place: Path) -> list[Path]:
    return list((place / "zerofit-runs").glob("2*"))


_NO_ID = {
    "slurm": ("exit 0", "echo; exit 0", "echo 'sbatch: queued'; exit 0", "echo --user=root; exit 0"),
    "kubernetes": ("exit 0", "echo configmap/zf; exit 0", "echo 'warning: slow API'; exit 0"),
    "skypilot": ("exit 0", "echo 'Job submitted'; exit 0", "echo 'Job ID: soon'; exit 0"),
}
_UNANSWERED = (
    "kill -9 $$",
    "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
    "echo 'Error from server (Timeout): the server was unable to return a response in time' >&2; exit 1",
    "echo 'Post \"https://k8s/x\": context deadline exceeded' >&2; echo 'exit status 1' >&2; exit 1",
    "echo 'read tcp 10.0.0.1:443: connection reset by peer' >&2; exit 1",
    "echo 'error: Post \"https://k8s\": unexpected EOF' >&2; exit 1",
    "echo 'http.client.RemoteDisconnected: Remote end closed connection without response' >&2; exit 1",
    "echo 'requests.exceptions.ReadTimeout: Read timed out. (read timeout=30)' >&2; exit 1",
    "echo '502 Bad Gateway' >&2; exit 1",
)
_REFUSED = (
    "echo 'sbatch: error: Batch job submission failed: Invalid account or partition combination' >&2; exit 1",
    "echo 'Error from server (Forbidden): jobs is forbidden' >&2; exit 1",
    "echo 'dial tcp 10.0.0.1:6443: i/o timeout' >&2; exit 1",
    "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1",
    "echo 'net/http: TLS handshake timeout' >&2; exit 1",
    "exit 3",
)


@pytest.mark.parametrize(
    ("engine", "submits"), [(engine, way) for engine, ways in _NO_ID.items() for way in ways]
)
def test_an_answer_without_an_id_is_an_error(
    tmp_path: Path, engine: str, submits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _clients(tmp_path, engine, submits=submits)
    assert _hand_over(tmp_path, engine, path, monkeypatch) == "submission-unknown"
    assert len(_folders(tmp_path)) == 1


@pytest.mark.parametrize("engine", _ON)
def test_an_unanswered_submission_is_recorded_with_its_name(same_folder: Path, engine: str) -> None:
    done = _submit(same_folder, engine, _clients(same_folder, engine, submits="exit 0"))
    assert done.exit_code == 1
    assert "error[submission-unknown]" in done.stderr
    assert "exit code 0, printed nothing" in done.stderr
    (folder,) = _folders(same_folder)
    job = read_submitted(folder)
    assert job is not None
    assert (job.job_id, job.engine.value) == (None, engine)
    assert job.name is not None


@pytest.mark.parametrize("engine", _ON)
@pytest.mark.parametrize("submits", _UNANSWERED)
def test_the_folder_of_a_job_that_may_be_queued_is_kept(
    tmp_path: Path, engine: str, submits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _clients(tmp_path, engine, submits=submits)
    assert _hand_over(tmp_path, engine, path, monkeypatch) == "submission-unknown"
    assert len(_folders(tmp_path)) == 1


@pytest.mark.parametrize("engine", _ON)
@pytest.mark.parametrize("submits", _REFUSED)
def test_the_folder_of_a_refused_job_is_removed(
    tmp_path: Path, engine: str, submits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _clients(tmp_path, engine, submits=submits)
    assert _hand_over(tmp_path, engine, path, monkeypatch) in ("scheduler-refused", "scheduler-unreachable")
    assert _folders(tmp_path) == []


_FOUND = {
    "slurm": ("case $0 in *squeue) echo 4711; exit 0;; esac; exit 1", "4711"),
    "kubernetes": ("echo $4; exit 0", "trainjob.trainer.kubeflow.org/zf-"),
    "skypilot": (
        """name=$(sed -n 's/^name: //p' zerofit-runs/2*/job.sky.yaml)
        echo '[{"job_id": 3, "job_name": "zf-other"},'
        echo "{\\"job_id\\": 9, \\"job_name\\": \\"$name\\"}]"
        exit 0""",
        "9",
    ),
}


@pytest.mark.parametrize("engine", _FOUND)
def test_a_queued_job_is_found_by_its_name(same_folder: Path, engine: str) -> None:
    then, job_id = _FOUND[engine]
    if engine == "kubernetes":
        then = 'case "$*" in *"get "*) echo $2; exit 0;; esac; exit 1'
    done = _submit(same_folder, engine, _clients(same_folder, engine, submits="kill -9 $$", then=then))
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(job_id)
    (folder,) = _folders(same_folder)
    assert json.loads((folder / "submitted.json").read_text())["job_id"] == done.stdout.strip()


def test_the_jobs_of_other_folders_with_the_same_name_are_not_taken(same_folder: Path) -> None:
    then = "case $0 in *squeue) echo '8 /elsewhere/job.sbatch'; exit 0;; esac; exit 1"
    done = _submit(same_folder, "slurm", _clients(same_folder, "slurm", submits="kill -9 $$", then=then))
    assert "error[submission-unknown]" in done.stderr
    then = (
        "case $0 in *squeue) echo 8 /x/job.sbatch; echo 9 $(pwd -P)/zerofit-runs/2*/job.sbatch; exit 0;; esac"
    )
    path = _clients(same_folder, "slurm", submits="", then=f"{then}; echo JobState=PENDING Reason=Priority")
    (folder,) = _folders(same_folder)
    status = _runs(same_folder, path, "status", "--json", folder.name)
    assert (json.loads(status.stdout)["job_id"], json.loads(status.stdout)["is_running"]) == ("9", True)
    assert "--job-name=zerofit-" in (folder / "job.sbatch").read_text()


@pytest.mark.parametrize("engine", _ON)
def test_a_client_that_is_too_slow_leaves_the_folder(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _clients(tmp_path, engine, submits=f"touch {tmp_path}/queued; exec sleep 60")
    assert _hand_over(tmp_path, engine, path, monkeypatch, limit_s=1.0) == "submission-unknown"
    assert len(_folders(tmp_path)) == 1
    assert (tmp_path / "queued").exists()


_PRINTED = {
    "slurm": ("echo 4711", "4711"),
    "kubernetes": ("echo configmap/zf; echo trainjob.trainer.kubeflow.org/zf-x", _NAMES["kubernetes"]),
    "skypilot": ("echo 'Managed Job ID: 9'", "9"),
}


@pytest.mark.parametrize(
    "ends", ["echo 'quota hook failed' >&2; exit 1", "exec sleep 60", "exec yes", "exit 0"]
)
@pytest.mark.parametrize("engine", _ON)
def test_an_id_counts_however_its_client_ends(
    tmp_path: Path, engine: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints, job_id = _PRINTED[engine]
    path = _clients(tmp_path, engine, submits=f"{prints}; {ends}")
    assert _hand_over(tmp_path, engine, path, monkeypatch, limit_s=3.0) == job_id
    assert len(_folders(tmp_path)) == 1


@pytest.mark.parametrize("engine", _ON)
def test_a_process_that_a_client_leaves_behind_is_not_waited_for(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints, job_id = _PRINTED[engine]
    path = _clients(tmp_path, engine, submits=f"{prints}; sleep 20 & echo $! >{tmp_path}/left; exit 0")
    began = time.monotonic()
    assert _hand_over(tmp_path, engine, path, monkeypatch) == job_id
    assert time.monotonic() - began < 15
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("prints", ["exec yes", "exec yes >&2", "exec cat /dev/zero"])
def test_a_client_that_prints_without_end_is_ended(
    tmp_path: Path, prints: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "_MOST_BYTES", 1 << 22)
    monkeypatch.setenv("PATH", path_with(tmp_path, "squeue", script=prints))
    with pytest.raises(UserError) as caught:
        clients_module.run_client(("squeue",))
    assert caught.value.found == "`squeue`: it printed over 4 MiB"


def _runs(place: Path, path: str, *words: str) -> Run:
    done = run_in_process(("runs", *words), cwd=place, environment={"PATH": path})
    return Run(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr, folder=place)


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """Return a place with a run whose submission was not answered."""
    folder = tmp_path / "zerofit-runs" / "2026-01-01_00-00-00-train"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(plan_to_json(PLAN))
    write_submitted(
        folder, SubmittedJob(engine=ClusterEngine.SLURM, job_id=None, name="n", submitted_at=now())
    )
    return tmp_path


def test_a_job_that_is_not_found_yet_is_kept(unknown: Path) -> None:
    path = _clients(unknown, "slurm", submits="", then="exit 0")
    status = _runs(unknown, path, "status")
    assert "job:    of unknown id on slurm, not found by its name" in status.stdout
    assert "end:" not in status.stdout
    assert " running " in _runs(unknown, path, "list").stdout
    _runs(unknown, path, "prune", "--keep-last", "0")
    assert len(_folders(unknown)) == 1
    cancel = _runs(unknown, path, "cancel", _folders(unknown)[0].name)
    assert "its job was not found by its name" in cancel.stderr
    assert "scancel" not in (unknown / "calls").read_text()


def test_a_job_that_is_not_found_after_an_hour_is_over(unknown: Path) -> None:
    (folder,) = _folders(unknown)
    job = SubmittedJob(
        engine=ClusterEngine.SLURM, job_id=None, name="n", submitted_at="2026-01-01T00:00:00+00:00"
    )
    write_submitted(folder, job)
    path = _clients(unknown, "slurm", submits="", then="exit 0")
    assert "no longer known to the scheduler" in _runs(unknown, path, "status").stdout
    _runs(unknown, path, "prune", "--keep-last", "0")
    assert _folders(unknown) == []


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("slurm", {"job_id": "--user=root"}),
        ("slurm", {"job_id": "-u root"}),
        ("slurm", {"job_id": "7 8"}),
        ("slurm", {"job_id": "../../etc/passwd"}),
        ("slurm", {"job_id": "7\n"}),
        ("slurm", {"job_id": "\u0667"}),
        ("slurm", {"job_id": ""}),
        ("slurm", {"job_id": 7}),
        ("slurm", {"job_id": "0"}),
        ("kubernetes", {"job_id": "--all"}),
        ("kubernetes", {"job_id": "pods --all/x"}),
        ("kubernetes", {"job_id": "secrets"}),
        ("kubernetes", {"job_id": "jobs/zf", "namespace": "--kubeconfig=/x"}),
        ("kubernetes", {"job_id": "jobs/zf", "namespace": "a b"}),
        ("skypilot", {"job_id": "--all"}),
        ("skypilot", {"job_id": "-a"}),
        ("skypilot", {"job_id": "7,8"}),
        ("slurm", {"job_id": None, "name": "--user=root"}),
        ("shell", {"job_id": "7"}),
    ],
)
def test_what_is_no_job_id_reaches_no_client(
    unknown: Path, engine: str, fields: dict[str, object], verb: str
) -> None:
    (folder,) = _folders(unknown)
    document = {"engine": engine, "job_id": "7", "namespace": None, **fields}
    (folder / "submitted.json").write_text(json.dumps(document))
    path = path_with(
        unknown, *{name for names in _PROGRAMS.values() for name in names}, script="touch $0-ran"
    )
    done = _runs(unknown, path, verb, folder.name)
    assert (done.exit_code, "error[submitted-file-broken]" in done.stderr) == (2, True)
    assert not list((unknown / "bin").glob("*-ran"))


@pytest.mark.parametrize("record", ["fifo", "folder", "zero", "huge"])
def test_a_record_that_is_no_file_is_named(unknown: Path, record: str) -> None:
    (folder,) = _folders(unknown)
    file = folder / "submitted.json"
    file.unlink()
    match record:
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "zero":
            file.symlink_to("/dev/zero")
        case "huge":
            file.write_bytes(b" " * 10_000_000)
    done = _runs(unknown, os.environ["PATH"], "status")
    assert (done.exit_code, "error[submitted-file-broken]" in done.stderr) == (2, True)
