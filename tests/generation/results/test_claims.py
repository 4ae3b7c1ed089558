"""The folder of unfinished results: one run at a time, of one job, never in place of what the user has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zerofit.core.errors import UserError
from zerofit.generation.results.parts import check_claim, claim, kept_batch_size, parts_folder

if TYPE_CHECKING:
    from collections.abc import Callable


def take(out: Path, *, fingerprint: str = "F", resume: bool = True) -> None:
    """Claim the folder, and let go of it again."""
    os.close(claim(out, fingerprint=fingerprint, resume=resume))


def leave_result(out: Path, *, fingerprint: str = "F", job: str | None = None) -> None:
    """Leave what a run leaves that was killed after its first result."""
    take(out, fingerprint=fingerprint)
    (parts_folder(out) / "start1-rank0.jsonl").write_text('{"index": 0}\n')
    if job is not None:
        (parts_folder(out) / "job.json").write_text(job)


def leave_whole(out: Path) -> None:
    """Leave what a run leaves that was killed before all its results got their name."""
    leave_result(out)
    (parts_folder(out) / "whole.jsonl").write_text('{"index": 0}\n')


def make_folder(out: Path, files: dict[str, str]) -> None:
    parts_folder(out).mkdir()
    for name, text in files.items():
        (parts_folder(out) / name).write_text(text)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


EXISTS = """\
error[generate-out-exists]: the file for the results is there already
  found: {{out}}: {found}
  why:   it may hold results of yours, and they are never written over
  fix:   write to another file, or move that one away"""
OTHERS = """\
error[generate-other-parts]: the unfinished results there are those of another run
  found: {{out}}.parts: {found}
  why:   a file would get results of two kinds
  fix:   write the results to another file, or, if you don't need the unfinished ones: rm -r {{out}}.parts"""
NOT_OURS = """\
error[generate-parts-not-zerofits]: the folder for unfinished results is another's
  found: {out}.parts: it holds no job.json of `zerofit generate`
  why:   results are kept there until all are done, and the folder is removed then
  fix:   write the results to another file, or move that folder away"""

REFUSED = {
    "a file at OUT": (lambda out: out.write_text("mine"), EXISTS.format(found="a file")),
    "a folder at OUT": (lambda out: out.mkdir(), EXISTS.format(found="a folder")),
    "a link to nothing at OUT": (
        lambda out: out.symlink_to("nowhere"),
        EXISTS.format(found="a link to nothing"),
    ),
    "an empty file at OUT": (lambda out: out.touch(), EXISTS.format(found="a file")),
    "a file at OUT, with results being put together beside it": (
        lambda out: (leave_whole(out), out.write_text("mine")),
        EXISTS.format(found="a file"),
    ),
    "results of another job": (
        lambda out: leave_result(out, fingerprint="other"),
        OTHERS.format(found="they were made with another model, other prompts or other settings"),
    ),
    "results of another version": (
        lambda out: leave_result(out, job='{"version": 99, "fingerprint": "F", "more": 1}'),
        OTHERS.format(found="another version of zerofit wrote them"),
    ),
    "results of a job that can't be read": (lambda out: leave_result(out, job="\0\0"), NOT_OURS),
    "a folder of the user's": (lambda out: make_folder(out, {"notes.txt": "mine"}), NOT_OURS),
    "a folder with a job.json of the user's": (
        lambda out: make_folder(out, {"job.json": '{"name": "mine"}'}),
        NOT_OURS,
    ),
    "a file in the folder's place": (lambda out: parts_folder(out).write_text("mine"), NOT_OURS),
}


@pytest.mark.parametrize("ask", [check_claim, claim])
@pytest.mark.parametrize(("begun", "error"), REFUSED.values(), ids=REFUSED)
def test_nothing_that_is_there_is_touched(
    begun: Callable[[Path], object], error: str, ask: Callable[..., object], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    begun(out)
    before = tree(tmp_path)
    with pytest.raises(UserError) as raised:
        ask(out, fingerprint="F", resume=True)
    assert str(raised.value) == error.format(out=out)
    assert tree(tmp_path) == before


def test_results_are_continued_only_by_those_who_ask_for_it(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    leave_result(out)
    with pytest.raises(UserError) as raised:
        take(out, resume=False)
    assert str(raised.value) == (
        "error[generate-parts-exist]: there are unfinished results of an earlier run\n"
        f"  found: {out}.parts\n"
        "  why:   they would be continued with resume=True only\n"
        f"  fix:   pass resume=True, write to another file, or, if you don't need them: rm -r {out}.parts"
    )
    take(out, resume=True)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"job.json": ""},
        {"job.json": '{"version": 1, "fingerprint": "another"}', "start1-rank1.jsonl": ""},
    ],
)
def test_a_run_that_was_killed_before_its_first_result_is_in_nobodys_way(
    tmp_path: Path, files: dict[str, str]
) -> None:
    out = tmp_path / "out.jsonl"
    make_folder(out, files)
    take(out, resume=False)
    assert tree(parts_folder(out)) == {
        "job.json": b'{"version": 1, "fingerprint": "F", "batch_size": null}\n'
    }


def test_the_batches_that_results_were_made_in_are_known_as_long_as_there_are_results(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert kept_batch_size(out) is None
    os.close(claim(out, fingerprint="F", resume=True, batch_size=6))
    assert kept_batch_size(out) is None
    (parts_folder(out) / "start1-rank0.jsonl").write_text('{"index": 0}\n')
    assert kept_batch_size(out) == 6
    os.close(claim(out, fingerprint="F", resume=True, batch_size=2))
    assert kept_batch_size(out) == 6


HOLD = """
import sys
from pathlib import Path
from zerofit.generation.results.parts import claim

lock = claim(Path(sys.argv[1]), fingerprint="F", resume=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_one_run_writes_at_a_time_and_a_killed_one_does_not_block_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = tree(tmp_path)
        for ask in (check_claim, claim):
            with pytest.raises(UserError) as raised:
                ask(out, fingerprint="F", resume=True)
            assert str(raised.value) == (
                "error[generate-out-in-use]: another run is writing these results\n"
                f"  found: {out}.parts/job.json is locked by a living process\n"
                "  why:   two runs would do each prompt twice\n"
                "  fix:   wait for it, end it, or write the results to another file"
            )
            assert tree(tmp_path) == before
        holder.kill()
    check_claim(out, fingerprint="F", resume=True)
    take(out)


def test_of_runs_that_start_at_the_same_time_one_has_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", HOLD, str(out)]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            for _ in range(4)
        ]
        said = [run.stdout.readline() for run in runs if run.stdout]
        assert sorted(said) == ["", "", "", "held\n"]
        for run in runs:
            _, stderr = run.communicate()
            assert run.returncode == 0 or "another run is writing these results" in stderr
