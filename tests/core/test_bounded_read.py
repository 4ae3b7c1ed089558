"""Files that anyone may have put there are read with an end."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zerofit.core.bounded_read import open_regular, open_stream, read_bounded, read_bounded_text
from zerofit.core.bounds import bounded_memory, bounded_time


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(target)


_REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "zeros": (_link_to("/dev/zero"), "Not a regular file"),
    "random": (_link_to("/dev/urandom"), "Not a regular file"),
    "full": (_link_to("/dev/full"), "Not a regular file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "a loop": (lambda file: file.symlink_to(file), "Too many levels of symbolic links"),
    "too large": (lambda file: file.write_bytes(b"x" * 101), "File too large: over 100 bytes"),
    "missing": (lambda file: None, "No such file or directory"),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_what_has_no_end_is_refused(tmp_path: Path, kind: str) -> None:
    make, why = _REFUSED[kind]
    file = tmp_path / "file"
    make(file)
    with pytest.raises(OSError, match=re.escape(why)) as raised:
        read_bounded(file, most_bytes=100)
    assert raised.value.strerror == why


@pytest.mark.parametrize("kind", ["zeros", "random", "full", "a folder", "a loop", "missing"])
def test_a_stream_has_an_end(tmp_path: Path, kind: str) -> None:
    make, why = _REFUSED[kind]
    file = tmp_path / "file"
    make(file)
    with pytest.raises(OSError, match=re.escape(why)):
        open_stream(file)


def test_a_file_a_pipe_and_nothing_are_streams(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    reader, writer = os.pipe()
    os.write(writer, b"y")
    os.close(writer)
    read = []
    for place in (tmp_path / "file", f"/dev/fd/{reader}", os.devnull):
        with open_stream(place) as file:
            read.append(file.read())
    os.close(reader)
    assert read == [b"x", b"y", b""]


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 100])
def test_a_file_within_the_limit_is_read_whole(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    assert read_bounded(tmp_path / "file", most_bytes=100) == data
    assert read_bounded(os.devnull, most_bytes=100) == b""


def test_a_text_has_the_line_ends_of_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    assert read_bounded_text(tmp_path / "file", most_bytes=100) == (tmp_path / "file").read_text()


def test_a_pipe_without_a_writer_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_bounded(tmp_path / "pipe", most_bytes=100) == b""
    with pytest.raises(OSError, match="Not a regular file"):
        open_regular(tmp_path / "pipe")


def test_a_pipe_is_read_to_its_end_and_a_silent_one_is_left() -> None:
    reader, writer = os.pipe()

    def write() -> None:
        for part in (b"one ", b"two"):
            time.sleep(0.1)
            os.write(writer, part)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_bounded(f"/dev/fd/{reader}", most_bytes=100) == b"one two"
    thread.join()
    os.close(reader)
    reader, writer = os.pipe()
    with pytest.raises(TimeoutError, match="Nothing was written to it in 0 s"):
        read_bounded(f"/dev/fd/{reader}", most_bytes=100, limit_s=0.2)
    os.close(reader)
    os.close(writer)


def _never_end() -> None:
    while True:
        pass


def test_code_that_does_not_end_is_interrupted() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.2 s"), bounded_time(0.2):
        _never_end()
    assert time.monotonic() - began < 10
    with bounded_time(0.2):
        pass
    time.sleep(0.3)  # no alarm is left


def test_code_that_takes_all_memory_is_ended() -> None:
    with pytest.raises(MemoryError), bounded_memory(1 << 28):
        bytearray(1 << 30)
    assert len(bytearray(1 << 29)) == 1 << 29
