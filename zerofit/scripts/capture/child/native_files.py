"""Reports files that C++ and Rust code is about to write, which raises no audit events itself.

Reported calls are made outside of the confinement.

Tested with torch 2.13, safetensors 0.8, tokenizers 0.23 and pyarrow 26; h5py 3, OpenCV 4 and polars 1 follow
their manuals. Not covered are pyarrow's file systems and datasets, and other compiled code.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from zerofit.scripts.capture.child.file_calls import WRITE_FLAGS
from zerofit.scripts.on_import import when_imported

if TYPE_CHECKING:
    from zerofit.scripts.capture.child.confinement import Confinement

_WRITERS = (
    ("torch.serialization", "_open_zipfile_writer_file.__init__", 1),
    ("torch", "from_file", 0),
    ("torch.storage", "UntypedStorage.from_file", 0),
    ("safetensors.numpy", "serialize_file", 1),
    ("safetensors.torch", "serialize_file", 1),
    ("tokenizers", "Tokenizer.save", 1),
    ("pyarrow", "output_stream", 0),
    ("pyarrow.parquet.core", "ParquetWriter.__init__", 1),
    ("pyarrow.feather", "write_feather", 1),
    ("pyarrow.csv", "write_csv", 1),
    ("h5py._hl.files", "File.__init__", 1),
    ("cv2", "imwrite", 0),
    ("dbm.gnu", "open", 0),
    ("dbm.ndbm", "open", 0),
    *(
        ("polars", f"DataFrame.write_{kind}", 1)
        for kind in ("parquet", "csv", "ipc", "ndjson", "json", "avro", "excel")
    ),
)
"""Module, function, and position of its path argument."""
_NAMES = ("name", "filename", "path", "where", "file", "dest", "output_file", "source")
"""Names of that argument."""
_OPENS_LATER = "dbm.ndbm"
"""A module whose library opens its files when it writes: it needs the permission for good."""
_ENDS_OF_DBM = (".db", ".dir", ".pag")
"""Endings that it adds (https://docs.python.org/3/library/dbm.html)."""


def report_native_files(confinement: Confinement) -> None:
    """Make each of these functions raise the audit event of open() before it writes."""
    for module, name, at in _WRITERS:
        when_imported(module, functools.partial(_before, name=name, at=at, confinement=confinement))
    when_imported("pyarrow", functools.partial(_before_os_file, confinement=confinement))


def _before(module: Any, *, name: str, at: int, confinement: Confinement) -> None:
    *holders, last = name.split(".")
    holder = functools.reduce(getattr, holders, module)
    original = getattr(holder, last, None)
    if original is None:  # another release
        return

    opens_later = module.__name__ == _OPENS_LATER

    def report_and_call(*args: Any, **kwargs: Any) -> Any:
        for path in (*args[at : at + 1], *(kwargs.get(name) for name in _NAMES)):
            _report_write(path, ends=_ENDS_OF_DBM if opens_later else ("",))
        return original(*args, **kwargs)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _only_reads(name, args, kwargs):
            return original(*args, **kwargs)
        if opens_later:
            return report_and_call(*args, **kwargs)
        return confinement.outside(report_and_call, *args, **kwargs)

    setattr(holder, last, call)


def _only_reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name.endswith("from_file"):  # a mapping, which writes to the file if shared
        return not (args[1] if len(args) > 1 else kwargs.get("shared"))
    if name == "open":  # of a dbm
        return str(args[1] if len(args) > 1 else kwargs.get("flag", "r")).startswith("r")
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "r")
    return name == "File.__init__" and mode == "r"


def _report_write(path: Any, *, ends: tuple[str, ...] = ("",)) -> None:
    """Raise the audit event of a file opened for writing, with each of some endings."""
    if isinstance(path, (str, bytes, os.PathLike)):
        for end in ends:
            sys.audit("open", os.fsdecode(path) + end, "wb", WRITE_FLAGS)


def _before_os_file(module: Any, *, confinement: Confinement) -> None:
    """Replace pyarrow's compiled file class by a subclass that reports."""
    new = module.OSFile.__new__

    def report_and_make(cls: type, path: Any, mode: str, memory_pool: Any) -> Any:
        _report_write(path)
        return new(cls, path, mode, memory_pool)

    class OSFile(module.OSFile):  # type: ignore[misc]
        def __init__(self, path: Any, mode: str = "r", memory_pool: Any = None) -> None:
            """Do nothing: the compiled class opens the file in __new__."""

        def __new__(cls, path: Any, mode: str = "r", memory_pool: Any = None) -> Any:
            if mode in ("r", "rb"):
                return new(cls, path, mode, memory_pool)
            return confinement.outside(report_and_make, cls, path, mode, memory_pool)

    module.OSFile = OSFile
