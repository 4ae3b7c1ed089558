"""Readers of a dataset's files where files are large, damaged, or of another kind than they say."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_datasets import make_arrow_files

from zerofit.core.errors import UserError
from zerofit.data import reading_arrow, reading_csv, reading_text
from zerofit.data.files import data_files
from zerofit.data.reading import DataFile


def _file(path: Path) -> DataFile:
    (file,), _ = data_files([str(path)], split=None)
    return file


def _texts(path: Path) -> list[Any]:
    return [value for batch in _file(path).batches(["text"]) for value in list(batch.columns[0])]


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.fixed_dictionaries({"text": _VALUES}), max_size=8), st.sampled_from([None, 0, 3]))
def test_a_list_is_read_in_pieces_as_if_it_were_whole(rows: list[dict[str, Any]], indent: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_text, "_CHUNK", 5)
        path = Path(folder, "rows.json")
        path.write_bytes(f"\n{json.dumps(rows, indent=indent, ensure_ascii=False)}\n".encode())
        assert _texts(path) == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"text": "a"},\n {"text": "b"},\n {"text": c}]', 'line 3: expecting value:  {"text": c}]'),
        ('[{"text": "a"},\n {"text": "b"}', "line 2: the list does not end"),
        ('[{"text": "a"}\n {"text": "b"}]', "line 2: a comma stands wrong"),
        ('[,{"text": "a"}]', "line 1: a comma stands wrong"),
        ('[{"text": "a"},\n7]', "line 2: no object: 7]"),
        ('[{"text": "a', "line 1: unterminated string starting at"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "line 1: more stands behind the list: [{"),
        ('[{"text": "a"}] x', "line 1: more stands behind the list: x"),
        ('[{"text": "a"},]', "line 1: a comma stands wrong"),
        ('{\n "data": [\n {"text": "a"}]}', "line 1 opens an object and does not close it"),
        ('{"data": [{"text": "a"}], "version": 1}', "one object with data, version"),
        ('{"text": ["a", "b"], "label": [0, 1]}\n', "one object with text, label"),
        ("[" * 100_000, "line 1: values nested too deep"),
    ],
)
def test_a_damaged_list_names_its_line(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        _texts(path)
    assert caught.value.found.startswith(f"{path}: {found.strip()}".replace(":  {", ": {"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"text": "short"}\n{"text": "' + "long " * 50 + '"}\n'),
        ("a.json", '[{"text": "short"},\n{"text": "' + "long " * 50 + '"}]\n'),
        ("a.txt", "short\n" + "long " * 50),
        ("a.csv", 'text\nshort\n"' + "long\n" * 100),
    ],
)
def test_a_row_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setattr(reading_text, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(reading_csv, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(reading_text, "_CHUNK", 16)
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        _texts(path)
    assert "has more than 64.0 MiB" in caught.value.found
    assert caught.value.rule == "data-file-broken"


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_cut_off_file_is_told(tmp_path: Path, name: str, share: float) -> None:
    make_arrow_files(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(UserError) as caught:
        _texts(path)
    assert (caught.value.rule, caught.value.fix) == ("data-file-broken", "store it anew")


def test_bytes_read_come_to_the_size_of_the_file(tmp_path: Path) -> None:
    make_arrow_files(tmp_path)
    (tmp_path / "a.txt").write_text("a line\n" * 2500)
    for name in ("a.parquet", "a.txt"):
        file = _file(tmp_path / name)
        read = [batch.bytes_read for batch in file.batches(["text"])]
        assert read == sorted(read)
        assert read[-1] == file.size_bytes == (tmp_path / name).stat().st_size


def test_a_row_that_lacks_a_column_has_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"other": 1}\n')
    (tmp_path / "a.csv").write_text("id,text\n1,a\n2\n\n3,b,more\n")
    assert _texts(tmp_path / "a.jsonl") == ["a", None]
    assert _texts(tmp_path / "a.csv") == ["a", None, "b"]


def test_what_stands_behind_a_list_is_seen_however_far_behind(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"}]' + "\n" * (3 * 2**20) + "{}")
    with pytest.raises(UserError, match="can't be read"):
        _texts(path)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.csv", 'text\na\n"never closed\nb\nc\n', "line 3: a value begins with a quote, which"),
        ("a.csv", 'text,n\n"joins,1\nb"c,2\n', "line 2: a value begins with a quote, which"),
        ("a.csv", 'text,n\n"a"b,"open\nc,2\n', "line 2: a value begins with a quote, which"),
        ("a.csv", "text\na\rb\n", "line 2: new-line character seen in unquoted field"),
        ("a.tsv", 'text\tn\n"joins\t1\nb "c" d\t2\n', "line 2: a value begins with a quote, which"),
    ],
)
def test_a_quote_that_would_swallow_rows_is_told(tmp_path: Path, name: str, text: str, found: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        _texts(tmp_path / name)
    assert caught.value.found.startswith(f"{tmp_path / name}: {found}")


def test_quotes_within_a_line_pass(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,n\n"Nice" he said,1\nsay "x" now,2\n"two\nlines",3\n')
    assert _texts(tmp_path / "a.csv") == ["Nice he said", 'say "x" now', "two\nlines"]


def test_of_columns_with_one_name_the_first_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    assert _texts(tmp_path / "a.csv") == ["a"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b.jsonl", '{"other": 1}\n'),
        ("b.json", '[{"other": 1}]'),
        ("b.csv", "other\n1\n"),
        ("b.jsonl", '{"other": 1}\n' * 200 + '{"text": "late"}\n'),
    ],
)
def test_a_file_without_the_column_is_refused_whatever_its_kind(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        _texts(tmp_path / name)
    assert caught.value.found == f"{tmp_path / name}: no column text"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_long_rows_come_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import pyarrow.parquet

    for module in (reading_text, reading_arrow):
        monkeypatch.setattr(module, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(reading_text, "_CHUNK", 1000)
    rows = [{"text": f"{number:04d} " * 400} for number in range(40)]
    if name == "a.parquet":
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / name, use_dictionary=False, compression="none"
        )
    else:
        lines = [json.dumps(row) for row in rows]
        whole = "\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]"
        (tmp_path / name).write_text(whole)
    sizes = [len(batch.columns[0]) for batch in _file(tmp_path / name).batches(["text"])]
    assert sum(sizes) == 40
    assert max(sizes) <= 6


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_is_told_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(UserError) as caught:
        data_files([str(path)], split=None)
    words = "a pipe or a device" if kind == "pipe" else "a link to nothing"
    assert (caught.value.rule, caught.value.found) == ("data-no-file", f"{path}: {words}")


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


def test_a_sample_with_lists_beside_its_text_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "a b", "entities": [{"at": 0}], "meta": {}}')
    assert _texts(tmp_path / "a.json") == ["a b"]
