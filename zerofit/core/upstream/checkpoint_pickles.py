"""Loads the pickles of a checkpoint as data: torch, DeepSpeed and accelerate run no code of it.

A pickle may name any function to call. torch.load(weights_only=True) calls those that it knows; what states
of DeepSpeed, numpy and the standard library need beside them is allowed here by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

UNTRUSTED = "checkpoint-not-trusted"
_ALLOWED = frozenset(
    {
        # What accelerate allows (utils/other.py, TORCH_SAFE_GLOBALS) for numpy's random states and arrays.
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray.scalar",
        "numpy.ndarray",
        "numpy.dtype",
        *(f"numpy.dtypes.{kind}{bits}DType" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)),
        *(f"numpy.dtypes.Float{bits}DType" for bits in (16, 32, 64)),
        "numpy.dtypes.BoolDType",
        # DeepSpeed's states: runtime/zero/stage_1_and_2.py and stage3.py, state_dict(); runtime/engine.py.
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        # Plain values of the standard library, in states that scripts add.
        "collections.deque",
        "datetime.date",
        "datetime.datetime",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "fractions.Fraction",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "types.SimpleNamespace",
        "argparse.Namespace",
        "uuid.UUID",
    }
)
"""Classes and functions, by module and name, that make values and do nothing else."""
_METADATA = frozenset(
    {
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint._extension.ExtensionRegistry",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.device",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "builtins.set",
        "builtins.frozenset",
    }
)
"""What the index of a sharded checkpoint is made of (torch/distributed/checkpoint/metadata.py)."""
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""First bytes of torch.save()'s files: a zip archive, before torch 1.6 a pickle."""
_SHOWN_BYTES = 40


@contextlib.contextmanager
def loading_data_only() -> Iterator[None]:
    """Make torch.load() and torch.distributed.checkpoint refuse what would run code, whoever calls them.

    Raises:
        UserError: a pickle needs more than what is allowed; also if a library caught that error.
    """
    import torch
    from torch.distributed.checkpoint import filesystem

    original, refusals = torch.load, list[UserError]()

    @functools.wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pickle_module", None)
        try:
            with torch.serialization.safe_globals(_needed(f)):
                return original(f, *args, **{**kwargs, "weights_only": True})
        except pickle.UnpicklingError as error:
            refusals.append(_untrusted(f, str(error)))
            raise refusals[-1] from None

    class Index(_IndexPickle):
        refused = refusals

    torch.load, filesystem.pickle = load, Index()
    try:
        yield
    except Exception:
        if refusals:  # a library may have made another error of it
            raise refusals[0] from None
        raise
    finally:
        torch.load, filesystem.pickle = original, pickle
    if refusals:
        raise refusals[0]


def _needed(file: Any) -> list[Any]:
    """Return the allowed classes and functions that a file's pickle names, each with its name."""
    import torch

    place = file.tell() if hasattr(file, "tell") else None
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError):  # of before 1.6, or damaged
        names = sorted(_ALLOWED)
    else:
        if any(name.startswith("numpy.") for name in names):  # whose types of numbers a pickle does not name
            names = [*names, *(name for name in _ALLOWED if name.startswith("numpy.dtypes."))]
    finally:
        if place is not None:
            file.seek(place)
    found = []
    for name in names:
        if name in _ALLOWED and (value := _named(name)) is not None:
            found.append((value, name))
    return found


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


class _IndexPickle:
    """Stands in for the module `pickle` where torch reads the index of a sharded checkpoint."""

    refused: list[UserError]

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def load(self, file: Any) -> Any:
        """Return the index in a file."""
        try:
            return _IndexUnpickler(file).load()
        except pickle.UnpicklingError as error:
            self.refused.append(_untrusted(file, str(error)))
            raise self.refused[-1] from None


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if f"{module}.{name}" not in _METADATA:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")
        return super().find_class(module, name)


def damage_of(path: Path) -> str | None:
    """Return why a file can't be one of torch.save(), from its first and last bytes; None if it can."""
    with path.open("rb") as stream:
        head = stream.read(_SHOWN_BYTES)
    if not head:
        return "is empty"
    if head.startswith(_ZIP):
        return None if zipfile.is_zipfile(path) else "is cut off"
    return None if head.startswith(_PICKLE) else f"begins with {head!r}"


def _untrusted(file: Any, said: str) -> UserError:
    is_named = isinstance(file, str) or hasattr(file, "__fspath__")
    place = file if is_named else getattr(file, "name", "a stream")
    names = re.findall(r"GLOBAL ([\w.]+)", said)
    if not names and is_named and (damage := damage_of(Path(file))) is not None:
        return UserError(
            "checkpoint-damaged",
            "a file of the checkpoint was not written by torch.save()",
            found=f"{file} {damage}",
            why="a download or copy was interrupted, or left a pointer of Git LFS",
            fix="copy or download it again: hf download, git lfs pull",
        )
    needs = f"it names {names[0]}" if names else said.splitlines()[0][:200]
    return untrusted_checkpoint(f"{place}: {needs}")


def untrusted_checkpoint(found: str) -> UserError:
    """Return the error for a checkpoint whose loading would run code."""
    return UserError(
        UNTRUSTED,
        "the checkpoint has more than tensors and plain values",
        found=found,
        why="loading such a file runs whatever code it names, and a checkpoint may come from anywhere",
        fix="if you or your own script wrote the checkpoint, add --trust-checkpoint",
    )
