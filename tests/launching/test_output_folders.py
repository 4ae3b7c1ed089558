"""Output folders of a failed attempt: which ones are moved, where to, and back."""

from __future__ import annotations

from pathlib import Path

from zerofit.launching.output_folders import move_aside, move_back, own_folders_of


def test_only_folders_that_the_run_created_are_moved_and_they_can_be_moved_back(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    target = ("train.py", "--out", "new/logs", "new", "--data", "mine", "--empty=none", "--log", "a.log", "8")
    folders = own_folders_of(target, None, cwd=tmp_path)
    assert folders == tuple(tmp_path / name for name in ("new/logs", "new", "none", "a.log", "8"))
    for name in ("new/logs", "none"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("new/logs/1", "new/model", "a.log"):
        (tmp_path / name).write_text(name)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    moved = move_aside(folders, number=1)
    assert moved == {
        tmp_path / "new/logs": tmp_path / "new/logs.before-recovery-1",
        tmp_path / "new": tmp_path / "new.before-recovery-1",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "mine", "new.before-recovery-1"]
    assert move_aside(folders, number=1) == {}
    move_back(moved)
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before
