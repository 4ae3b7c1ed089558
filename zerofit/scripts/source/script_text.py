"""A script's text to a syntax tree, and nodes of the tree to quoted source."""

from __future__ import annotations

import ast
import re
import warnings

from zerofit.core.errors import Unreadable
from zerofit.core.setting import Place
from zerofit.scripts.facts import Snippet

MAX_TEXT = 80
"""Maximum characters of source in a finding."""


def parse(source: str) -> ast.Module:
    """Return the syntax tree of a script.

    Raises:
        Unreadable: it is not Python of this version, or can't be parsed.
    """
    if "\0" in source:
        raise Unreadable(
            "the script contains a NUL character",
            "Python refuses it: the file is binary, or damaged",
            "name the script's file",
            source.count("\n", 0, source.index("\0")) + 1,
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source.removeprefix("\ufeff"))
    except SyntaxError as error:
        raise _broken_syntax(error) from None
    except (RecursionError, MemoryError):
        raise too_deep() from None
    except (ValueError, UnicodeError) as error:
        raise Unreadable(f"the script is not Python: {error}", "nothing can run it", "mend it") from None


def _broken_syntax(error: SyntaxError) -> Unreadable:
    line, column = error.lineno or 1, max(1, error.offset or 1)
    if "too many nested" in (error.msg or ""):
        return too_deep(line)
    return Unreadable(
        f"the script is not valid Python: {error.msg}",
        "it can't run, or needs a newer Python than the one that runs zerofit",
        "fix the syntax, or run zerofit with the script's Python version",
        line,
        column,
    )


def too_deep(line: int = 1) -> Unreadable:
    """Return the error for a script that is nested too deep."""
    return Unreadable(
        "the script's expressions or blocks are nested too deep",
        "neither Python's parser nor zerofit can analyse them",
        "check the configuration without the script",
        line,
    )


class ScriptText:
    """A script's text, for quotes."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self._lines = re.split("\r\n|\r|\n", text.removeprefix("\ufeff"))

    def has(self, *words: str) -> bool:
        """Return True if one of these words is anywhere in the text."""
        return any(word in line for line in self._lines for word in words)

    def quote(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """Return the source of a node on one line, truncated if long."""
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        lines = [line.encode("utf-8", "replace") for line in self._lines[first : last + 1]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        words = " ".join(line.decode("utf-8", "replace").strip() for line in lines)
        words = re.sub(r"([(\[{]) ", r"\1", re.sub(r",? ([)\]}])", r"\1", re.sub(r"\s+", " ", words)))
        return words if len(words) <= MAX_TEXT else f"{words[: MAX_TEXT - 3]}..."

    def snippet(self, node: ast.expr | ast.stmt | ast.keyword) -> Snippet:
        """Return a node's source and position."""
        line = self._lines[node.lineno - 1] if node.lineno <= len(self._lines) else ""
        before = line.encode("utf-8", "replace")[: node.col_offset].decode("utf-8", "replace")
        place = Place(file=self.name, line=node.lineno, column=len(before) + 1)
        return Snippet(text=self.quote(node), place=place)
