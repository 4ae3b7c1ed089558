"""Tells the guard of files of what C++ and Rust code is about to write: they raise no audit event themselves.

Tried with torch 2.13, safetensors 0.8, tokenizers 0.23 and pyarrow 26.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from zerofit.runtime.on_import import when_imported

_WRITTEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_NAMES = ("name", "filename", "path", "where")
"""What these functions call the argument that is a path; unnamed, it comes after self or the tensors."""


def tell_of_native_files() -> None:
    """Have each of these functions raise the event that Python's open() raises, before it writes."""
    when_imported("torch.serialization", lambda module: _before(module._open_zipfile_writer_file, "__init__"))
    when_imported("safetensors.numpy", lambda module: _before(module, "serialize_file"))
    when_imported("safetensors.torch", lambda module: _before(module, "serialize_file"))
    when_imported("tokenizers", lambda module: _before(module.Tokenizer, "save"))
    when_imported("pyarrow.parquet.core", lambda module: _before(module.ParquetWriter, "__init__"))


def _before(holder: Any, name: str) -> None:
    """Have a function tell of each path among its arguments, before it runs."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (args[1] if len(args) > 1 else None, *(kwargs.get(one) for one in _NAMES))
        for path in given:
            if isinstance(path, (str, bytes, os.PathLike)):
                sys.audit("open", path, "wb", _WRITTEN)
        return original(*args, **kwargs)

    setattr(holder, name, call)
