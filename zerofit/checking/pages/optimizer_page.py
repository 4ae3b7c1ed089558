"""The optimizer table as a page of the reference: what each optimizer does under each stage and offload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.rules.optimizer.columns import COLUMNS, optimizer_lines
from zerofit.checking.rules.optimizer.row import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.checking.rules.optimizer.row import Row

_HEAD = """\
<!-- Written by `make docs` from zerofit/checking/rules/optimizer/table.py: edit the rows there. -->
# Optimizers under ZeRO and offload

What an optimizer trains once DeepSpeed shards or offloads it, against an unsharded fp32 run of the same
optimizer, as the relative error of the weights after five steps. `zerofit check`, `config` and `launch` all
read this table. Ids name where an optimizer comes from; `config.` is DeepSpeed's own optimizer section.
Parameter offload changed no answer; nvme answers as cpu does.

- **ok**: the same weights, to 1e-4.
- **other numbers**: the optimizer that was asked for runs, and shards change what it computes.
- **WRONG**: another optimizer runs, and nothing says so.
- **refused**: the run ends in an error.
- **?**: nobody measured it, and nothing in the libraries decides it.

A star marks what a CPU can't run, and the libraries' source decides.
"""
_WORDS = {
    Answer.ALLOWED: "ok",
    Answer.DIFFERENT: "other numbers",
    Answer.WRONG: "**WRONG**",
    Answer.REFUSED: "refused",
    Answer.UNKNOWN: "?",
}


def optimizer_page(measured: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        measured: what the harness wrote: the date, the versions, the machine, and the cases.
    """
    versions = ", ".join(f"{package} {version}" for package, version in measured["versions"].items())
    notes: dict[str, int] = {}
    table = [
        "| optimizers | " + " | ".join(_title(column.title) for column in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for line in optimizer_lines():
        names = ", ".join(f"`{name}`" for name in line.optimizers)
        table.append(f"| {names} | " + " | ".join(_cell(row, notes) for row in line.rows) + " |")
    reasons = [f"{number}. {text}" for text, number in notes.items()]
    cases = f"{len(measured['cases'])} cases on {measured['machine']}"
    run = f"Measured on {measured['date']}: {cases}, with {versions}."
    return "\n".join(
        [_HEAD, *table, "", "Why:", "", *reasons, "", f"{run} `make evidence` runs them anew.", ""]
    )


def _title(title: str) -> str:
    """Return a column's title, its keys as code."""
    words = title.split(", ")
    return ", ".join(f"`{word}`" if ":" in word or "(" in word else word for word in words)


def _cell(row: Row, notes: dict[str, int]) -> str:
    number = notes.setdefault(row.cause.value, len(notes) + 1)
    star = "*" if row.not_run else ""
    return f"{_WORDS[row.answer]}{star}{_error(row)} ({number})"


def _error(row: Row) -> str:
    if row.error is None:
        return ""
    least, most = row.error
    return f" {least:.2g}" if f"{least:.2g}" == f"{most:.2g}" else f" {least:.2g} to {most:.2g}"
