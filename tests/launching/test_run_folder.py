"""The run folder: its name, and errors if it can't be created."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from zerofit.core.errors import UserError
from zerofit.launching.run_folder import new_run_folder, run_folder, write_file

_AT = datetime(2026, 3, 1, 14, 5, 9)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("train.py", "2026-03-01_14-05-09-train"),
        ("examples/train_clm.py", "2026-03-01_14-05-09-train_clm"),
        ("/abs/train.v2.py", "2026-03-01_14-05-09-train.v2"),
        ("train", "2026-03-01_14-05-09-train"),
        ("package.train", "2026-03-01_14-05-09-package.train"),
    ],
)
def test_folder_is_named_after_time_and_target(tmp_path: Path, target: str, name: str) -> None:
    assert run_folder(tmp_path, target=target, at=_AT).path == tmp_path / name
    assert list(tmp_path.iterdir()) == []


def test_runs_of_the_same_second_get_separate_folders(tmp_path: Path) -> None:
    folders = [new_run_folder(tmp_path / "runs", target="train.py", at=_AT) for _ in range(3)]
    assert [folder.path.name for folder in folders] == [
        "2026-03-01_14-05-09-train",
        "2026-03-01_14-05-09-train-2",
        "2026-03-01_14-05-09-train-3",
    ]
    assert all(folder.path.is_dir() for folder in folders)


def test_folder_is_absolute_so_that_ranks_find_it_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_run_folder(Path("runs"), target="train.py", at=_AT)
    assert folder.path == tmp_path.resolve() / "runs/2026-03-01_14-05-09-train"


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ("file", "Not a directory: ROOT/file/2026-03-01_14-05-09-train"),
        ("file/runs", "Not a directory: ROOT/file/runs/2026-03-01_14-05-09-train"),
        ("x" * 300, f"File name too long: ROOT/{'x' * 300}/2026-03-01_14-05-09-train"),
    ],
)
def test_a_folder_that_cannot_be_made(tmp_path: Path, runs: str, found: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        new_run_folder(tmp_path / runs, target="train.py", at=_AT)
    assert str(error.value) == (
        "error[run-folder-not-writable]: the run's folder is not writable\n"
        f"  found: {found.replace('ROOT', str(tmp_path.resolve()))}\n"
        "  why:   each run writes its plan, configurations, logs and records into its own folder\n"
        "  fix:   name a writable folder: --run-dir DIR"
    )


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / "plan.json", "{}\n")
    assert (tmp_path / "plan.json").read_text() == "{}\n"
    with pytest.raises(UserError) as error:
        write_file(tmp_path, "{}\n")
    assert (error.value.rule, error.value.found) == ("run-folder-not-writable", f"Is a directory: {tmp_path}")


def test_git_ignores_a_new_folder_of_runs(tmp_path: Path) -> None:
    runs, own = tmp_path / "zerofit-runs", tmp_path / "own"
    for _ in range(2):
        new_run_folder(runs, target="train.py", at=_AT)
    assert (runs / ".gitignore").read_text() == "*\n"
    own.mkdir()
    new_run_folder(own, target="train.py", at=_AT)
    assert not (own / ".gitignore").exists()
