"""zerofit data on files: every kind through the command line, what is printed, written and drawn."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_datasets import LENGTHS, NUM_WORDS, make_files, make_saved, make_tokenizer
from runs import RunZerofit

from zerofit.cli.data import data

_Report = Callable[[str, Path], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the dataset in files of every kind, and the tokenizer."""
    path = tmp_path_factory.mktemp("data")
    make_files(path)
    make_tokenizer(path / "tok")
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what save_to_disk writes."""
    path = tmp_path_factory.mktemp("saved")
    make_saved(path)
    make_tokenizer(path / "tok")
    return path


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> _Report:
    """Return a function that returns the document of `zerofit data --json`, run in this process."""

    def run(line: str, folder: Path) -> dict[str, Any]:
        monkeypatch.chdir(folder)
        data.main(["--json", *line.split()], prog_name="zerofit data", standalone_mode=False)
        printed = capsys.readouterr()
        assert printed.err == ""
        document: dict[str, Any] = json.loads(printed.out)
        return document

    return run


def _lengths(document: dict[str, Any]) -> list[int]:
    return [length for length, samples in document["histogram"] for _ in range(samples)]


_KINDS = (
    "a.jsonl",
    "bom.jsonl",
    "list.json",
    "pretty.json",
    "lines.json",
    "packed.jsonl.gz",
    "a.csv",
    "a.tsv",
    "a.txt",
    "a.parquet",
    "file.arrow",
)


@pytest.mark.parametrize("name", _KINDS)
def test_every_kind_of_file_has_the_same_lengths(report: _Report, folder: Path, name: str) -> None:
    document = report(f"{name} --tokenizer tok", folder)
    assert _lengths(document) == LENGTHS
    # csv and txt can't tell a missing text from an empty one.
    is_null = name not in ("a.csv", "a.tsv", "a.txt")
    words = "without a value in text: counted as empty text" if is_null else "of empty text"
    assert document["notes"] == [f"1 sample {words}"]


@pytest.mark.parametrize(
    ("line", "expected", "notes"),
    [
        ("saved --tokenizer tok", LENGTHS, 1),
        ("selected --tokenizer tok", [5, 14, 14], 0),
        ("splits --tokenizer tok", LENGTHS, 2),
        ("splits --split test --tokenizer tok", [5], 0),
        ("saved selected --tokenizer tok", sorted([*LENGTHS, 5, 14, 14]), 1),
        ("ids", LENGTHS, 0),
        # Two ids of each sample are no padding.
        ("masked.parquet", [2] * 7, 0),
        ("ids.jsonl", [2] * 7, 0),
    ],
)
def test_saved_datasets_and_ids(
    report: _Report, saved: Path, line: str, expected: list[int], notes: int
) -> None:
    document = report(line, saved)
    assert _lengths(document) == expected
    assert len(document["notes"]) == notes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a.jsonl a.csv --tokenizer tok/tokenizer.json", sorted(LENGTHS * 2)),
        ("*.parquet --count words", sorted(NUM_WORDS)),
        ("a.txt --count characters", sorted(7 * number - (number > 0) for number in NUM_WORDS)),
        ("a.jsonl --count words --limit 3", [0, 1, 3]),
        ("a.parquet --count words --limit 3", [0, 1, 3]),
        ("a.jsonl --text id,label --count words", [0] * 7),
        ("a.csv --text id,text --tokenizer tok", sorted(number + 4 for number in NUM_WORDS)),
    ],
)
def test_what_flags_choose(report: _Report, folder: Path, line: str, expected: list[int]) -> None:
    assert _lengths(report(line, folder)) == expected


def test_words_of_lists_are_tokenized_as_they_are(report: _Report, folder: Path) -> None:
    rows = [{"tokens": ["one"] * number, "tags": [0] * number} for number in (4, 1)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _lengths(report("words.jsonl --tokenizer tok", folder)) == [3, 6]


def test_a_sample_is_a_share_and_the_same_each_time(report: _Report, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a word\n" * 20_000)
    first = report("long.txt --count words --sample 10%", tmp_path)
    assert 1800 < first["num_samples"] < 2200
    assert first["is_whole"] is False
    assert report("long.txt --count words --sample 10%", tmp_path) == first


_FIELDS = """
    version source counted unit is_whole model_max_length notes num_samples num_tokens shortest mean p50 p90
    p95 p99 longest batch_size is_causal padding_max_length padding packing bucketing max_lengths
    recommendation histogram
