"""The cache folder, and files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerofit.core.atomic_file import write_whole
from zerofit.core.cache_folder import cache_folder


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.cache/zerofit"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/zerofit"),
        ({"XDG_CACHE_HOME": "relative/caches"}, "/home/me/.cache/zerofit"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/zerofit"),
    ],
)
def test_the_cache_folder_is_where_the_desktop_standard_has_it(
    environment: dict[str, str], folder: str
) -> None:
    assert cache_folder(environment, Path("/home/me")) == Path(folder)


def test_a_file_takes_the_place_of_the_old_one_with_the_rights_that_umask_leaves(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    before = os.umask(0o027)
    try:
        write_whole(path, b"old")
        write_whole(path, b"new")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=["full disk", "Ctrl-C"])
def test_a_write_that_fails_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(source: object, target: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_whole(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"
