"""Readers of a dataset's files where files are large, damaged, or of another kind than they say."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_datasets import make_arrow_files

from zerofit.data import reading_text
from zerofit.data.files import data_files
from zerofit.data.reading import DataFile
from zerofit.errors import UserError


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
