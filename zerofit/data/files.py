"""Which files a dataset consists of: names, patterns and folders of save_to_disk to readers."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.data.reading import broken
from zerofit.data.reading_arrow import ArrowFile, ParquetFile
from zerofit.data.reading_csv import csv_rows, tsv_rows
from zerofit.data.reading_text import TextFile, json_rows, jsonl_rows, txt_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.data.reading import DataFile
    from zerofit.data.reading_text import RowsOf

_TEXT: dict[str, RowsOf] = {
    ".csv": csv_rows,
    ".tsv": tsv_rows,
    ".jsonl": jsonl_rows,
    ".ndjson": jsonl_rows,
    ".json": json_rows,
    ".txt": txt_rows,
}
_ARROW: dict[str, Callable[[Path], DataFile]] = {
    ".parquet": lambda path: ParquetFile(path=path),
    ".arrow": lambda path: ArrowFile(path=path),
}
ENDINGS = (*_TEXT, *_ARROW)
"""Of the files that are read; those that are text may have .gz behind it."""
_SPLITS = "dataset_dict.json"
_STATE = "state.json"
"""What save_to_disk writes beside a DatasetDict's splits, and beside a dataset's arrow files."""


def data_files(sources: Sequence[str], *, split: str | None) -> tuple[tuple[DataFile, ...], tuple[str, ...]]:
    """Return the readers of a dataset's files in the order in which they were named, and what was assumed.

    Args:
        sources: files, patterns such as "data/*.jsonl", and folders that save_to_disk wrote.
        split: which one of a DatasetDict; None for its only one, or "train".

    Raises:
        UserError: a file is not there, or of no kind that is read.
    """
    files: list[DataFile] = []
    notes: list[str] = []
    takes_split = False
    for path in (found for source in sources for found in _paths(source)):
        if path.is_dir():
            folder, note = _split_folder(path, split)
            takes_split |= folder != path
            notes += [note] if note else []
            files += _saved_files(folder)
        else:
            files.append(_file(path))
    if split is not None and not takes_split:
        raise UserError(
            "split-unknown",
            "there are no splits to choose from",
            found=f"--split {split} with {', '.join(sources)}",
            why="only a DatasetDict that save_to_disk wrote has named splits",
            fix="leave out --split, and name the split's own files",
        )
    return tuple(files), tuple(notes)


def is_table(file: DataFile) -> bool:
    """Return whether a file is text whose first line names its columns."""
    return isinstance(file, TextFile) and file.rows in (csv_rows, tsv_rows)


def _paths(source: str) -> list[Path]:
    path = Path(source)
    if path.is_file() or path.is_dir():
        return [path]
    if path.exists() or path.is_symlink():
        what = "a link to nothing" if path.is_symlink() else "a pipe or a device"
        raise UserError(
            "data-no-file",
            "what is named is no file",
            found=f"{source}: {what}",
            why="files are read twice: their first rows, then all",
            fix="name a file; what a pipe brings can be written into one first",
        )
    if any(mark in source for mark in "*?["):
        found = [Path(name) for name in sorted(glob.glob(source, recursive=True))]
        if found:
            return found
    folder = path.parent
    others = sorted(folder.iterdir()) if folder.is_dir() else []
    stems = {_stem(other): other.name for other in others if _reader(other) or other.is_dir()}
    near = stems.get(nearest(_stem(path), stems) or "")
    raise UserError(
        "data-missing",
        "there is no such file",
        found=source,
        why="no file matches it" if "*" in source else f"nothing of that name stands in {folder.resolve()}",
        fix=f"did you mean {folder / near}?" if near else "name files of a dataset, or a training script",
    )


def _file(path: Path) -> DataFile:
    if (reader := _reader(path)) is not None:
        return reader
    raise UserError(
        "data-kind-unknown",
        "the file's name does not say what it holds",
        found=str(path),
        why=f"what is read ends in {', '.join(ENDINGS)}; text also with .gz behind it",
        fix="give the file the ending of what it is, or store the dataset as one of these",
    )


def _reader(path: Path) -> DataFile | None:
    """Return what reads a file, by its name; None where that says nothing."""
    kind = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
    if kind.lower() in _TEXT:
        return TextFile(path=path, rows=_TEXT[kind.lower()])
    make = _ARROW.get(path.suffix.lower())
    return None if make is None else make(path)


def _stem(path: Path) -> str:
    """Return a file's name without its endings, which make unlike names look alike."""
    return path.name.removesuffix("".join(path.suffixes))


def _split_folder(folder: Path, split: str | None) -> tuple[Path, str]:
    """Return the folder of one split, and what was assumed."""
    if not (folder / _SPLITS).is_file():
        return folder, ""
    names = [str(name) for name in _json(folder / _SPLITS).get("splits", [])]
    if split is not None and split not in names:
        near = nearest(split, names)
        raise UserError(
            "split-unknown",
            "the dataset has no such split",
            found=f"--split {split} with {folder}",
            why=f"its splits are {', '.join(names)}",
            fix=f"did you mean --split {near}?" if near else "name one of them",
        )
    if split is None and len(names) != 1 and "train" not in names:
        raise UserError(
            "split-missing",
            "the dataset has several splits",
            found=str(folder),
            why=f"its splits are {', '.join(names)}, and none of them is called train",
            fix="name one with --split",
        )
    chosen = split or (names[0] if len(names) == 1 else "train")
    others = [name for name in names if name != chosen]
    note = f"{folder}: of its splits {chosen} was read, not {', '.join(others)}"
    return folder / chosen, note if split is None and others else ""


def _saved_files(folder: Path) -> list[DataFile]:
    state = folder / _STATE
    if not state.is_file():
        held = sorted({path.suffix for path in folder.iterdir() if path.suffix in ENDINGS})
        pattern = folder / f"*{held[0]}" if held else None
        raise UserError(
            "data-no-dataset",
            "the folder is no dataset",
            found=f"{folder}: no {_STATE}",
            why="of folders, only those are read that datasets' save_to_disk wrote",
            fix=f"name the files in it: '{pattern}'" if pattern else "name files of a dataset",
        )
    return [ArrowFile(path=folder / entry["filename"]) for entry in _json(state).get("_data_files", [])]


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken(path, str(error), why="save_to_disk wrote it otherwise", fix="save it anew") from None
    return document if isinstance(document, dict) else {}
