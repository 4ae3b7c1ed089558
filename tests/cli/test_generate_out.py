"""zerofit generate's results: what is continued, refused and said, and that a refusal writes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dry_runs import LINE as _LINE
from dry_runs import dry_run as _run
from dry_runs import error_of as _error
from dry_runs import job_of as _job
from dry_runs import leave_unfinished as _unfinished
from dry_runs import written as _written

from zerofit.generation.results import RankFile
from zerofit.launching.generate.output import kept_words


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_unfinished_results_of_another_kind_stop_the_run_before_it_starts(
    generate_folder: Path, more: list[str]
) -> None:
    _unfinished(_job(_LINE), fingerprint="other")
    assert _error(_LINE, *more).rule == "generate-other-parts"
    assert not (generate_folder / "zerofit-runs").exists()


def test_a_run_that_is_going_on_stops_another_and_its_dry_run(generate_folder: Path) -> None:
    job = _job(_LINE)
    with RankFile(Path(job["out"]), run=job["fingerprint"], rank=0, resume=True, batch_size=2) as file:
        file.write([{"index": 1}])
        assert _error(_LINE).rule == "generate-out-in-use"
        assert _error(_LINE, "--dry-run").rule == "generate-out-in-use"


def test_a_dry_run_reports_finished_prompts(generate_folder: Path) -> None:
    _unfinished(_job(_LINE))
    assert _run(_LINE).stderr.splitlines()[-1] == "zerofit: 1 of 2 prompts are already done"


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ("--run-dir prompts.txt", "run-folder-not-writable"),
        ("--out " + "x" * 252, "generate-out-not-writable"),
        ("--out " + "x" * 252 + " --do-sample", "generate-out-not-writable"),
        ("--out " + "x" * 252 + " --dry-run", "generate-out-not-writable"),
    ],
)
def test_a_run_that_can_not_start_leaves_nothing(generate_folder: Path, more: str, rule: str) -> None:
    before = sorted(generate_folder.rglob("*"))
    assert _error(_LINE, *more.split()).rule == rule
    assert sorted(generate_folder.rglob("*")) == before


def test_node_0_alone_looks_at_unfinished_results(generate_folder: Path) -> None:
    """A copy of the model on another node has files of another time, and so another fingerprint."""
    line = _LINE + " --num-machines 2 --num-processes 2 --main-process-ip 10.0.0.1 --main-process-port 29500"
    line += " --zero-stage 3 --param-offload none --batch-size 1 --dtype fp32 --machine-rank"
    _unfinished(_job(_LINE), fingerprint="other")
    assert _error(f"{line} 0").rule == "generate-other-parts"
    assert _job(f"{line} 1")


_SAMPLED = _LINE + " --do-sample"


def test_sampling_goes_on_in_the_batches_in_which_it_began(generate_folder: Path) -> None:
    on_two_ranks = _SAMPLED + " --num-processes 2 --zero-stage 3"
    job = _job(_SAMPLED)
    assert (job["batch_size"], _job(on_two_ranks)["batch_size"]) == (2, 1)
    _unfinished(job)
    again = _job(on_two_ranks)
    assert (again["batch_size"], again["fingerprint"]) == (2, job["fingerprint"])
    refused = _error(_SAMPLED, "--batch-size", "1")
    assert refused.rule == "generate-other-parts"
    assert refused.fix.endswith("if only batches differ: --batch-size 2")


def test_unfinished_batches_that_no_longer_fit_are_reported(generate_folder: Path) -> None:
    _unfinished({**_job(_SAMPLED), "batch_size": 10**12})
    refused = _error(_SAMPLED)
    assert refused.rule == "nothing-fits"
    assert refused.fix.endswith("or write to another --out: the unfinished results fix the batch size")


def test_greedy_goes_on_in_any_batches(generate_folder: Path) -> None:
    _unfinished({**_job(_LINE), "batch_size": 10**12})
    assert _job(_LINE)["batch_size"] == 2


def test_results_that_a_killed_run_made_whole_are_kept(generate_folder: Path) -> None:
    job = _job(_LINE)
    _unfinished(job)
    (generate_folder / "out.jsonl").write_text("{}\n")
    assert _error(_LINE).fix == "write to another file, or move that one away"
    assert (generate_folder / "out.jsonl").read_text() == "{}\n"


def test_a_dry_run_shows_the_first_of_many_prompts(generate_folder: Path) -> None:
    line = _LINE.replace("prompts.jsonl", "-")
    shown = _written(_run(line, stdin='"hello"\n' * 25))["prompts.jsonl"].splitlines()
    assert shown[20:] == ["# and 5 more lines", ""]


@pytest.mark.parametrize(
    ("left", "is_named", "expected"),
    [
        ({}, True, ""),
        ({"out.jsonl": "{}\n"}, True, "all results are in OUT"),
        (
            {"out.jsonl.rank0.jsonl": '{"zerofit_run": "F"}\n{"index": 3}\n{"in'},
            True,
            "1 of 9 prompts are done: the same command resumes",
        ),
        (
            {"out.jsonl.rank0.jsonl": '{"zerofit_run": "F"}\n{"index": 3}\n{"in'},
            False,
            "1 of 9 prompts are done: the same command with --out OUT resumes",
        ),
    ],
)
def test_a_stopped_run_reports_the_kept_results(
    tmp_path: Path, left: dict[str, str], is_named: bool, expected: str
) -> None:
    out = tmp_path / "out.jsonl"
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    assert kept_words(out, num_prompts=9, is_named=is_named) == expected.replace("OUT", str(out))


_COPY = """
import sys
from pathlib import Path
from zerofit.launching.generate.output import copy_to_stdout
from zerofit.core.errors import UserError
try:
    copy_to_stdout(Path(sys.argv[1]))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("reader", "exit_code", "found"), [("gone", 141, "Broken pipe"), ("full", 1, "No space left on device")]
)
def test_results_that_cannot_be_printed_are_in_their_file(
    tmp_path: Path, reader: str, exit_code: int, found: str
) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text("{}\n")
    if reader == "gone":
        read_end, stdout = os.pipe()
        os.close(read_end)
    else:
        stdout = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-c", _COPY, str(out)]
    finished = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(stdout)
    assert (finished.returncode, finished.stderr) == (
        exit_code,
        "error[generate-stdout-not-writable]: the results can't be written to standard output\n"
        f"  found: --out -: {found}\n"
        "  why:   its reader has exited, or its disk is full\n"
        f"  fix:   all results are in {out}\n",
    )
