"""What zerofit writes in a script's process goes to its own files, whatever descriptors the script closes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.core.own_file import OwnDescriptor, OwnFile, identity_of

_PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from zerofit.core.own_file import OwnFile

folder = Path(sys.argv[1])
own = OwnFile(folder / "own")
own.write_at(0, b"before")

def open_files(count=1000):
    for number in range(count):
        try:
            found = os.open(folder / f"user{number}", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return
        os.write(found, b"mine")

SCRIPT
own.write_at(0, b"after!")
"""
_SCRIPTS = {
    "closes a range": "os.closerange(3, 256)\nopen_files()",
    "closes all": "os.closerange(0, 4096)\nopen_files()",
    "closes one by one": "for number in map(int, os.listdir('/proc/self/fd')):\n"
    "    try:\n        os.close(number)\n    except OSError:\n        pass\nopen_files()",
    "duplicates over it": "open_files(1)\n"
    "other = os.open(folder / 'user0', os.O_RDWR)\n"
    "for number in range(other + 1, 1000):\n    os.dup2(other, number)",
    "duplicates another own over it": "other = os.open(folder / 'user0', os.O_RDWR | os.O_CREAT)\n"
    "os.dup2(other, own.number)",
    "becomes a daemon": "if os.fork():\n    os._exit(os.wait()[1])\nos.setsid()\n"
    "os.closerange(0, 4096)\nopen_files()",
    "closes and opens twice": "for turn in range(2):\n    os.closerange(0, 4096)\n    open_files()\n"
    "    own.write_at(0, b'middle')",
    "starts a program": "subprocess.run([sys.executable, '-c', "
    "'import os; print(sorted(map(int, os.listdir(\"/proc/self/fd\")))[-1])'], close_fds=False, "
    "stdout=(folder / 'user0').open('w'), check=True)",
    "closes the limit's end": "os.closerange(400, 1024)\nopen_files()",
}


@pytest.mark.parametrize("script", _SCRIPTS.values(), ids=_SCRIPTS)
def test_no_file_of_the_script_is_written(script: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("SCRIPT", script), str(tmp_path)], check=True, timeout=60
    )
    assert (tmp_path / "own").read_bytes() == b"after!"
    written = {path.name: path.read_bytes() for path in tmp_path.glob("user*")}
    if "close_fds" in script:
        assert int(written.pop("user0")) < 500  # nothing of ours is inherited
    assert set(written.values()) <= {b"mine", b""}


def test_descriptors_lie_high_and_low_where_the_limit_is(tmp_path: Path) -> None:
    assert OwnFile(tmp_path / "high").number >= 500
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, limit[1]))
        low = OwnFile(tmp_path / "low")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert low.number < 400
    assert not os.get_inheritable(low.number)
    low.write_at(0, b"a")
    assert (tmp_path / "low").read_bytes() == b"a"


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_is_gone_or_replaced_is_not_written(tmp_path: Path, replaced: bool) -> None:
    own = OwnFile(tmp_path / "own")
    (tmp_path / "own").unlink()
    own.write_at(0, b"a")  # its own, without a name
    if replaced:
        (tmp_path / "own").write_text("another's")
    os.close(own.number)
    with pytest.raises(OSError, match=r"another file|No such file"):
        own.write_at(0, b"b")
    if replaced:
        assert (tmp_path / "own").read_text() == "another's"


def test_a_number_that_the_script_reused_is_not_closed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pipe = OwnDescriptor(writer)
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.dup2(other, pipe.number)
    with pytest.raises(OSError, match="closed"):
        pipe.check()
    pipe.close()
    assert identity_of(pipe.number) == identity_of(other)
    for number in (pipe.number, other, reader):
        os.close(number)
