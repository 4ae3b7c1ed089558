"""Which captures count as left over, and that nobody puts files back under a live one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from zerofit.scripts.capture.journal import COPIES, Change, JournalEntry, append
from zerofit.scripts.capture.leftovers import CaptureFolder, clear_leftovers


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A file that the capture has made."""
    (tmp_path / "made.txt").write_text("x")
    return tmp_path / "made.txt"


def _begin(cache: Path, made: Path) -> CaptureFolder:
    folder = CaptureFolder(cache)
    append(folder.path, JournalEntry(change=Change.MADE, path=str(made)))
    return folder


def test_a_live_capture_is_left_alone(tmp_path: Path, made: Path) -> None:
    folder = _begin(tmp_path / "cache", made)
    assert clear_leftovers(tmp_path / "cache") == {}
    assert made.exists()
    assert folder.path.exists()
    folder.clear(ended_ns=time.time_ns())
    assert not made.exists()


_OWNERS = [
    ({}, True),
    ({"boot": "other"}, True),
    ({"host": "other"}, True),
    ({"host": "other", "boot": "other"}, False),
]
"""What differs here from the machine that a capture ran on, and whether it is known to be gone: after a
restart of this machine, or in a container on it whose name has changed."""


@pytest.mark.parametrize(("differs", "is_cleared"), _OWNERS)
def test_a_capture_without_its_lock_is_left_over_on_its_own_machine_only(
    tmp_path: Path, made: Path, differs: dict[str, str], is_cleared: bool
) -> None:
    folder = _begin(tmp_path / "cache", made)
    folder._owner.close()
    file = folder.path / "owner.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | differs))
    assert bool(clear_leftovers(tmp_path / "cache")) == is_cleared
    assert made.exists() != is_cleared
    assert folder.path.exists() != is_cleared


def test_a_capture_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "capturing" / "new").mkdir(parents=True)
    (tmp_path / "capturing" / "newer").mkdir()
    (tmp_path / "capturing" / "newer" / "owner.json").touch()
    assert clear_leftovers(tmp_path) == {}
    assert len(list((tmp_path / "capturing").iterdir())) == 2


def test_what_changed_after_the_end_stays(tmp_path: Path, made: Path) -> None:
    folder = _begin(tmp_path / "cache", made)
    told = folder.clear(ended_ns=time.time_ns() - 10**10)
    assert made.read_text() == "x"
    assert [str(made) in sentence for sentence in told] == [True]
    assert not (folder.path / COPIES).exists()
    assert (tmp_path / "cache" / "kept" / folder.path.name).exists()
