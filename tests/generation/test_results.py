"""Results on disk: no written one is lost, one run writes at a time, and nothing of the user's is touched."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from zerofit.core.errors import UserError
from zerofit.generation.results import RankFile, check_results, kept_results, merge, open_results
from zerofit.ranks.exchange import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = '{"zerofit_run": "F", "batch_size": 4}\n'


def document(index: int) -> dict[str, Any]:
    return {"index": index, "completions": [{"text": f"{index}: Straße, \n, 雪", "tokens": [index, 7]}]}


def begin(out: Path, *, run: str = "F", rank: int = 0, resume: bool = True, batch_size: int = 4) -> RankFile:
    return RankFile(out, run=run, rank=rank, resume=resume, batch_size=batch_size)


def rank_file(out: Path, rank: int = 0) -> Path:
    return out.parent / f"{out.name}.rank{rank}.jsonl"


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def kept(out: Path) -> dict[int, dict[str, Any]]:
    return {index: json.loads(line) for index, line in kept_results(out).lines.items()}


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def test_results_stand_in_input_order_and_nothing_else_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as first, begin(out, rank=1) as second:
        second.write([document(3), document(0)])
        first.write([document(2)])
        second.write([])
        first.write([document(1)])
        merge(out, 4)
    assert lines_of(out) == [document(index) for index in range(4)]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_each_rank_has_a_file_of_lines(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as first, begin(out, rank=1) as second:
        first.write([{"index": 0}])
        second.write([{"index": 2}])
        first.write([{"index": 1}])
    assert tree(tmp_path) == {
        "out.jsonl.rank0.jsonl": f'{HEAD}{{"index": 0}}\n{{"index": 1}}\n'.encode(),
        "out.jsonl.rank1.jsonl": f'{HEAD}{{"index": 2}}\n'.encode(),
    }


def test_out_gets_what_the_caller_says_of_each_document(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as file:
        file.write([document(1), document(0)])
        merge(out, 2, describe=lambda result: {"id": f"p{result['index']}"})
    assert out.read_text() == '{"id": "p0"}\n{"id": "p1"}\n'


def test_text_stays_readable_and_what_is_no_unicode_is_escaped(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as file:
        file.write([{"index": 0, "text": "雪\u2028\r"}, {"index": 1, "text": "\ud83d"}])
        merge(out, 2)
    assert (
        out.read_bytes().decode() == '{"index": 0, "text": "雪\u2028\\r"}\n{"index": 1, "text": "\\ud83d"}\n'
    )


def test_a_run_that_ended_before_its_first_result_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out), begin(out, rank=1):
        pass
    assert os.listdir(tmp_path) == []
    with begin(out) as file:
        file.write([document(0)])
    before = tree(tmp_path)
    with begin(out):
        pass
    assert tree(tmp_path) == before


def test_what_was_written_is_there_for_a_run_with_another_number_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as first, begin(out, rank=1) as second:
        first.write([document(0)])
        second.write([document(2)])
    assert kept(out) == {0: document(0), 2: document(2)}
    with begin(out) as again:
        again.write([document(1)])
        merge(out, 3)
    assert lines_of(out) == [document(index) for index in range(3)]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_of_two_results_of_a_prompt_the_first_counts(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as first, begin(out, rank=1) as second:
        first.write([{"index": 0, "by": "first"}, {"index": 0, "by": "again"}])
        second.write([{"index": 0, "by": "second"}, {"index": 1}])
        merge(out, 2)
    assert lines_of(out) == [{"index": 0, "by": "first"}, {"index": 1}]


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
    with begin(out) as file:
        file.write([document(0)])
    with rank_file(out).open("ab") as broken:
        broken.write(end)
    assert kept(out) == {0: document(0)}
    with begin(out) as file:
        file.write([document(1)])
        merge(out, 2)
    assert lines_of(out) == [document(0), document(1)]


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
            assert survived.items() <= kept(out).items()
            missing = [index for index in range(num_prompts) if index not in kept(out)]
            with contextlib.ExitStack() as stack:
                ranks = [stack.enter_context(begin(out, rank=rank)) for rank in range(world_size)]
                sizes = [file.path.stat().st_size for file in ranks]
                for index in data.draw(some.permutations(missing)):
                    ranks[index % world_size].write([document(index)])
                for file, size in zip(ranks, sizes, strict=True):
                    end = file.path.stat().st_size
                    os.truncate(file.path, data.draw(some.integers(size if survived else 0, end)))
            survived = kept(out)
        with begin(out) as file:
            file.write(document(index) for index in range(num_prompts) if index not in survived)
            merge(out, num_prompts)
        assert lines_of(out) == [document(index) for index in range(num_prompts)]
        assert os.listdir(folder) == ["out.jsonl"]


def test_a_file_that_appears_at_out_in_the_meantime_stays_and_so_do_the_results(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as file:
        file.write([document(0)])
        out.write_text("mine")
        with pytest.raises(UserError, match="the file for the results already exists"):
            merge(out, 1)
    assert out.read_text() == "mine"
    out.unlink()
    merge(out, 1)
    assert lines_of(out) == [document(0)]


def test_a_missing_result_is_named_and_the_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as file:
        file.write([document(2)])
        with pytest.raises(UserError) as raised:
            merge(out, 9)
    assert (str(raised.value), raised.value.exit_code) == (
        "error[generate-out-not-shared]: not every rank's results are where rank 0 looks for them\n"
        f"  found: {out}: 8 of 9 results are missing: of prompts 0, 1, 3, 4, 5, ...\n"
        "  why:   each rank writes its own beside the file, and rank 0 merges them\n"
        "  fix:   name a file on a file system that all nodes share; results so far are kept, and the "
        "same command resumes",
        1,
    )
    assert not out.exists()
    assert list(kept(out)) == [2]


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("missing/out.jsonl", "No such file or directory: {folder}/missing/out.jsonl.rank0.jsonl"),
        ("file/out.jsonl", "Not a directory: {folder}/file/out.jsonl.rank0.jsonl"),
        ("x" * 252, "File name too long: {folder}/" + "x" * 252 + ".rank0.jsonl"),
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
    with begin(out) as file:
        file.write([document(0)])
        with _room_for(file.path, more_bytes=10), pytest.raises(UserError) as raised:
            file.write([document(1)])
        assert raised.value.found == f"File too large: {file.path}"
        file.write([document(2)])  # by a caller that made room
    assert list(kept(out)) == [0, 2]


def test_a_disk_too_small_for_the_whole_file_keeps_the_results(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with begin(out) as file:
        file.write([document(1), document(0)])
        with _room_for(file.path, more_bytes=-len(HEAD) - 1), pytest.raises(UserError) as raised:
            merge(out, 2)
    assert raised.value.found == f"File too large: {out}"
    assert [path.name for path in tmp_path.iterdir()] == [rank_file(out).name]
    merge(out, 2)
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
        with begin(out) as file:
            assert file.path.stat().st_mode & 0o777 == 0o640
            merge(out, 0)
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o640


def leave_result(out: Path, *, run: str = "F", rank: int = 0) -> None:
    """Leave what a run leaves that was killed after its first result."""
    rank_file(out, rank).write_text(f'{{"zerofit_run": "{run}", "batch_size": 4}}\n{{"index": 0}}\n')


EXISTS = """\
error[generate-out-exists]: the file for the results already exists
  found: {{out}}: {found}
  why:   it may contain your results, and is never overwritten
  fix:   write to another file, or move that one away"""
OTHERS = """\
error[generate-other-parts]: the unfinished results are from another run
  found: {out}.rank0.jsonl: they are from another model, other prompts or other settings
  why:   the file would mix results of two runs
  fix:   write the results to another file, or, if you don't need these: rm {out}.rank0.jsonl"""
