"""Names ZeRO-3's placeholders as the cause of a script's error: torch's message blames their shapes.

Between passes a weight that ZeRO-3 holds in shards is an empty tensor of shape (0,), and so is a copy of it.
"""

from __future__ import annotations

import ast
import linecache
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import EXIT_USAGE, UserError, message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType, TracebackType

_KINDS = (RuntimeError, IndexError, ValueError, ZeroDivisionError)
_SAYS_EMPTY = re.compile(
    r"\(0[,)]|\[0[],]|(?:size|==|:|=) ?0\b(?![.\d])|\b0 elements|division by zero|\bx0\b|\b0x\d"
)
"""Parts of torch's and transformers' messages about an empty tensor."""
_WATCHING = "zerofit/training/step/deepspeed/sharded_reads.py"
"""Stands between the script's line and torch's function."""
_ENGINE = "deepspeed/runtime/engine"
_MOST_ITEMS = 10_000
"""Members of a list or parameters of a module that are looked at. ASSUMPTION: larger ones are data."""


def sharded_weight_error(failure: BaseException) -> UserError | None:
    """Return the error for a failure in code that works with a weight that ZeRO-3 holds in shards.

    Such a weight, or an empty copy of one, must be a value of the code that failed: one that the script's
    failing expression names, or a variable of the library's function that it called. A script that fails for
    another reason has its model, and often one of its weights, in a variable too.

    Returns:
        None if there is none.
    """
    if not isinstance(failure, _KINDS) or type(failure).__name__ == "OutOfMemoryError":
        return None
    places = [place for place in _places(failure.__traceback__) if not place.file.endswith(_WATCHING)]
    if not places:
        return None
    says_empty = isinstance(failure, ZeroDivisionError) or bool(_SAYS_EMPTY.search(message_of(failure)))
    # In a model that an engine runs, the weights of other modules are empty, and rightly so.
    is_inside = says_empty and not any(_ENGINE in place.file for place in places)
    has_weights = any(_has_weights(place.frame) for place in places)
    for place in _failing(places) if is_inside else places[-1:]:
        values = _values(place)
        name = _first(values, is_placeholder) or (_first(values, _is_empty) if has_weights else None)
        if name is None and is_inside and (place.is_of_library or place is places[-1]):
            parts = [(f"{name}{path}", part) for name, value in values for path, part in _parts(value)]
            name = _first(parts, is_placeholder) or (_first(parts, _is_empty) if has_weights else None)
        if name is not None:
            place = _in_script(places)
            message = message_of(failure).partition("\n")[0]
            return sharded_weight(
                f"{name} in {place.file}:{place.line}: {type(failure).__name__}: {message}",
                so="with size 0, and so are copies of it",
                exit_code=1,
            )
    return None


@dataclass(frozen=True, slots=True)
class _Place:
    """A call in a traceback."""

    frame: FrameType
    line: int
    instruction: int
    """Offset in the function's code."""

    @property
    def file(self) -> str:
        return self.frame.f_code.co_filename

    @property
    def is_of_library(self) -> bool:
        return "/site-packages/" in self.file


def _places(traceback: TracebackType | None) -> Iterator[_Place]:
    """Yield the calls of a traceback, outermost first."""
    while traceback is not None:
        yield _Place(traceback.tb_frame, traceback.tb_lineno, traceback.tb_lasti)
        traceback = traceback.tb_next


def _failing(places: list[_Place]) -> Iterator[_Place]:
    """Yield the calls of a library in which a script's line failed, innermost first, and the script's."""
    for place in reversed(places):
        yield place
        if not place.is_of_library:
            return


def is_placeholder(value: Any) -> bool:
    """Return True for a weight whose values ZeRO-3 holds in shards at the moment."""
    status = getattr(value, "ds_status", None)
    return status is not None and getattr(status, "name", "") != "AVAILABLE" and value.numel() == 0


def _values(place: _Place) -> list[tuple[str, Any]]:
    """Return what a script's failing expression names, outermost first, or a library function's variables."""
    if place.is_of_library:
        return list(place.frame.f_locals.items())
    for source in _sources(place):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        named = [
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Subscript | ast.Name)
        ]
        return [(ast.unparse(node), _value(place.frame, node)) for node in named]
    return []


