"""Files from disk: their bytes, a script's text in its own encoding, and where libraries look for theirs."""

from __future__ import annotations

import base64
import io
import os
from contextlib import suppress

from zerofit.checking.targets import TargetFile
from zerofit.configs.document import FileKind
from zerofit.configs.text.unreadable import MAX_BYTES
from zerofit.core.bounded_read import read_bounded
from zerofit.core.errors import Unreadable, UserError

_MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""ASSUMPTION: no training script is longer; a hundred times the longest of transformers' examples."""


def read_bytes(name: str) -> bytes:
    """Return a file's bytes, at most one more than the maximum that can be checked.

    Raises:
        UserError: it is a folder, or can't be read.
    """
    try:
        return read_bounded(name, most_bytes=max(MAX_BYTES, _MAX_SCRIPT_BYTES) + 1, cuts=True)
    except OSError as error:
        is_folder = os.path.isdir(name)
        raise UserError(
            "target-unreadable",
            "the file can't be read",
            found=f"{name}: {'it is a folder' if is_folder else error.strerror}",
            why="files are read one by one" if is_folder else "permission denied",
            fix=f"name the files in it: {os.path.join(name, '*.json')}"
            if is_folder
            else "name a readable file",
        ) from None


def decode_script(data: bytes) -> str:
    """Return a script's text, in the encoding declared in its first lines.

    Raises:
        Unreadable: it is not text, or too long.
    """
    if len(data) > _MAX_SCRIPT_BYTES:
        raise Unreadable(
            f"the file has more than {_MAX_SCRIPT_BYTES} bytes",
            "no training script is that long, so this is another file",
            "name the script",
        )
    import tokenize  # imported only if needed, since it takes time

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(
            "the file is not text in its declared encoding",
            f"Python can't read it: {getattr(error, 'msg', None) or error}",
            "save the file as UTF-8",
        ) from None


def script_file(name: str) -> TargetFile:
    """Return a script's file, read.

    Raises:
        UserError: it can't be opened.
    """
    data = read_bytes(name)
    try:
        return TargetFile(name=name, kind=FileKind.SCRIPT, source=decode_script(data))
    except Unreadable as error:
        return TargetFile(name=name, kind=FileKind.SCRIPT, broken=error)


def inline_json(value: str) -> str | None:
    """Return the JSON given instead of a file name, plain or in base64; accelerate accepts both."""
    with suppress(ValueError):  # raised by binascii and utf-8
        value = value if value.lstrip().startswith("{") else base64.urlsafe_b64decode(value).decode("utf-8")
    return value if value.lstrip().startswith("{") else None


def default_accelerate_file() -> str | None:
    """Return the file that `accelerate launch` reads by default.

    Source:
    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/config/config_args.py
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = os.path.expanduser(os.environ.get("HF_HOME", os.path.join(cache, "huggingface")))
    files = (os.path.join(home, "accelerate", f"default_config.{suffix}") for suffix in ("yaml", "json"))
    return next((file for file in files if os.path.isfile(file)), None)
