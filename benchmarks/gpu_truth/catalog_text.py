"""Changes single entries in the text of zerofit/catalog/*.toml, and leaves all else byte for byte."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.rates import Rate

_IDENTITY = ("name", "least_compute_capability", "gpus")
"""What makes a rate of the catalog another one."""


def context_lines(context_mib: int, source: str) -> str:
    """Return the two lines that give a GPU of gpus.toml its context."""
    return f"context_mib = {context_mib}\ncontext_source = {_quoted(source)}\n"


def rate_block(rate: Rate) -> str:
    """Return a rate of one GPU as rates.toml has it."""
    lines = (
        "[[rate]]",
        f"name = {_quoted(rate.name)}",
        f"value = {rate.value}",
        f"unit = {_quoted(rate.unit)}",
        f"basis = {_quoted(rate.basis)}",
        f"gpus = [{', '.join(map(_quoted, rate.gpus))}]",
        f"source = {_quoted(rate.source)}",
    )
    return "\n".join(lines) + "\n"


def with_context(text: str, gpu: str, *, context_mib: int, source: str) -> str:
    """Return gpus.toml with the context of one GPU, before its sources and in place of what it had.

    Args:
        text: the file's.
        gpu: the `name` of an entry.
        context_mib: whole MiB.
        source: where they are from.
    """
    lines = text.splitlines(keepends=True)
    start, end = next(place for place in _blocks(lines, "gpu") if _entry(lines, place)["name"] == gpu)
    kept = [line for line in lines[start:end] if not line.startswith(("context_mib ", "context_source "))]
    at = next(index for index, line in enumerate(kept) if line.startswith("sources "))
    kept.insert(at, context_lines(context_mib, source))
    changed = "".join([*lines[:start], *kept, *lines[end:]])

    def without(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if not key.startswith("context_")}

    _check_only(text, changed, "gpu", lambda entry: without(entry) if entry["name"] == gpu else entry)
    return changed


def with_rate(text: str, rate: Rate) -> str:
    """Return rates.toml with the rate of one GPU: in place of what it had, else behind its name's last.

    Args:
        text: the file's.
        rate: of one GPU; its name stands in the file already.
    """
    lines = text.splitlines(keepends=True)
    wanted = _identity(tomllib.loads(rate_block(rate))["rate"][0])
    of_name = [place for place in _blocks(lines, "rate") if _entry(lines, place)["name"] == rate.name]
    same = [place for place in of_name if _identity(_entry(lines, place)) == wanted]
    start, end = same[0] if same else (of_name[-1][1], of_name[-1][1])
    new = rate_block(rate) if same else "\n" + rate_block(rate)
    changed = "".join([*lines[:start], new, *lines[end:]])
    _check_only(text, changed, "rate", lambda entry: None if _identity(entry) == wanted else entry)
    return changed


def _blocks(lines: list[str], table: str) -> Iterator[tuple[int, int]]:
    """Yield first line and end of each [[table]]; in the catalog an empty line or the file's end follows."""
    for start, line in enumerate(lines):
        if line.strip() == f"[[{table}]]":
            rest = (index for index in range(start, len(lines)) if not lines[index].strip())
            yield start, next(rest, len(lines))


def _entry(lines: list[str], place: tuple[int, int]) -> dict[str, Any]:
    (entries,) = tomllib.loads("".join(lines[slice(*place)])).values()
    return dict(entries[0])


def _identity(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in _IDENTITY)


def _check_only(
    before: str, after: str, table: str, rest: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> None:
    """Check that two texts say the same beside what `rest` takes away of each entry."""

    def others(text: str) -> list[dict[str, Any]]:
        return [kept for entry in tomllib.loads(text)[table] if (kept := rest(entry)) is not None]

    assert others(before) == others(after), "an entry that was not meant has changed"


def _quoted(text: str) -> str:
    """Return a TOML string: JSON's escapes are among TOML's."""
    return json.dumps(str(text), ensure_ascii=False)
