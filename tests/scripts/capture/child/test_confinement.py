"""Programs that are confined lose no file of the user, and write where they may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.scripts.capture.child.confinement import Confinement, kernel_version

pytestmark = pytest.mark.skipif(not kernel_version(), reason="the kernel has no Landlock")


@pytest.fixture
def confinement(tmp_path: Path) -> Confinement:
    """One for a user's folder work, with a cache in it, and a file other.txt of the user's."""
    for name in ("work/deep", "work/cache", "beside"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("work/deep/a.txt", "work/cache/a.txt", "beside/a.txt", "other.txt"):
        (tmp_path / name).write_text("a")
    (tmp_path / "link").symlink_to("/")
    roots = [str(tmp_path / "work"), str(tmp_path / "other.txt")]
    return Confinement(roots, [str(tmp_path), str(tmp_path / "work" / "cache")])


@pytest.mark.parametrize(
    "command",
    [
        ["rm", "-f", "FILE"],
        ["mv", "FILE", "FILE.1"],
        ["truncate", "-s0", "FILE"],
        ["perl", "-e", "unlink 'FILE' or die"],
        ["perl", "-e", "open(F, '>', 'FILE') or die"],
        ["perl", "-e", "rename('FILE', 'FILE.1') or die"],
        ["bash", "-c", "X=rm; $X -f FILE"],
        ["bash", "-c", "echo b > FILE"],
        ["bash", "-c", "(setsid rm FILE)"],
        ["env", "-i", "sh", "-c", "rm FILE"],
        [sys.executable, "-c", "import os; os.truncate('FILE', 0)"],
    ],
    ids=" ".join,
)
def test_a_program_loses_no_file_of_the_user(
    confinement: Confinement, command: list[str], tmp_path: Path
) -> None:
    def run(file: Path) -> int:
        words = [word.replace("FILE", str(file)) for word in command]
        return confinement.inside(lambda: subprocess.run(words, capture_output=True)).returncode

    for name in ("work/deep/a.txt", "other.txt", "link" + str(tmp_path / "other.txt")):
        assert run(tmp_path / name) != 0
        assert (tmp_path / name).read_text() == "a"
    for name in ("work/cache/a.txt", "beside/a.txt"):
        assert run(tmp_path / name) == 0
    subprocess.run(["rm", str(tmp_path / "other.txt")], check=True)  # this process itself is not confined


def test_errors_are_those_of_the_start(confinement: Confinement) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        confinement.inside(subprocess.run, ["no-such-program"])
