"""Folders are read, and caches pruned, while others remove what is in them."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from zerofit.core.vanishing_files import last_change, remove_oldest, statuses


def _fill(folder: Path, number: int) -> None:
    """Make files that are the older the lower their number, of ten bytes each."""
    for at in range(number):
        (folder / f"{at}.json").write_text("x" * 10)
        os.utime(folder / f"{at}.json", (at + 1, at + 1))


def _left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b/inner", "c"):
        (tmp_path / "all" / name).mkdir(parents=True)
        (tmp_path / "all" / name / "file").write_text("x")
    found = statuses(tmp_path / "all")
    assert next(found)[0] == tmp_path / "all"
    assert next(found)[0].name in "abc"
    for name in "abc":
        shutil.rmtree(tmp_path / "all" / name)
    assert list(found) == []
    assert list(statuses(tmp_path / "nowhere")) == []
    assert last_change(tmp_path / "nowhere") == 0.0


def test_a_link_is_seen_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("x")
    (tmp_path / "inside" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "inside" / "nothing").symlink_to("/nowhere/at/all")
    assert {path.name for path, _ in statuses(tmp_path / "inside")} == {"inside", "folder", "nothing"}
    (tmp_path / "outer").symlink_to(tmp_path / "elsewhere")  # the folder itself may be a link
    assert {path.name for path, _ in statuses(tmp_path / "outer")} == {"outer", "file"}


def test_the_last_change_is_the_newest_of_the_folder_and_all_below_it(tmp_path: Path) -> None:
    folder = tmp_path / "saved" / "inner"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("x")
    for path, at in ((folder / "weights", 50), (folder, 70), (folder.parent, 60)):
        os.utime(path, (at, at))
    assert last_change(folder.parent) == 70.0
    os.utime(folder / "weights", (80, 80))
    assert last_change(folder.parent) == 80.0


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        ({"most_files": 3}, {7, 8, 9}),
        ({"most_files": 0}, set()),
        ({"most_bytes": 30}, {7, 8, 9}),
        ({"most_bytes": 29}, {8, 9}),
        ({"most_files": 2, "most_bytes": 90}, {8, 9}),
        ({"most_files": 90, "most_bytes": 900}, set(range(10))),
        ({}, set(range(10))),
    ],
)
def test_the_oldest_files_are_removed(tmp_path: Path, most: dict[str, int], kept: set[int]) -> None:
    _fill(tmp_path, 10)
    (tmp_path / "inner").mkdir()
    for name in ("0.txt", "inner/0.json", ".0.json.partial"):  # none of them is one of the cache
        (tmp_path / name).write_text("x" * 1000)
        os.utime(tmp_path / name, (1, 1))
    remove_oldest(tmp_path, ".json", **most)
    assert _left(tmp_path) == {f"{at}.json" for at in kept} | {"0.txt", "inner", ".0.json.partial"}
    assert _left(tmp_path / "inner") == {"0.json"}


def test_what_is_no_file_stops_no_pruning(tmp_path: Path) -> None:
    _fill(tmp_path, 20)
    (tmp_path / "nothing.json").symlink_to("/nowhere/at/all")
    (tmp_path / "itself.json").symlink_to("itself.json")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    os.utime(tmp_path / "folder.json", (0, 0))
    remove_oldest(tmp_path, ".json", most_files=5)
    assert {f"{at}.json" for at in range(18)} & _left(tmp_path) == set()
    assert "folder.json" in _left(tmp_path)
    remove_oldest(tmp_path / "nowhere", ".json", most_files=5)


def test_two_may_prune_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def prune() -> None:
        try:
            remove_oldest(tmp_path, ".json", most_files=3)
        except BaseException as error:
            errors.append(error)

    for _ in range(5):
        _fill(tmp_path, 300)
        threads = [threading.Thread(target=prune) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert _left(tmp_path) == {"297.json", "298.json", "299.json"}