NOT_OURS = """\
error[generate-parts-not-zerofits]: a file with the name of a rank's results has other contents
  found: {out}.rank0.jsonl: its first line is not that of `zerofit generate`
  why:   a rank would write its results there, until all are merged
  fix:   write the results to another file, or move that one away"""

REFUSED = {
    "a file at OUT": (lambda out: out.write_text("mine"), EXISTS.format(found="a file")),
    "a folder at OUT": (lambda out: out.mkdir(), EXISTS.format(found="a folder")),
    "a link to nothing at OUT": (
        lambda out: out.symlink_to("nowhere"),
        EXISTS.format(found="a link to nothing"),
    ),
    "an empty file at OUT": (lambda out: out.touch(), EXISTS.format(found="a file")),
    "a file at OUT, with results beside it": (
        lambda out: (leave_result(out), out.write_text("mine")),
        EXISTS.format(found="a file"),
    ),
    "results of another run": (lambda out: leave_result(out, run="other"), OTHERS),
    "a file of the user's": (lambda out: rank_file(out).write_text("mine"), NOT_OURS),
    "JSON of the user's": (lambda out: rank_file(out).write_text('{"index": 0}\n'), NOT_OURS),
    "a line of the user's": (lambda out: rank_file(out).write_text("mine\n" + HEAD), NOT_OURS),
}


