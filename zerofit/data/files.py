"""The files of a dataset: names, patterns and folders of save_to_disk."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.core.json_text import parse_json
from zerofit.data.reading import ENDINGS, TEXT_ENDINGS, DataFile

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPLITS_FILE = "dataset_dict.json"
_STATE_FILE = "state.json"
"""Files that save_to_disk writes beside a DatasetDict's splits, and beside a dataset's arrow files."""


def data_files(sources: Sequence[str], *, split: str | None) -> tuple[tuple[DataFile, ...], tuple[str, ...]]:
    """Return a dataset's files in the given order, and the assumptions made.

    Args:
        sources: files, patterns such as "data/*.jsonl", and folders written by save_to_disk.
        split: of a DatasetDict; None for its only one, or "train".

    Raises:
        UserError: a file does not exist, or has an unsupported format.
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
            why="only a DatasetDict written by save_to_disk has named splits",
            fix="leave out --split, and name the split's own files",
        )
    return tuple(files), tuple(notes)


def _paths(source: str) -> list[Path]:
    path = Path(source)
    if path.exists():
        return [path]
    if found := sorted(glob.glob(source, recursive=True)):
        return [Path(name) for name in found]
    folder = path.parent
    others = sorted(folder.iterdir()) if folder.is_dir() else []
    stems = {_stem(other): other.name for other in others if _kind(other) in ENDINGS or other.is_dir()}
    near = stems.get(nearest(_stem(path), stems) or "")
    raise UserError(
        "data-missing",
        "there is no such file",
        found=source,
        why="no file matches it" if "*" in source else f"{folder.resolve()} has no such entry",
        fix=f"did you mean {folder / near}?" if near else "name files of a dataset, or a training script",
    )


def _file(path: Path) -> DataFile:
    kind = _kind(path)
    if kind not in ENDINGS or not path.is_file():
        raise UserError(
            "data-kind-unknown",
            "the file's extension is not supported",
            found=str(path),
            why=f"supported are {', '.join(ENDINGS)}; text files also with .gz",
            fix="rename the file to the extension of its format, or store the dataset in one of these "
            "formats",
        )
    return DataFile(path=path, kind=kind)


def _kind(path: Path) -> str:
    """Return a file's extension, without the .gz of a compressed text file."""
    ending, inner = path.suffix.lower(), path.with_suffix("").suffix.lower()
    return inner if ending == ".gz" and inner in TEXT_ENDINGS else ending


def _stem(path: Path) -> str:
    """Return a file's name without extensions, which would make different names look alike."""
    return path.name.removesuffix("".join(path.suffixes))


def _split_folder(folder: Path, split: str | None) -> tuple[Path, str]:
    """Return the folder of one split, and an assumption if one was made."""
    if not (folder / _SPLITS_FILE).is_file():
        return folder, ""
    names = [str(name) for name in _json(folder / _SPLITS_FILE).get("splits", [])]
    # A split is a subfolder of the dataset's; a name with a separator could lead out of it.
    names = [name for name in names if Path(name).name == name and (folder / name).is_dir()]
    if not names:
        raise _no_dataset(f"{folder / _SPLITS_FILE}, but no folder of a split named there")
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
    state = folder / _STATE_FILE
    if not state.is_file():
        held = sorted({path.suffix for path in folder.iterdir() if path.suffix in ENDINGS})
        fix = f"name the files in it: '{folder / f'*{held[0]}'}'" if held else "name files of a dataset"
        raise _no_dataset(f"{folder}: no {_STATE_FILE}", fix)
    entries = _json(state).get("_data_files", [])
    return [DataFile(path=folder / Path(entry["filename"]).name, kind=".arrow") for entry in entries]


def _json(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(document, dict):
            return document
        found = "no JSON object"
    except (OSError, ValueError) as error:
        found = f"{error}"
    raise _no_dataset(f"{path}: {found}")


def _no_dataset(found: str, fix: str = "store the dataset again with save_to_disk") -> UserError:
    return UserError(
        "data-no-dataset",
        "the folder is not a dataset",
        found=found,
        why="only folders written by save_to_disk of datasets can be read",
        fix=fix,
    )
