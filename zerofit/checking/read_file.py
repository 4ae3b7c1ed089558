"""A file's bytes, with a clear error where there are none; and a script's bytes as text."""

from __future__ import annotations

import io
import os

from zerofit.checking.targets import TargetFile
from zerofit.configs.document import FileKind
from zerofit.configs.text import MAX_BYTES, Unreadable
from zerofit.configs.text.unreadable import broken_file
from zerofit.core.errors import UserError

_MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""ASSUMPTION: no training script is longer; a hundred times the longest of transformers' examples."""


def read_bytes(name: str) -> bytes:
    """Return a file's first bytes: all of it, or one more than anything that is checked may have.

    Raises:
        UserError: it is a folder, or the system refuses to read it.
    """
    try:
        with open(name, "rb") as file:
            return file.read(max(MAX_BYTES, _MAX_SCRIPT_BYTES) + 1)
    except OSError as error:
        is_folder = os.path.isdir(name)
        raise UserError(
            "target-unreadable",
            "the file can't be read",
            found=f"{name}: {'it is a folder' if is_folder else error.strerror}",
            why="check reads files one by one" if is_folder else "the system does not allow it",
            fix=f"name the files in it: {os.path.join(name, '*.json')}"
            if is_folder
            else "name a file that you may read",
        ) from None


def decode_script(data: bytes) -> str:
    """Return a script's text, in the encoding that its first lines declare.

    Raises:
        Unreadable: it is no text, or too long.
    """
    if len(data) > _MAX_SCRIPT_BYTES:
        raise Unreadable(
            f"the file is longer than {_MAX_SCRIPT_BYTES} bytes",
            "no training script is so long, so this is another file",
            "name the script",
        )
    import tokenize  # only where there is a script: it takes its time

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(data.decode(encoding), final=True)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(
            "the file is no text in the encoding that it declares",
            f"Python can't read it: {getattr(error, 'msg', None) or error}",
            "save the file as UTF-8",
        ) from None
    if "\x00" in text:
        raise Unreadable(
            "the file holds zero bytes",
            "Python refuses them in source: the file is binary, or damaged",
            "name the script",
            text.count("\n", 0, text.index("\x00")) + 1,
        )
    return text


def script_file(name: str) -> TargetFile:
    """Return a script, read.

    Raises:
        UserError: it can't be opened.
    """
    data = read_bytes(name)
    try:
        return TargetFile(name=name, kind=FileKind.SCRIPT, source=decode_script(data))
    except Unreadable as error:
        return TargetFile(name=name, kind=FileKind.SCRIPT, broken=broken_file(name, FileKind.SCRIPT, error))