@pytest.mark.parametrize(
    "ask", [lambda out: check_results(out, run="F", resume=True), begin], ids=["check", "begin"]
)
@pytest.mark.parametrize(("begun", "error"), REFUSED.values(), ids=REFUSED)
def test_nothing_that_is_there_is_touched(
    begun: Callable[[Path], object], error: str, ask: Callable[[Path], object], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    begun(out)
    before = tree(tmp_path)
    with pytest.raises(UserError) as raised:
        ask(out)
    assert str(raised.value) == error.format(out=out)
    assert tree(tmp_path) == before


def test_results_are_continued_only_by_those_who_ask_for_it(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    leave_result(out, rank=3)
    with pytest.raises(UserError) as raised:
        check_results(out, run="F", resume=False)
    assert str(raised.value) == (
        "error[generate-parts-exist]: there are unfinished results of an earlier run\n"
        f"  found: {out}.rank3.jsonl\n"
        "  why:   they are only continued with resume=True\n"
        f"  fix:   pass resume=True, write to another file, or, if you don't need them: rm {out}.rank3.jsonl"
    )
    check_results(out, run="F", resume=True)


@pytest.mark.parametrize("left", ["", '{"zerofit_', '{"zerofit_run": "anot', HEAD.replace("F", "another")])
def test_a_run_that_was_killed_before_its_first_result_is_in_nobodys_way(tmp_path: Path, left: str) -> None:
    out = tmp_path / "out.jsonl"
    rank_file(out).write_text(left)
    check_results(out, run="F", resume=False)
    with begin(out, resume=False) as file:
        file.write([{"index": 0}])
    assert rank_file(out).read_text() == HEAD + '{"index": 0}\n'


def test_the_batches_that_results_were_made_in_are_known_as_long_as_there_are_results(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert kept_results(out).batch_size is None
    with begin(out, batch_size=6) as file:
        assert kept_results(out).batch_size is None
        file.write([document(0)])
    assert kept_results(out).batch_size == 6
    with begin(out, batch_size=2):
        assert kept_results(out).batch_size == 6


HOLD = """
import sys
from pathlib import Path
from zerofit.generation.results import RankFile

with RankFile(Path(sys.argv[1]), run="F", rank=0, resume=True, batch_size=4):
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
        for ask in (lambda: check_results(out, run="F", resume=True), lambda: begin(out)):
            with pytest.raises(UserError) as raised:
                ask()
            assert str(raised.value) == (
                "error[generate-out-in-use]: another run is writing these results\n"
                f"  found: {out}.rank0.jsonl is locked by a living process\n"
                "  why:   two runs would generate each prompt twice\n"
                "  fix:   wait for it, end it, or write the results to another file"
            )
            assert tree(tmp_path) == before
        holder.kill()
    check_results(out, run="F", resume=True)
    with begin(out):
        pass


def test_of_runs_that_start_at_the_same_time_one_has_the_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", HOLD, str(out)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(subprocess.Popen(command, text=True, **pipes)) for _ in range(4)]
        said = [run.stdout.readline() for run in runs if run.stdout]
        assert sorted(said) == ["", "", "", "held\n"]
        for run in runs:
            _, stderr = run.communicate()
            assert run.returncode == 0 or "another run is writing these results" in stderr


class _ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    __slots__ = ("barrier", "values")

    def __init__(self, rank: int, barrier: threading.Barrier, values: dict[int, Any]) -> None:
        super().__init__(rank=rank, size=barrier.parties)
        object.__setattr__(self, "barrier", barrier)
        object.__setattr__(self, "values", values)

    def share(self, value: Any) -> list[Any]:
        self.barrier.wait()
        self.values[self.rank] = value
        self.barrier.wait()
        return [self.values[rank] for rank in range(self.size)]


def _on_two_ranks(outs: tuple[Path, Path]) -> list[Any]:
    """Return what two ranks get that open results, each for its own node's path."""
    barrier, values = threading.Barrier(2, timeout=20), dict[int, Any]()

    def of_rank(rank: int) -> Any:
        ranks = _ThreadRanks(rank, barrier, values)
        options = SimpleNamespace(out=outs[rank], resume=True, fingerprint=f"of node {rank}", describe=None)
        request: Any = SimpleNamespace(prompts=([1], [2]), batch_size=4, options=options)
        try:
            with open_results(ranks, request) as results:
                barrier.wait()  # a rank that ends before its first result takes its file away
                return results.has_all([0])
        except UserError as error:
            return error.rule, error.found

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of_rank, range(2)))


def test_nodes_whose_copies_of_the_model_have_other_times_write_one_file(tmp_path: Path) -> None:
    """Each node computes the fingerprint of its own copy."""
    out = tmp_path / "out.jsonl"
    assert _on_two_ranks((out, out)) == [False, False]


def test_a_rank_on_a_node_with_its_own_disk_is_found_before_anything_is_generated(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    found = f"{here / 'out'}.rank1.jsonl: rank 1 made it, rank 0 does not see it"
    first, second = _on_two_ranks((here / "out", there / "out"))
    assert first == ("generate-out-not-shared", found)
    assert second == ("generate-out-not-shared", f"{found} (on rank 0)")
    assert tree(there) == tree(here) == {}