def _sources(place: _Place) -> Iterator[str]:
    """Yield the failing expression, and ways to read its line."""
    at = next(islice(place.frame.f_code.co_positions(), place.instruction // 2, None), None)
    if at is not None:
        line, end_line, start, end = at
        if line is not None and end_line is not None:  # None with -X no_debug_ranges
            lines = [linecache.getline(place.file, number).encode() for number in range(line, end_line + 1)]
            lines[-1] = lines[-1][:end]
            lines[0] = lines[0][start:]
            yield f"({b''.join(lines).decode(errors='replace')})"
    text = linecache.getline(place.file, place.line).strip()
    yield from (text, f"{text} pass", text.removeprefix("el"), f"{text.removeprefix('el')} pass")


def _value(frame: FrameType, node: ast.expr) -> Any:
    """Return the value of a variable, or of a part of a module or container; None for all else.

    Nothing of the script is called for it, such as a property or __getitem__().
    """
    import torch

    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(frame, node.value)
        if isinstance(owner, torch.nn.Module):
            parts = {**dict(owner.named_parameters(recurse=False)), **dict(owner.named_children())}
            if node.attr in parts:
                return parts[node.attr]
        return getattr(owner, "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner, key = _value(frame, node.value), node.slice.value
        if isinstance(owner, torch.nn.Module):
            return dict(owner.named_children()).get(str(key))
        if type(owner) in (list, tuple):
            return owner[key] if type(key) is int and -len(owner) <= key < len(owner) else None
        return owner.get(key) if type(owner) is dict else None
    return None


def _first(values: Iterable[tuple[str, Any]], is_wanted: Callable[[Any], bool]) -> str | None:
    return next((name for name, value in values if is_wanted(value)), None)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of a container's members, or of a module's parameters."""
    import torch

    if isinstance(value, torch.nn.Module):
        yield from ((f".{name}", part) for name, part in islice(value.named_parameters(), _MOST_ITEMS))
    elif type(value) in (list, tuple):
        yield from ((f"[{place}]", part) for place, part in enumerate(value[:_MOST_ITEMS]))
    elif type(value) is dict:
        yield from ((f"[{key!r}]", part) for key, part in islice(value.items(), _MOST_ITEMS))


def _has_weights(frame: FrameType) -> bool:
    """Return True if a function has weights that ZeRO-3 partitions, or a model with such."""
    values = list(frame.f_locals.values())
    inside = (part for value in values for _, part in _parts(value))
    return any(hasattr(value, "ds_id") for value in (*values, *inside))


def _is_empty(value: Any) -> bool:
    import torch

    is_tensor = isinstance(value, torch.Tensor) and not hasattr(value, "ds_id")
    return is_tensor and tuple(value.shape) == (0,) and value.is_floating_point()


def script_place(failure: BaseException) -> str:
    """Return the file and line of the script's innermost call in a failure's traceback."""
    place = _in_script([*_places(failure.__traceback__)])
    return f"{place.file}:{place.line}"


def _in_script(places: list[_Place]) -> _Place:
    return ([place for place in places if not place.is_of_library] or places)[-1]


def sharded_weight(found: str, *, so: str, exit_code: int = EXIT_USAGE) -> UserError:
    """Return the error for a script that works with a weight of which no rank holds the whole.

    Args:
        found: the weight, and the place in the script.
        so: what follows from its tensor being empty.
        exit_code: of the process.
    """
    return UserError(
        "weight-sharded-by-zero3",
        "the script works with a weight that ZeRO-3 holds in shards",
        found=found,
        why=f"outside of the module's own pass no rank holds the whole weight: its tensor is empty, {so}",
        fix="read and copy weights inside deepspeed.zero.GatheredParameters, create a model that is not "
        "prepared before the Accelerator, or train without ZeRO-3: --zero-stage 2, or --engine native",
        see="https://deepspeed.readthedocs.io/en/latest/zero3.html#gathering-parameters",
        exit_code=exit_code,
    )
