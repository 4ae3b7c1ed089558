"""Console: messages of verbs on stderr; progress only on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from zerofit.core.foreign_text import printable
from zerofit.core.observer import Observer
from zerofit.core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_NARROW = 80
"""Width of a terminal that does not report it."""
_COLOURS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"^your script (?:as it is|without these files):.*does not fit.*$", {"fg": "red", "bold": True}),
    (r"^your script (?:as it is|without these files):.*fits closely.*$", {"fg": "yellow", "bold": True}),
    (r"^your script (?:as it is|without these files):.*$", {"fg": "green", "bold": True}),
    (r"^Nothing fits.*$", {"fg": "red", "bold": True}),
    (r"^>  .*$", {"fg": "green", "bold": True}),
    (r"^   .*  (?:too large|needs) .*$", {"dim": True}),
    (r"^what fits closely: .*$", {"fg": "yellow", "bold": True}),
    (r"^what fits: .*$", {"fg": "green", "bold": True}),
    (r"^hint: .*$", {"fg": "cyan"}),
    (r"(?<=  \[)[a-z0-9-]+(?=, confidence \w+\]$)", {"bold": True}),
    (r"^ok(?=: )", {"fg": "green", "bold": True}),
    (r"^error(?=\[)", {"fg": "red", "bold": True}),
    (r"^warning(?=\[)", {"fg": "yellow", "bold": True}),
    (r"^advice(?=\[)", {"fg": "cyan", "bold": True}),
)
"""Colours of zerofit's output: red for what fails, yellow for what may, green for what works."""
_SENTENCE = re.compile(
    r"( *(?:found|why|fix|cause|line|in|next|also|stops|NCCL): +|zerofit: (?!command: ))"
    r"|(?:error|warning|advice)\[|hint: |ok: |not checked|your script (?:as it is|without these files): "
    r"|what fits(?: closely)?: |\S+ trains \w+ of |\S.*: \d+ (?:error|warning|advice)"
)
"""Prefixes of prose lines; tables already fit, and commands stay in one piece for copying."""
_SHOWN = 60
"""Maximum characters of a task's progress."""


_LONGEST_JSON = 4096
"""Characters of the longest JSON in a dry run. ASSUMPTION: DeepSpeed's are read, plan.json isn't."""


def show_files(files: Mapping[Path, str]) -> None:
    """Print the files that a dry run would write; of a long JSON file only the name."""
    for path, text in files.items():
        is_shown = path.suffix != ".json" or len(text) <= _LONGEST_JSON
        echo(f"# {path}\n{text}" if is_shown else f"# {path}: {format_bytes(len(text))}, not shown\n")


def echo(text: object, *, err: bool = False) -> None:
    """Print a line or several that may quote others, whose control characters don't reach the terminal."""
    click.echo(text if isinstance(text, Printable) else printable(str(text)), err=err)


class Printable(str):
    """A text whose only control characters are zerofit's own colours."""

    __slots__ = ()


def for_terminal(text: str, colours: Sequence[tuple[str, dict[str, Any]]] = _COLOURS) -> Printable:
    """Return a text with sentences wrapped, and with colours, which click removes if unwanted.

    It may quote others: their control characters don't reach the terminal.
    """
    width = terminal_width()
    lines = (line for whole in printable(text).split("\n") for line in _broken(whole, width))
    return Printable("\n".join(_coloured(line, colours) for line in lines))


def _broken(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width or not (begin := _SENTENCE.match(line)):
        return [line]
    indent = " " * len(begin[1] or "hint")
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _coloured(line: str, colours: Sequence[tuple[str, dict[str, Any]]]) -> str:
    for pattern, style in colours:
        if found := re.search(pattern, line):
            return line[: found.start()] + click.style(found[0], **style) + line[found.end() :]
    return line


def wants_colour(environ: Mapping[str, str]) -> bool | None:
    """Return True if colours are wanted; None if it depends on whether the output is a terminal.

    According to https://no-color.org and https://force-color.org.
    """
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return False if environ.get("TERM") == "dumb" else None


def terminal_width() -> int | None:
    """Return the width of the terminal, or COLUMNS; None without both, as in a log."""
    if os.environ.get("COLUMNS") or sys.stdout.isatty() or sys.stderr.isatty():
        return shutil.get_terminal_size((_NARROW, 24)).columns
    return None


class Console(Observer):
    """Prints messages of verbs on stderr.

    Args:
        is_quiet: True to print nothing.
        shows_details: True to print details too.
        is_wide: True to allow tables wider than the terminal.
    """

    def __init__(self, *, is_quiet: bool = False, shows_details: bool = True, is_wide: bool = False) -> None:
        self._is_quiet, self.shows_details, self._is_wide = is_quiet, shows_details, is_wide

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        self.show(f"zerofit: {sentence}")

    def show(self, text: str) -> None:
        """Print a text of several lines unchanged."""
        if not self._is_quiet:
            click.echo(for_terminal(text), err=True)

    def detail(self, text: str) -> None:
        """Print a text if details are wanted."""
        if self.shows_details:
            self.show(text)

    def announce(self, title: str) -> None:
        """Print what may take minutes, unless a terminal shows its progress."""
        if not sys.stderr.isatty():
            self.say(f"{title} ...")

    def progress(self, sentence: str) -> None:
        """Print a sentence on a terminal, on its own line, since the script prints there, too."""
        if sys.stderr.isatty() and not self._is_quiet:
            click.echo("\r\x1b[K", nl=False, err=True)  # over the script's progress bar, which is redrawn
            self.say(sentence)

    @property
    def can_ask(self) -> bool:
        """True on a terminal."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def ask(self, question: str) -> bool:
        """Ask on a terminal; otherwise the answer is no."""
        return self.can_ask and click.confirm(f"zerofit: {question}", err=True)

    @property
    def width(self) -> int | None:
        """Width of the terminal, unless tables may be wider."""
        return None if self._is_wide else terminal_width()

    @contextmanager
    def task(self, title: str, *, is_announced: bool = False) -> Iterator[Callable[[str], None]]:
        """Show a spinner with seconds and progress on a terminal."""
        if self._is_quiet or not sys.stderr.isatty():
            if is_announced:
                self.announce(title)
            yield lambda progress: None
            return
        from rich.console import Console as Terminal
        from rich.markup import escape

        started = time.monotonic()
        with Terminal(stderr=True).status(escape(f"{title} ...")) as status:
            yield lambda progress: status.update(
                escape(f"{title} ({time.monotonic() - started:.0f} s): {progress[:_SHOWN]}")
            )
