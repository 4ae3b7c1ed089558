"""zerofit explain as a user runs it: a log, a folder, standard input, a run folder."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path

import pytest
from zerofit_in_process import run_in_process

from zerofit.cli.explain import explained
from zerofit.cli.output.explanation import short_lines
from zerofit.launching.explain import CauseConfidence
from zerofit.launching.explain_run import TRACE_PREFIX, explain_run, stuck_collectives
from zerofit.launching.failures import Role

_FULL = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
_LOST = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.1]:29500\n"


def _explain(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_in_process(("explain", *arguments), cwd=Path.cwd(), stdin=stdin)


def test_log_ends_with_cause_line_and_what_to_type(tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text(_LOST + _FULL)
    done = _explain(str(log))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"also:   another rank has gone  ({log}:1)",
        "cause:  out of GPU memory, rank 1  [gpu-out-of-memory, confidence high]",
        f"line:   {log}:2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "why:    weights, gradients, optimizer states and activations together need more than the GPU has",
        "next:   zerofit plan --gpus 8xA100-80G SCRIPT, with the GPUs that the run had, names the strategy "
        "that fits; by hand: halve the micro-batch and double the accumulation, switch on gradient "
        "checkpointing, raise the ZeRO stage (on several GPUs)",
    ]


def test_folder_and_standard_input_as_json(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "stderr.log").write_text(_FULL.removeprefix("[rank1]: "))
    (tmp_path / "weights.bin").write_bytes(_LOST.encode())
    of_folder = json.loads(_explain(str(tmp_path), "--json").stdout)
    of_stdin = json.loads(_explain("-", "--json", stdin=_LOST + _FULL).stdout)
    assert (of_folder["cause"]["id"], of_folder["cause"]["at"]["rank"]) == ("gpu-out-of-memory", 0)
    assert of_folder["files"] == ["0/stderr.log"]
    assert (of_stdin["failed"], of_stdin["cause"]["id"]) == (True, "gpu-out-of-memory")


def test_log_of_a_successful_run() -> None:
    done = _explain("-", stdin="loss 2.0\nsaved\n")
    assert (done.returncode, done.stdout) == (0, "no failure in stdin\n")


def test_what_a_launcher_says_of_its_ranks_is_no_other_failure(tmp_path: Path) -> None:
    failed = "E1129 04:00:03 api.py:882] failed (exitcode: 1) local_rank: 1 (pid: 4304) of binary: python\n"
    assert "also:" not in _explain("-", stdin=_FULL + failed).stdout
    alone = _explain("-", stdin=failed).stdout
    assert alone.startswith("cause:  a rank failed, and this log does not show why")


@pytest.mark.parametrize("place", ["-", "empty.log", "."])
def test_where_no_log_has_a_line_there_is_nothing_to_explain(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").touch()
    done = _explain(place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[log-empty]: there is nothing to explain\n  found: no line in ")


@pytest.mark.parametrize(("name", "error"), [("", "no-logs"), ("absent.log", "log-not-readable")])
def test_an_unreadable_log_is_named(tmp_path: Path, name: str, error: str) -> None:
    done = _explain(str(tmp_path / name))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error[{error}]: ")
    assert str(tmp_path / name) in done.stderr


def _run(runs: Path, name: str, *, exit_code: int, log: str = "", stage: int = 2, **end: object) -> Path:
    folder = runs / name
    (folder / "logs").mkdir(parents=True)
    (folder / "ranks").mkdir()
    (folder / "command.sh").write_text("#!/bin/sh\n")
    (folder / "plan.json").write_text(json.dumps({"strategy": {"zero_stage": stage}, "versions": {}}))
    (folder / "run.json").write_text(json.dumps({"exit_code": exit_code, **end}))
    (folder / "logs" / "rank0.log").write_text(log)
    return folder


def test_run_folder_is_compared_with_the_last_good_run(tmp_path: Path) -> None:
    _run(tmp_path, "2026-01-01_00-00-00-train", exit_code=0, stage=1)
    _run(tmp_path, "2026-01-02_00-00-00-train", exit_code=0, stage=3)
    _run(tmp_path, "2026-01-03_00-00-00-other", exit_code=0)
    bad = _run(tmp_path, "2026-01-04_00-00-00-train", exit_code=1, log=_FULL, cause="rank 0 exited with 1")
    _run(tmp_path, "2026-01-05_00-00-00-train", exit_code=0)
    found = explain_run(bad)
    assert found.good_run == "2026-01-02_00-00-00-train"
    assert found.differences == ("strategy.zero_stage: 3 then, 2 now",)
    lines = _explain(str(bad)).stdout.splitlines()
    assert lines[0].endswith("the last good run: strategy.zero_stage: 3 then, 2 now")
    assert "line:   logs/rank0.log:1: torch.OutOfMemoryError" in lines[2]


def test_run_that_ended_well_did_not_fail(tmp_path: Path) -> None:
    good = _run(tmp_path, "2026-01-01_00-00-00-train", exit_code=0, log=_FULL)
    assert explain_run(good).explanation.cause is None


@pytest.mark.parametrize("start", ["recovery-1", "requeue-1"])
def test_last_start_of_a_run_is_explained(tmp_path: Path, start: str) -> None:
    run = _run(tmp_path, "2026-01-01_00-00-00-train", exit_code=1, log=_FULL)
    full = "OSError: [Errno 28] No space left on device\n"
    _run(run, start, exit_code=1, log=full)
    cause = explain_run(run).explanation.cause
    assert cause is not None
    assert cause.failure.id == "disk-full"
    assert cause.at.file == f"{start}/logs/rank0.log"


@pytest.mark.parametrize(
    ("kind", "sentence", "log", "failure"),
    [
        ("hang", "hang: x", "", "hang"),
        ("signal", "stopped by SIGINT", "", "cancelled"),
        ("signal", "rank 1 was killed by signal 9 (SIGKILL)", _LOST, "killed"),
        (
            "host-out-of-memory",
            "rank 1 ran out of host memory, in forward of step 2, and the kernel killed it; the limit of its "
            "cgroup is 1.5 GiB",
            "[rank1]: Signal 9 (SIGKILL) received by PID 7\n",
            "host-out-of-memory",
        ),
        ("signal", "rank 1 was killed by signal 11 (SIGSEGV)", "", "segmentation-fault"),
        (
            "script-error",
            "rank 1 ended with exit code 0 after 5 steps, and rank 0, still training, lost its "
            "connection to it",
            _LOST,
            "lost-peer-uneven",
        ),
        ("signal", "rank 1 was killed by signal 9 (SIGKILL)", _FULL, "gpu-out-of-memory"),
    ],
)
def test_the_launch_gives_the_cause_if_logs_show_none(
    tmp_path: Path, kind: str, sentence: str, log: str, failure: str
) -> None:
    run = _run(tmp_path, "2026-01-01_00-00-00-train", exit_code=1, kind=kind, cause=sentence, log=log, rank=1)
    cause = explain_run(run).explanation.cause
    assert cause is not None
    assert (cause.failure.id, cause.at.rank) == (failure, 1)
    is_root = cause.failure.role is Role.ROOT
    assert cause.confidence is (CauseConfidence.HIGH if is_root else CauseConfidence.LOW)


def test_launch_adds_the_cause_of_a_known_failure_alone(tmp_path: Path) -> None:
    known = _run(tmp_path, "2026-01-01_00-00-00-a", exit_code=1, log=_FULL)
    own = _run(tmp_path, "2026-01-01_00-00-00-b", exit_code=1, log="ValueError: mine\n")
    lines = short_lines(explain_run(known))
    assert lines is not None
    assert [line.split(":")[0].strip() for line in lines.splitlines()] == ["cause", "line", "next"]
    assert short_lines(explain_run(own)) is None


def _dump(number: int, name: str = "nccl:all_reduce") -> dict[str, object]:
    entry = {"process_group": ("0", "default_pg"), "collective_seq_id": number, "profiling_name": name}
    return {"entries": [{**entry, "state": "scheduled", "is_p2p": False}]}


def test_flight_recorder_names_the_rank_that_did_not_come() -> None:
    assert list(stuck_collectives({0: _dump(7), 1: _dump(6, "nccl:broadcast")})) == [
        "rank 1 never called nccl:all_reduce number 7 of group 0/default_pg: "
        "its last was number 6, nccl:broadcast, scheduled"
    ]
    assert list(stuck_collectives({0: _dump(7), 1: _dump(7, "nccl:broadcast")})) == [
        "group 0/default_pg: ranks disagree on collective number 7: rank 0 calls nccl:all_reduce, "
        "rank 1 calls nccl:broadcast"
    ]
    assert list(stuck_collectives({0: _dump(7), 1: _dump(7)})) == []


def _timeout(rank: int, number: int, kind: str = "ALLREDUCE", group: str = "") -> str:
    return (
        f"[rank{rank}]:[E1124 12:00:00.1 ProcessGroupNCCL.cpp:685] [{group}Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, Timeout(ms)=600000) ran for "
        "600009 milliseconds before timing out.\n"
    )


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            _timeout(0, 7) + _timeout(3, 7) + _timeout(1, 6, "BROADCAST"),
            [
                "rank 1 waited in collective number 6, BROADCAST, behind ranks 0, 3 in number 7, ALLREDUCE",
                "the log has no failure of rank 2, nor of any rank above 3: only their own logs tell "
                "where they were",
            ],
        ),
        (
            _timeout(0, 7) + "[rank1]: ValueError: mine\n",
            [
                "rank 1 reported another failure and no time-out, while rank 0 waited in collective number "
                "7, ALLREDUCE: look there"
            ],
        ),
        (_timeout(0, 7) + _timeout(1, 7), []),
        (_timeout(0, 7, group="PG GUID 0(default_pg) ") + _timeout(1, 2, group="PG GUID 1 "), []),
    ],
)
def test_a_timeout_of_nccl_names_the_rank_that_the_others_waited_for(
    tmp_path: Path, log: str, expected: list[str]
) -> None:
    (tmp_path / "job.log").write_text(log)
    assert list(explained(str(tmp_path / "job.log")).collectives) == expected


def test_dump_of_a_flight_recorder_runs_no_code(tmp_path: Path) -> None:
    run = _run(tmp_path, "2026-01-01_00-00-00-train", exit_code=1, log=_FULL)
    (run / "ranks" / f"{TRACE_PREFIX}0").write_bytes(pickle.dumps(_dump(7)))
    (run / "ranks" / f"{TRACE_PREFIX}1").write_bytes(pickle.dumps(_dump(6)))
    (run / "ranks" / f"{TRACE_PREFIX}2").write_bytes(pickle.dumps(Path("x")))
    assert len(explain_run(run).collectives) == 1


@pytest.mark.parametrize(
    "line",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "wandb.errors.CommError: Socket closed",
        "paramiko.ssh_exception.SSHException: Broken pipe",
        "redis.exceptions.TimeoutError: Socket Timeout",
    ],
)
def test_a_run_of_one_rank_has_lost_no_other(tmp_path: Path, line: str) -> None:
    log = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n{line}\n'
    causes = {}
    for world_size in (1, 2):
        folder = _run(tmp_path, f"{world_size}", exit_code=1, log=log, cause="rank 0 exited with 1")
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps({**plan, "topology": {"world_size": world_size}}))
        found = explain_run(folder).explanation.cause
        assert found is not None
        causes[world_size] = found.failure
    assert causes[1].cause == f"the script raised {line.partition(':')[0].rpartition('.')[2]}"
    assert causes[2].role is Role.CASCADE


def test_each_line_of_an_explanation_fits_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.2 GiB is free."
    frame = '  File "/home/me/a/folder/with/quite/a/long/name/train.py", line 8, in step\n'
    (tmp_path / "a.log").write_text(
        f"Traceback (most recent call last):\n{frame}    loss.backward()\n"
        f"torch.OutOfMemoryError: CUDA out of memory. {long}\n"
    )
    printed = _explain(str(tmp_path / "a.log")).stdout
    lines = printed.splitlines()
    assert [line for line in lines if len(line) > 80 and len(max(line.split(), key=len)) < 60] == []
    assert long in " ".join(printed.split())


@pytest.mark.parametrize(
    ("place", "code", "says"),
    [
        (
            "in __getitem__",
            "return self.rows[i]['text']",
            "print the sample's keys in front of the line that raised it",
        ),
        ("in __iter__", "yield row['text']", "print the sample's keys in front of the line that raised it"),
        ("in tokenize", "return tokenizer(rows['text'])", "print(dataset.column_names)"),
    ],
)
def test_column_names_are_offered_of_the_librarys_data_sets_alone(place: str, code: str, says: str) -> None:
    log = (
        f'Traceback (most recent call last):\n  File "/me/data.py", line 8, {place}\n'
        f"    {code}\nKeyError: 'text'\n"
    )
    (fix,) = [line for line in _explain("-", stdin=log).stdout.splitlines() if line.startswith("next:")]
    assert says in fix
    assert ("column_names" in fix) is ("tokenize" in place)
