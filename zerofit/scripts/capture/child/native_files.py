"""Tells the guard of files of what C++ and Rust code is about to write: they raise no audit event themselves.

Tried with torch 2.13, safetensors 0.8, tokenizers 0.23 and pyarrow 26; h5py 3, OpenCV 4 and polars 1 are
taken from their manuals. Not told of are pyarrow's file systems and datasets, and other compiled code.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from zerofit.scripts.on_import import when_imported

_WRITTEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_READS = ("r", "rb")
_NAMES = ("name", "filename", "path", "where", "file", "dest", "output_file", "source")
"""What these functions call the argument that is a path."""
_POLARS = (
    "write_parquet",
    "write_csv",
    "write_ipc",
    "write_ndjson",
    "write_json",
    "write_avro",
    "write_excel",
)


def tell_of_native_files() -> None:
    """Have each of these functions raise the event that Python's open() raises, before it writes."""
    when_imported("torch.serialization", lambda module: _before(module._open_zipfile_writer_file, "__init__"))
    when_imported("safetensors.numpy", lambda module: _before(module, "serialize_file"))
    when_imported("safetensors.torch", lambda module: _before(module, "serialize_file"))
    when_imported("tokenizers", lambda module: _before(module.Tokenizer, "save"))
    when_imported("pyarrow.parquet.core", lambda module: _before(module.ParquetWriter, "__init__"))
    when_imported("pyarrow.feather", lambda module: _before(module, "write_feather"))
    when_imported("pyarrow.csv", lambda module: _before(module, "write_csv"))
    when_imported("pyarrow", _before_os_file)
    when_imported("h5py._hl.files", lambda module: _before(module.File, "__init__", mode_at=2))
    when_imported("cv2", lambda module: _before(module, "imwrite", at=0))
    when_imported("polars", _before_polars)


def tell_of_write(path: str | bytes | os.PathLike[str]) -> None:
    """Raise the event of a file that is opened to be written anew."""
    sys.audit("open", path, "wb", _WRITTEN)


def _before(holder: Any, name: str, *, at: int = 1, mode_at: int | None = None) -> None:
    """Have a function tell of each path among its arguments, before it runs.

    Args:
        holder: the module or class.
        name: of the function.
        at: place of the argument that is a path; 1 where self or what is written comes first.
        mode_at: place of the one that says "r" where nothing is written; None where it always writes.
    """
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (args[at] if len(args) > at else None, *(kwargs.get(one) for one in _NAMES))
        if mode_at is None or _mode(args, kwargs, mode_at) not in _READS:
            for path in given:
                if isinstance(path, (str, bytes, os.PathLike)):
                    tell_of_write(path)
        return original(*args, **kwargs)

    setattr(holder, name, call)


def _mode(args: tuple[Any, ...], kwargs: dict[str, Any], at: int) -> Any:
    return args[at] if len(args) > at else kwargs.get("mode", "r")


def _before_os_file(module: Any) -> None:
    """pyarrow's own file is a compiled class: one below it tells, and stands in its place."""

    class OSFile(module.OSFile):  # type: ignore[misc]
        def __init__(self, path: Any, mode: str = "r", memory_pool: Any = None) -> None:
            """Nothing is left to do: the compiled class opens the file in __new__."""

        def __new__(cls, path: Any, mode: str = "r", memory_pool: Any = None) -> Any:
            if mode not in _READS:
                tell_of_write(path)
            return super().__new__(cls, path, mode, memory_pool)

    module.OSFile = OSFile
    _before(module, "output_stream", at=0)


def _before_polars(module: Any) -> None:
    for name in _POLARS:
        if hasattr(module.DataFrame, name):
            _before(module.DataFrame, name)
