"""Readers of a dataset's files where files are large, damaged, or of another kind than they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_datasets import make_arrow_files

from zerofit.core.errors import UserError
from zerofit.data import reading
from zerofit.data.files import data_files
from zerofit.data.reading import DataFile


def _file(path: Path) -> DataFile:
    (file,), _ = data_files([str(path)], split=None)
    return file


def _texts(path: Path) -> list[Any]:
    return [value for batch in _file(path).batches(["text"]) for value in list(batch.columns[0])]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.json", '[{"text": "a"},\n {"text": c}]', "Expecting value: line 2 column 11 (char 26)"),
        ("a.json", '[{"text": "a"},\n7]', "entry 2 of the list is not an object: 7"),
        ("a.json", '{\n "data": [\n {"text": "a"}]}', "line 1: expecting property name enclosed in double"),
        ("a.jsonl", '{"text": "a"}\n\n7\n', "line 3: no object: 7"),
        ("a.jsonl", "[" * 100_000, "line 1: mappings and lists are nested too deep"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1: a string contains a lone surrogate"),
        ("a.csv", 'text\na\n"never closed\nb\nc\n', "Error tokenizing data. C error: EOF inside string"),
        ("b.jsonl", '{"other": 1}\n' * 200 + '{"text": "late"}\n', "no column text"),
        ("b.csv", "other\n1\n", "no column text"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, name: str, text: str, found: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        _texts(path)
    assert caught.value.rule == "data-file-broken"
    assert caught.value.found.startswith(f"{path}: {found}")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow"])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_cut_off_file_is_told(tmp_path: Path, name: str, share: float) -> None:
    make_arrow_files(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(UserError) as caught:
        _texts(path)
    assert (caught.value.rule, caught.value.fix) == ("data-file-broken", "store it again")


def test_bytes_read_come_to_the_size_of_the_file(tmp_path: Path) -> None:
    make_arrow_files(tmp_path)
    (tmp_path / "a.txt").write_text("a line\n" * 2500)
    for name in ("a.parquet", "a.txt"):
        file = _file(tmp_path / name)
        read = [batch.bytes_read for batch in file.batches(["text"])]
        assert read == sorted(read)
        assert read[-1] == file.size_bytes == (tmp_path / name).stat().st_size


def test_a_row_that_lacks_a_column_has_none_and_quotes_are_read_as_pandas_does(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"other": 1}\n')
    (tmp_path / "a.csv").write_text(
        'id,text\n1,a\n2\n\n3,"Nice" he said\n4,say "x" now\n5,"two\nlines"\n6,NA\n'
    )
    assert _texts(tmp_path / "a.jsonl") == ["a", None]
    assert _texts(tmp_path / "a.csv") == ["a", "", "Nice he said", 'say "x" now', "two\nlines", "NA"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_long_rows_come_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import pyarrow.parquet

    monkeypatch.setattr(reading, "_BATCH_BYTES", 10_000)
    rows = [{"text": f"{number:04d} " * 400} for number in range(40)]
    if name == "a.parquet":
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / name, use_dictionary=False, compression="none"
        )
    else:
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
    sizes = [len(batch.columns[0]) for batch in _file(tmp_path / name).batches(["text"])]
    assert sum(sizes) == 40
    assert max(sizes) <= 8  # text comes in pieces of 8 KiB


@pytest.mark.parametrize(
    ("source", "near"), [("nofile.csv", None), ("train.json", "train.jsonl"), ("trian.jsonl", "train.jsonl")]
)
def test_a_name_is_near_by_its_stem(tmp_path: Path, source: str, near: str | None) -> None:
    for name in ("unclosed.csv", "train.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError) as caught:
        data_files([str(tmp_path / source)], split=None)
    told = f"did you mean {tmp_path / near}?" if near else "name files of a dataset, or a training script"
    assert caught.value.fix == told


@pytest.mark.parametrize("split", ["missing", "../outside", "/etc"])
def test_a_split_that_is_no_folder_of_the_dataset_is_not_read(tmp_path: Path, split: str) -> None:
    for name in ("stored", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "stored" / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))
    with pytest.raises(UserError) as caught:
        data_files([str(tmp_path / "stored")], split=None)
    assert caught.value.rule == "data-no-dataset"
