"""Files with command lines: shell scripts, batch jobs, and the cells of notebooks that a shell runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from zerofit.checking.inputs.shell_lines import WrittenFile, shell_lines
from zerofit.core.command import is_shell_script
from zerofit.core.setting import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.checking.inputs.shell_lines import ShellLine

_SHELL_CELL = re.compile(r"%%(?:bash|sh|shell|script\s+(?:ba|z)?sh)\b[^\n]*\n?")
_WRITING_CELL = re.compile(r"%%(?:writefile|file)\s+(\S+)[^\n]*\n?")
_SHELL_LINE = re.compile(r"\s*(?:[A-Za-z_]\w*\s*=\s*)?!+(?=[^=!\s])")
_CD_LINE = re.compile(r"\s*%cd\s+(\S+)")
_CONTINUED = re.compile(r"\\[ \t]*$")


def has_lines(name: str, data: bytes) -> bool:
    """Return True if a file has command lines, by its name or its first line."""
    return name.lower().endswith(".ipynb") or is_shell_script(name, data)


def lines_of_file(name: str, text: str, *, started: Sequence[str] = ()) -> tuple[ShellLine, ...]:
    """Return the command lines of a shell script or a notebook.

    Args:
        name: the file.
        text: its content.
        started: the words of the line that starts it; empty if that is unknown.

    Raises:
        ValueError: it is no notebook, though its name says so.
    """
    if name.lower().endswith(".ipynb"):
        return tuple(_lines_of_notebook(name, text))
    return shell_lines(text, name=name, started=started)


def _lines_of_notebook(name: str, text: str) -> Iterator[ShellLine]:
    """Yield the lines of all cells; each `!` starts a shell of its own, but `%cd` and written files stay."""
    folder, written = "", dict[str, WrittenFile]()
    for number, source in _cells(text):
        cell = f"{name}, cell {number}"
        if (writing := _WRITING_CELL.match(source)) is not None:
            body = source[writing.end() :]
            written[writing[1].strip("'\"")] = WrittenFile(text=body, place=Place(file=cell, line=1))
            continue
        if (shell := _SHELL_CELL.match(source)) is not None:
            blocks = [(2, source[shell.end() :])]
        else:
            blocks = list(_blocks(source))
        for first_line, block in blocks:
            if (change := _CD_LINE.match(block)) is not None:
                folder = str(PurePosixPath(folder, change[1].strip("'\"")))
                continue
            for line in shell_lines(block, name=cell, first_line=first_line):
                both = {**written, **line.written}
                yield replace(line, folder=str(PurePosixPath(folder, line.folder)), written=both)


def _cells(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the source of each code cell."""
    document = json.loads(text)
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ValueError("it has no cells")
    for number, cell in enumerate(cells, start=1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            yield number, "".join(map(str, source)) if isinstance(source, list) else str(source)


def _blocks(source: str) -> Iterator[tuple[int, str]]:
    r"""Yield each `!` command of a cell with its first line, without the `!`; and each `%cd`.

    IPython joins lines behind a \, as a shell does. A line that starts with a flag is no Python, so that it
    belongs to the command above.
    """
    lines = source.split("\n")
    number = 0
    while number < len(lines):
        first = number
        number += 1
        if _CD_LINE.match(lines[first]):
            yield first + 1, lines[first]
            continue
        start = _SHELL_LINE.match(lines[first])
        if start is None:
            continue
        while number < len(lines) and (
            _CONTINUED.search(lines[number - 1]) or re.match(r"\s*--\w", lines[number])
        ):
            number += 1
        yield first + 1, "\n".join([lines[first][start.end() :], *lines[first + 1 : number]])
