"""Damages a file as full disks, editors, other programs and attackers do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DIGITS = "7" * 5000
_DEEP = "[" * 100_000 + "]" * 100_000


def _values(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Return a damage that replaces all values of a JSON object; other files get a line of them."""

    def damaged(data: bytes) -> bytes:
        try:
            document = json.loads(data)
        except ValueError:
            return json.dumps({"value": change("text")}).encode()
        if not isinstance(document, dict):
            return json.dumps(change(document)).encode()
        return json.dumps({name: change(value) for name, value in document.items()}).encode()

    return damaged


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data.rstrip()[:-1],
    "zeros": lambda data: bytes(len(data)),
    "not text": lambda data: b"\xff\xfe\x80" + data[::-1],
    "twice": lambda data: data + data,
    "blanks": lambda _: b" \n" * 100,
    "a list": lambda _: b"[]",
    "null": lambda _: b"null",
    "a number": lambda _: b"7",
    "a long number": lambda _: _DIGITS.encode(),
    "long numbers": lambda _: f'{{"pid": {_DIGITS}, "exit_code": {_DIGITS}}}'.encode(),
    "deep": lambda _: _DEEP.encode(),
    "deep value": lambda _: f'{{"pid": {_DEEP}, "kind": {_DEEP}}}'.encode(),
    "no fields": lambda _: b"{}",
    "texts": _values(lambda _: "later"),
    "nulls": _values(lambda _: None),
    "infinite": lambda data: _values(lambda _: "@")(data).replace(b'"@"', b"1e999"),
    "negative": _values(lambda _: -1),
    "lists": _values(lambda _: [{}, None]),
    "half a character": _values(lambda _: "\ud83d\0"),
    "true": _values(lambda _: True),
}
"""New contents of a file, from the old."""


def _folder(file: Path) -> None:
    file.mkdir()
    (file / "x").touch()


PLACES: dict[str, Callable[[Path], None]] = {
    "a folder": _folder,
    "a pipe": os.mkfifo,
    "endless": lambda file: file.symlink_to("/dev/zero"),
    "a link to nothing": lambda file: file.symlink_to("/nowhere/at/all"),
    "a link to itself": lambda file: file.symlink_to(file),
}
"""What is put in the place of a file."""
DAMAGES = (*CONTENTS, *PLACES)


def damage(file: Path, way: str) -> None:
    """Damage a file in one of the ways."""
    if way in CONTENTS:
        file.write_bytes(CONTENTS[way](file.read_bytes()))
    else:
        file.unlink()
        PLACES[way](file)


def mend(file: Path, data: bytes) -> None:
    """Put a file back."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    file.write_bytes(data)
