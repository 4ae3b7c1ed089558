"""Parts: no written result is lost, one run writes at a time, and nothing of the user's is touched."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from zerofit.core.errors import UserError
from zerofit.generation.results.parts import PartFiles, check_claim, claim, kept_batch_size, parts_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def document(index: int) -> dict[str, Any]:
    return {"index": index, "completions": [{"text": f"{index}: Straße, \n, 雪", "tokens": [index, 7]}]}


def begin(
    out: Path, *, fingerprint: str = "F", rank: int = 0, world_size: int = 1, resume: bool = True
) -> PartFiles:
    return PartFiles(out, fingerprint=fingerprint, rank=rank, world_size=world_size, resume=resume)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def test_results_stand_in_input_order_and_nothing_else_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out, world_size=2) as first, begin(out, rank=1, world_size=2) as second:
        second.write([document(3), document(0)])
        first.write([document(2)])
        second.write([])
        first.write([document(1)])
        first.assemble(4)
    assert lines_of(out) == [document(index) for index in range(4)]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_out_gets_what_the_caller_says_of_each_document(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(1), document(0)])
        parts.assemble(2, describe=lambda one: {"id": f"p{one['index']}"})
    assert out.read_text() == '{"id": "p0"}\n{"id": "p1"}\n'


def test_text_stays_readable_and_what_is_no_unicode_is_escaped(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([{"index": 0, "text": "雪\u2028"}, {"index": 1, "text": "\ud83d"}])
        parts.assemble(2)
    assert out.read_bytes().decode() == '{"index": 0, "text": "雪\u2028"}\n{"index": 1, "text": "\\ud83d"}\n'


def test_what_a_user_put_among_the_parts_stays(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(0)])
        (parts.folder / "notes.txt").write_text("mine")
        parts.assemble(1)
    assert tree(tmp_path / "out.jsonl.parts") == {"notes.txt": b"mine"}


def test_a_run_that_ended_before_its_first_result_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out, world_size=2), begin(out, rank=1, world_size=2):
        pass
    assert os.listdir(tmp_path) == []
    with begin(out) as parts:
        parts.write([document(0)])
    before = tree(tmp_path)
    with begin(out):
        pass
    assert tree(tmp_path) == before


def test_what_was_written_is_there_for_a_run_with_another_number_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out, world_size=2) as first, begin(out, rank=1, world_size=2) as second:
        assert dict(first.done) == {}
        first.write([document(0)])
        second.write([document(2)])
    before = tree(tmp_path)
    with begin(out) as again:
        assert dict(again.done) == {0: document(0), 2: document(2)}
        again.write([document(1)])
        assert before.items() <= tree(tmp_path).items(), "files of an earlier start are never written"
        again.assemble(3)
    assert lines_of(out) == [document(index) for index in range(3)]


def test_of_two_results_of_a_prompt_the_first_counts(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    num_starts = 12
    for start in range(num_starts):
        with begin(out) as parts:
            parts.write([{"index": 0, "start": start}, {"index": 0, "start": "again"}])
    with begin(out) as parts:
        parts.write([{"index": 0, "start": num_starts}, {"index": 1}])
        assert dict(parts.done) == {0: {"index": 0, "start": 0}}, "a start's own results are not done before"
        parts.assemble(2)
    assert lines_of(out) == [{"index": 0, "start": 0}, {"index": 1}]


@pytest.mark.parametrize(
    "end",
    [
        b'{"index": 1, "te',
        b'{"index": 1}',
        b"\0\0\0\0",
        b"\0\0\n",
        b"[1]\n",
        b'{"index": -1}\n',
        b"\n",
        b"7\n",
    ],
)
def test_what_is_no_whole_document_is_no_result(tmp_path: Path, end: bytes) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(0)])
    with (tmp_path / "out.jsonl.parts" / "start1-rank0.jsonl").open("ab") as file:
        file.write(end)
    with begin(out) as parts:
        assert dict(parts.done) == {0: document(0)}


@settings(deadline=None, max_examples=30)
@given(data=some.data(), num_prompts=some.integers(1, 12), num_kills=some.integers(1, 4))
def test_runs_killed_at_any_byte_give_the_whole_file_in_the_end(
    data: some.DataObject, num_prompts: int, num_kills: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        survived: dict[int, dict[str, Any]] = {}
        for _ in range(num_kills):
            world_size = data.draw(some.integers(1, 3))
            ranks = [begin(out, rank=rank, world_size=world_size) for rank in range(world_size)]
            assert survived.items() <= dict(ranks[0].done).items()
            missing = [index for index in range(num_prompts) if index not in ranks[0].done]
            for index in data.draw(some.permutations(missing)):
                ranks[index % world_size].write([document(index)])
            for parts in ranks:
                _cut(data, parts._path)
                parts.close()
            with begin(out) as parts:
                survived = dict(parts.done)
        with begin(out) as parts:
            parts.write(document(index) for index in range(num_prompts) if index not in parts.done)
            parts.assemble(num_prompts)
        assert lines_of(out) == [document(index) for index in range(num_prompts)]
        assert os.listdir(folder) == ["out.jsonl"]


def _cut(data: some.DataObject, path: Path) -> None:
    os.truncate(path, data.draw(some.integers(0, path.stat().st_size)))


def test_what_a_killed_runs_last_rank_still_writes_does_not_mix_with_another_job(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out, fingerprint="old", world_size=2):
        late = begin(out, fingerprint="old", rank=1, world_size=2)
    with begin(out, fingerprint="new") as parts:
        late.write([{"index": 0, "text": "old"}])
        assert dict(parts.done) == {}
        parts.write([{"index": 0, "text": "new"}])
        parts.assemble(1)
    late.close()
    assert lines_of(out) == [{"index": 0, "text": "new"}]


def test_a_file_that_appears_at_out_in_the_meantime_stays_and_so_do_the_parts(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(0)])
        out.write_text("mine")
        with pytest.raises(UserError, match="the file for the results already exists"):
            parts.assemble(1)
    assert out.read_text() == "mine"
    out.unlink()
    with begin(out) as parts:
        parts.assemble(1)
    assert lines_of(out) == [document(0)]


def test_a_missing_result_is_named_and_the_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(2)])
        with pytest.raises(UserError) as raised:
            parts.assemble(9)
    assert (str(raised.value), raised.value.exit_code) == (
        "error[generate-out-not-shared]: not every rank sees the folder of the results\n"
        f"  found: {out}.parts: 8 of 9 results are missing: of prompts 0, 1, 3, 4, 5, ...\n"
        "  why:   each rank writes its results there, and rank 0 merges them\n"
        "  fix:   name a file on a file system that all nodes share; results so far are kept, and the "
        "same command resumes",
        1,
    )
    assert not out.exists()
    with begin(out) as parts:
        assert list(parts.done) == [2]


NOT_SHARED = """\
error[generate-out-not-shared]: not every rank sees the folder of the results
  found: {out}.parts: rank 0 made it, rank 1 does not see it as rank 0 does
  why:   each rank writes its results there, and rank 0 merges them
  fix:   name a file on a file system that all nodes share; results so far are kept, \