"""


def test_table_document_and_plot_of_one_report(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    from PIL import Image

    rows = [{"text": "word " * (1 + number % 90), "label": 0} for number in range(3000)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_tokenizer(tmp_path / "tok", model_max_length=64)
    line = "data many.jsonl --tokenizer tok --task causal_lm --batch_size 4 --plot p.png --output r.json"
    finished = run_zerofit(*line.split(), cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    document = json.loads((tmp_path / "r.json").read_text())
    assert list(document) == _FIELDS.split()
    assert (document["num_samples"], document["p50"], document["longest"]) == (3000, 47, 92)
    assert document["recommendation"]["max_length"] == document["model_max_length"] == 64
    assert [row["way"] for row in document["padding"]] == ["fixed", "dynamic", "bucketed", "packed"]
    assert [row["max_length"] for row in document["max_lengths"]] == [32, 64, 83, 88, 92]
    parts = finished.stdout.split("\n\n")
    assert parts[0] == (
        "many.jsonl: tokens of the column text, special ones included, by tok\n3,000 samples, 141,600 tokens"
    )
    assert parts[1].splitlines()[1].split() == ["0-7", "170", "5.7%", "#" * 25]
    assert parts[2] == "mean 47.2, p50 47, p90 83, p95 88, p99 92, longest 92"
    assert parts[3].startswith("Padding, in batches of 4, samples truncated to 64\n")
    assert parts[5].splitlines()[1].startswith("  max_length          64 ")
    with Image.open(tmp_path / "p.png") as image:
        assert image.format == "PNG"
        assert image.size == (1800, 720)
        shades = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or ()}
    assert {(31, 119, 180), (44, 160, 44)} <= shades  # bars of both halves
    again = run_zerofit(*line.split(), cwd=tmp_path)
    assert (again.returncode, again.stderr.splitlines()[0]) == (
        2,
        "error[file-exists]: the file exists and differs",
    )


def test_counted_words_are_not_tokens_and_nothing_is_recommended(
    run_zerofit: RunZerofit, folder: Path
) -> None:
    finished = run_zerofit("data", "a.jsonl", "--count", "words", cwd=folder)
    assert finished.stdout.startswith("a.jsonl: words (not tokens) of the column text\n")
    assert "recommended" not in finished.stdout
    assert finished.stdout.endswith(
        "These are words, not tokens: the shares are close to those of tokens, the lengths are not.\n"
        "Use --tokenizer for a maximum length and a recommendation.\n"
    )


def test_tables_leave_columns_out_where_the_terminal_is_narrow(run_zerofit: RunZerofit, folder: Path) -> None:
    def shown(columns: int) -> list[str]:
        line = ("data", "a.jsonl", "--tokenizer", "tok")
        return run_zerofit(*line, cwd=folder, environment={"COLUMNS": str(columns)}).stdout.splitlines()

    narrow, wide = shown(80), shown(120)
    assert max(map(len, narrow)) <= 80 < max(map(len, wide)) <= 120
    header = next(line for line in narrow if line.startswith("max_length  "))
    assert header.split() == ["max_length", "samples", "cut", "tokens", "lost", "dynamic", "bucketed"]


def test_non_text_values_are_reported(report: _Report, tmp_path: Path) -> None:
    lines = [f'{{"text": {value}}}\n' for value in ('"a b"', "5", "null", '""', '["a"]')]
    (tmp_path / "mixed.jsonl").write_text("".join([*lines, '{"other": 1}']))
    document = report("mixed.jsonl --count words", tmp_path)
    assert (document["num_samples"], document["num_tokens"]) == (6, 3)
    assert document["notes"] == [
        "2 samples without a value in text: counted as empty text",
        "1 sample with a value that is no text: counted as empty text",
        "1 sample of empty text",
    ]


def test_a_later_file_without_the_column_is_reported(run_zerofit: RunZerofit, saved: Path) -> None:
    finished = run_zerofit("data", "saved", "masked.parquet", "--count", "words", cwd=saved)
    assert finished.stderr.splitlines()[:3] == [
        "error[data-file-broken]: a file of the dataset can't be read",
        "  found: masked.parquet: no column text",
        "  why:   its columns are input_ids, attention_mask, and the files of a dataset have the same",
    ]


def _peak_bytes(line: str, folder: Path) -> int:
    process = subprocess.Popen(
        [sys.executable, "-m", "zerofit", "data", *line.split()], cwd=folder, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_maxrss * 1024


@pytest.mark.parametrize("name", [pytest.param("rows.jsonl", marks=pytest.mark.slow), "rows.parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, name: str) -> None:
    import pyarrow.parquet

    text, count = "nine words that make up a row of text " * 3, 150_000
    if name.endswith("jsonl"):
        (tmp_path / name).write_text((json.dumps({"text": text}) + "\n") * count)
    else:
        pyarrow.parquet.write_table(
            pyarrow.table({"text": [f"{number} {text}" for number in range(count)]}), tmp_path / name
        )
    few = _peak_bytes(f"{name} --count words --limit 5000", tmp_path)
    all_rows = _peak_bytes(f"{name} --count words", tmp_path)
    assert all_rows - few < 10 * 2**20 < len(text) * count


def test_progress_shows_on_a_terminal_and_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a word\n" * 20_000_000)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "zerofit", "data", "long.txt", "--count", "words"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    shown, until = b"", time.monotonic() + 60
    while b"samples," not in shown and time.monotonic() < until:
        shown += os.read(master, 4096)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    while b"zerofit: stopped" not in shown and time.monotonic() < until:
        shown += os.read(master, 4096)
    os.close(master)
    assert b"counting" in shown
    assert b"/s" in shown
    assert b"Traceback" not in shown
    assert (process.returncode, output) == (130, b"")


@pytest.mark.parametrize("name", ["later.jsonl", "later.parquet"])
def test_rows_without_ids_are_reported(report: _Report, tmp_path: Path, name: str) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2], []]}), tmp_path / "a.parquet")
    if name.endswith("jsonl"):
        lines = [json.dumps({"input_ids": value}) + "\n" for value in ("a b", None)]
        (tmp_path / name).write_text("".join(lines))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"input_ids": ["a b", None]}), tmp_path / name)
    document = report(f"a.parquet {name}", tmp_path)
    assert _lengths(document) == [0, 0, 0, 2]
    assert document["notes"] == [
        "1 sample without a value in input_ids: counted as no tokens",
        "1 sample with a value that is no list of ids: counted as no tokens",
        "1 sample of no tokens",
    ]


def test_one_sample_in_one_row_and_a_text_of_empty_lines(
    run_zerofit: RunZerofit, report: _Report, folder: Path
) -> None:
    (folder / "one.txt").write_text("a b\n")
    (folder / "empty.txt").write_text("\n\n")
    one = run_zerofit("data", "one.txt", "--tokenizer", "tok", "--task", "causal-lm", cwd=folder)
    assert "\n1 sample, 4 tokens\n" in one.stdout
    assert "\npacked: 1 row of 8 holds all samples" in one.stdout
    empty = report("empty.txt --count words", folder)
    assert (empty["num_samples"], empty["notes"]) == (2, ["2 samples of empty text"])


@pytest.mark.slow
def test_memory_does_not_grow_with_long_rows(tmp_path: Path) -> None:
    import pyarrow.parquet

    text = " ".join(f"w{number}" for number in range(50_000))
    rows = [f"{number} {text}" for number in range(400)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=10)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "few.txt").write_text("a word\n")
    least = _peak_bytes("few.txt --count words", tmp_path)
    for name in ("a.parquet", "a.jsonl"):
        assert _peak_bytes(f"{name} --count words", tmp_path) - least < 80 * 2**20 < len(text) * 400


@pytest.mark.parametrize("flag", ["--plot", "--output"])
def test_unwritable_output_is_refused_before_anything_is_read(
    run_zerofit: RunZerofit, tmp_path: Path, flag: str
) -> None:
    """The source is not there, which would be the next thing to be said."""
    pytest.importorskip("matplotlib")
    (tmp_path / "there.png").write_bytes(b"mine")
    (tmp_path / "folder.png").mkdir()
    for path, rule in (
        ("there.png", "file-exists"),
        ("there.png/p.png", "not-writable"),
        ("folder.png", "usage"),
        ("none/p.png", "data-missing"),
    ):
        finished = run_zerofit("data", "gone.jsonl", flag, path, cwd=tmp_path)
        assert finished.stderr.startswith(f"error[{rule}]"), path
    finished = run_zerofit("data", "gone.jsonl", flag, "there.png", "--force", cwd=tmp_path)
    assert finished.stderr.startswith("error[data-missing]")
    assert (tmp_path / "there.png").read_bytes() == b"mine"
