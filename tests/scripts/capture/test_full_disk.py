"""Captures on a disk that is full, or fills: the user is told of the room, and no file changes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

_SUMMARY = "error[capture-no-room]: there is no room for the capture of train.py\n"
_NOT_COPIED = "it would overwrite {cwd}/old.bin, which can't be copied: No space left on device   (train.py:"
_FULL = "No space left on device: {cwd}/cache/zerofit/capturing/"
_IGNORING = "import contextlib, os\nwith contextlib.suppress(OSError):\n    "
_CASES = {
    "a file that is too large to copy": ("open('old.bin', 'wb')\n", f"{_NOT_COPIED}1)\n"),
    "a script that ignores it": (f"{_IGNORING}open('old.bin', 'r+b')\n", f"{_NOT_COPIED}3)\n"),
    # its last page may go to a whole copy: then there is none left to name the next file
    "many files": ("for at in range(100): open(f'small{at}', 'a')\n", ""),
    "output": ("print('x' * 4_000_000, flush=True)\n", _FULL),
    "output of a script that ignores it": (f"{_IGNORING}while True: os.write(1, bytes(4096))\n", _FULL),
}


def _capture(folder: Path, script: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
    """Plan for a script whose captures are on a disk of 1 MiB, and print what they leave there."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("may not mount here")
    (folder / "train.py").write_text(script)
    (folder / "old.bin").write_bytes(b"old" * 1_000_000)
    for at in range(100):
        (folder / f"small{at}").write_text("old" * 10_000)
    for name in ("cache", "temporary"):
        (folder / name).mkdir()
    plan = shlex.join([sys.executable, "-m", "zerofit", "plan", "--gpus", "1xA100-40G", "train.py"])
    mount = "mount -t tmpfs -o size=1m none cache"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount}; {before} {plan}; code=$?; find cache -type f; exit $code"],
        cwd=folder,
        env=environment(XDG_CACHE_HOME=str(folder / "cache"), TMPDIR=str(folder / "temporary")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert list((folder / "temporary").iterdir()) == []
    assert (folder / "old.bin").read_bytes() == b"old" * 1_000_000
    assert {(folder / f"small{at}").read_text() for at in range(100)} == {"old" * 10_000}
    return done


@pytest.mark.parametrize("case", _CASES)
def test_a_disk_that_fills_is_told_as_that(tmp_path: Path, case: str) -> None:
    script, found = _CASES[case]
    done = _capture(tmp_path, script)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"{_SUMMARY}  found: {found.format(cwd=tmp_path)}" in done.stderr
    assert "fix:   free space there, or set XDG_CACHE_HOME to a folder on another disk" in done.stderr


def test_a_disk_that_is_full_before_is_left_alone(tmp_path: Path) -> None:
    fill = "dd if=/dev/zero of=cache/fill bs=4k status=none 2>/dev/null;"
    done = _capture(tmp_path, "open('old.bin', 'wb')\n", before=fill)
    assert (done.returncode, done.stdout) == (2, "cache/fill\n"), done.stderr
    assert "error[capture-no-training]: train.py ended before training anything" in done.stderr