and the same command resumes"""


def test_a_rank_on_a_node_with_its_own_disk_is_found_before_anything_is_generated(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with begin(here / "out", world_size=2) as first:
        with pytest.raises(UserError) as raised:
            begin(there / "out", rank=1, world_size=2)
        assert str(raised.value) == NOT_SHARED.format(out=there / "out")
        with pytest.raises(UserError) as raised:
            first.check_ranks()
        assert str(raised.value) == NOT_SHARED.format(out=here / "out")
        with begin(here / "out", rank=1, world_size=2):
            first.check_ranks()
    assert tree(there) == {}


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("missing/out.jsonl", "No such file or directory: {folder}/missing/out.jsonl.parts"),
        ("file/out.jsonl", "Not a directory: {folder}/file/out.jsonl.parts"),
        ("x" * 250 + "/out", "No such file or directory: {folder}/" + "x" * 250 + "/out.parts"),
        ("x" * 252, "File name too long: {folder}/" + "x" * 252 + ".parts"),
    ],
)
def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, place: str, found: str) -> None:
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UserError) as raised:
        begin(tmp_path / place)
    assert str(raised.value) == (
        "error[generate-out-not-writable]: the results can't be written\n"
        f"  found: {found.format(folder=tmp_path)}\n"
        "  why:   each result is written immediately, beside the file that they are merged into at the end\n"
        "  fix:   name a file in an existing, writable folder with enough space; results so far are kept, "
        "and the same command resumes"
    )
    assert tree(tmp_path) == before


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(0)])
        with (
            _room_for(parts.folder / "start1-rank0.jsonl", more_bytes=10),
            pytest.raises(UserError) as raised,
        ):
            parts.write([document(1)])
        assert raised.value.found == f"File too large: {out}.parts/start1-rank0.jsonl"
        parts.write([document(2)])  # by a caller that made room
    with begin(out) as parts:
        assert list(parts.done) == [0, 2]


def test_a_disk_too_small_for_the_whole_file_keeps_the_parts(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(1), document(0)])
        with (
            _room_for(parts.folder / "start1-rank0.jsonl", more_bytes=-1),
            pytest.raises(UserError) as raised,
        ):
            parts.assemble(2)
    assert raised.value.found == f"File too large: {out}"
    assert not out.exists()
    with begin(out) as parts:
        parts.assemble(2)
    assert lines_of(out) == [document(0), document(1)]


@contextlib.contextmanager
def _room_for(path: Path, *, more_bytes: int) -> Iterator[None]:
    """Let no file grow larger than one that is there and some bytes more: the next write is cut there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_results_get_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    before = os.umask(0o027)
    try:
        with begin(out) as parts:
            assert parts.folder.stat().st_mode & 0o777 == 0o750
            assert {path.stat().st_mode & 0o777 for path in parts.folder.iterdir()} == {0o640}
            parts.assemble(0)
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("half", [b"", b'{"index": 0}\n{"in'])
def test_a_run_killed_while_it_put_results_together_is_put_together_anew(tmp_path: Path, half: bytes) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as parts:
        parts.write([document(0), document(1)])
        (parts.folder / "whole.jsonl").write_bytes(half * 100)
    with begin(out) as parts:
        parts.assemble(2)
    assert lines_of(out) == [document(0), document(1)]
    assert os.listdir(tmp_path) == ["out.jsonl"]


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


EXISTS = """\
error[generate-out-exists]: the file for the results already exists
  found: {{out}}: {found}
  why:   it may contain your results, and is never overwritten
  fix:   write to another file, or move that one away"""
OTHERS = """\
error[generate-other-parts]: the unfinished results are from another run
  found: {{out}}.parts: {found}
  why:   the file would mix results of two runs
  fix:   write the results to another file, or, if you don't need the unfinished ones: rm -r {{out}}.parts"""
NOT_OURS = """\
error[generate-parts-not-zerofits]: the folder for unfinished results has other contents
  found: {out}.parts: it has no job.json of `zerofit generate`
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
        OTHERS.format(found="they are from another model, other prompts or other settings"),
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
        "  why:   they are only continued with resume=True\n"
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
                "  why:   two runs would generate each prompt twice\n"
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
