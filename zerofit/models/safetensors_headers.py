"""What the safetensors files of a folder say of their tensors, from their headers alone."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit. Source: https://huggingface.co/docs/safetensors/index#format"""
_FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Its words for types that a model computes in."""


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a folder's safetensors files by name; empty where there are none.

    A tied parameter stands in such files once. The head is the checkpoint's, whatever is trained from it.

    Raises:
        ValueError: a file's header can't be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        try:
            shapes |= _shapes(_header(file))
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is no safetensors file") from error
    return shapes


def stored_dtype(folder: Path) -> str:
    """Return the type of the first floating tensor in a folder's safetensors files, as torch names it.

    It is what transformers loads a model in whose config names none
    (transformers 5.23, modeling_utils.py, _get_dtype). Empty where there is no such tensor.

    Raises:
        ValueError: a file's header can't be read.
    """
    for file in _files(folder):
        try:
            told = [one["dtype"] for name, one in _header(file).items() if name != "__metadata__"]
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is no safetensors file") from error
        for word in told:
            if word in _FLOATING:
                return _FLOATING[word]
    return ""


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _header(file: Path) -> Any:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        return json.loads(stream.read(length))


def _shapes(header: Any) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(told["shape"]) for name, told in header.items() if name != "__metadata__"}
    if not all(type(side) is int and side >= 0 for shape in shapes.values() for side in shape):
        raise TypeError("a shape is whole numbers")
    return shapes


def num_elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor."""
    return math.prod(shape)
