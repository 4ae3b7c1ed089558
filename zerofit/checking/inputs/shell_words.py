"""Splits a shell script into its commands and their words, with lines, quotes, variables and heredocs.

What a word expands to is left to shell_lines.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.core.setting import Place

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")
_REDIRECT = re.compile(r"(\d*|&)(>>|>\||>&|<&|<<<|<>|>|<)")
_BROKEN_END = re.compile(r"\\[ \t\r]+(?=(#[^\n]*)?(\n|\Z))")
r"""A \ that ends no line: a blank, or the carriage return of a Windows line end, is between them."""
_END_OF_WORD = " \t\r\n;&|()<>"


class BreakCause(StrEnum):
    """Why a shell ends a command before its last line."""

    MISSING = "no continuation"
    BLANK_BEHIND = "a blank behind the backslash"
    CARRIAGE_RETURN = "a carriage return behind the backslash"
    COMMENT = "a comment"
    EMPTY_LINE = "an empty line"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBreak:
    """A position in a file at which a launch line ends before its next line."""

    place: Place
    lost: str
    """The words up to the next break, all of which it loses; empty if nothing follows."""
    cause: BreakCause


class PieceKind(StrEnum):
    """What a part of a word is."""

    TEXT = "text"
    VARIABLE = "variable"
    """$NAME or ${NAME}, by its name."""
    ARRAY = "array"
    """${NAME[@]}, by its name."""
    UNKNOWN = "unknown"
    """Any other expansion, as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a word."""

    kind: PieceKind
    text: str
    """The text, the variable's name, or the expansion as written."""
    is_quoted: bool
    source: str | None = None
    r"""A text in double quotes with each \ and line end that the shell removes; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellWord:
    """A word of a command."""

    pieces: tuple[Piece, ...]
    line: int
    elements: tuple[ShellWord, ...] | None = None
    """The words of an array that it assigns: NAME=(...)."""

    @property
    def text(self) -> str:
        """The word with its expansions as written, without quotes."""
        return "".join(_written(piece) for piece in self.pieces)

    @property
    def unquoted_start(self) -> str:
        """The text that it begins with, if that is not quoted; empty for any other."""
        piece = self.pieces[0] if self.pieces else None
        return piece.text if piece and piece.kind is PieceKind.TEXT and not piece.is_quoted else ""

    @property
    def in_file(self) -> ShellWord:
        r"""The word with each \ and line end that the shell removes from a text in double quotes."""
        kept = (piece if piece.source is None else replace(piece, text=piece.source) for piece in self.pieces)
        return replace(self, pieces=tuple(kept))

    @property
    def plain(self) -> str:
        """The text of a word without quotes and expansions; empty for any other."""
        is_plain = all(piece.kind is PieceKind.TEXT and not piece.is_quoted for piece in self.pieces)
        return self.text if is_plain else ""


def _written(piece: Piece) -> str:
    if piece.kind is PieceKind.VARIABLE:
        return f"${piece.text}"
    return f"${{{piece.text}[@]}}" if piece.kind is PieceKind.ARRAY else piece.text


@dataclass(slots=True, kw_only=True)
class ShellCommand:
    """A simple command."""

    words: list[ShellWord] = field(default_factory=list)
    end: str = ""
    """What ends it: a newline, ";", "|", ")" ..."""
    last_line: int = 0
    """The line on which it ends."""
    broken_lines: list[int] = field(default_factory=list)
    r"""Lines that end with \ and a blank: bash takes the blank for a word, and ends the command."""
    comment_lines: list[int] = field(default_factory=list)
    """Lines with a comment behind or between its words."""
    writes: ShellWord | None = None
    """The file that its output is written to."""
    heredoc: str | None = None
    """The text that it reads by <<, with no expansions."""
    is_heredoc_literal: bool = False
    """True if the delimiter is quoted, so that bash expands nothing in the text."""


def shell_commands(text: str) -> list[ShellCommand]:
    """Return the simple commands of a script, in order, keywords such as `if` and `do` among their words."""
    return _Splitter(text).split()


class _Splitter:
    """A position in a script."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.commands: list[ShellCommand] = []
        self.command = ShellCommand()
        self.heredocs: list[tuple[re.Match[str], ShellCommand]] = []

    def split(self) -> list[ShellCommand]:
        while self.at < len(self.text):
            self.step()
        self.end_command("")
        return self.commands

    def step(self) -> None:
        """Read a blank, an operator or a word."""
        rest = self.text[self.at : self.at + 3]
        if rest[:2] == "\\\n":
            self.skip(2)
        elif (broken := _BROKEN_END.match(self.text, self.at)) is not None:
            self.command.broken_lines.append(self.line)
            self.skip(len(broken[0]))
        elif rest[0] in " \t\r":
            self.skip(1)
        elif rest[0] == "\n":
            self.skip(1)
            self.end_command("\n")
            self.read_heredocs()
        elif rest[0] == "#":
            if self.command.words:
                self.command.comment_lines.append(self.line)
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif (heredoc := _HEREDOC.match(self.text, self.at)) is not None:
            self.heredocs.append((heredoc, self.command))
            self.skip(len(heredoc[0]))
        elif (redirect := _REDIRECT.match(self.text, self.at)) is not None:
            self.read_redirect(redirect)
        elif rest.startswith("((") and not self.command.words:
            self.skip_to("))")
        elif rest[0] in ";&|()":
            operator = rest[:2] if rest[:2] in ("&&", "||", ";;", "|&") else rest[0]
            self.skip(len(operator))
            self.end_command(operator)
        else:
            self.command.words.append(self.word())

    def skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def skip_to(self, end: str) -> str:
        """Skip to behind the next `end`; return what was skipped."""
        found = self.text.find(end, self.at)
        stop = len(self.text) if found < 0 else found + len(end)
        skipped = self.text[self.at : stop]
        self.skip(stop - self.at)
        return skipped

    def end_command(self, end: str) -> None:
        command = self.command
        command.end = end
        command.last_line = self.line - (end == "\n")
        if command.words or end in ("(", ")"):
            self.commands.append(command)
        self.command = ShellCommand()

    def read_redirect(self, redirect: re.Match[str]) -> None:
        """Skip a redirection; remember the file that is written."""
        self.skip(len(redirect[0]))
        while self.text[self.at : self.at + 1] in (" ", "\t") and self.at < len(self.text):
            self.skip(1)
        if self.text[self.at : self.at + 1] == "(":
            self.skip_balanced("(", ")")
            return
        if self.text[self.at : self.at + 1] not in ("", *_END_OF_WORD):
            target = self.word()
            if redirect[2] in (">", ">|"):
                self.command.writes = target

    def read_heredocs(self) -> None:
        """Read the texts of all heredocs of the line before."""
        for heredoc, command in self.heredocs:
            lines = []
            while self.at < len(self.text):
                line = self.skip_to("\n").rstrip("\r\n")
                line = line.lstrip("\t") if heredoc[1] else line
                if line == heredoc[3]:
                    break
                lines.append(line)
            command.heredoc = "\n".join(lines) + "\n"
            command.is_heredoc_literal = bool(heredoc[2])
        self.heredocs = []

    def word(self) -> ShellWord:
        """Read a word; the position is at its first character."""
        line, pieces = self.line, list[Piece]()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _END_OF_WORD:
                if char == "(" and self.text[self.at - 1] == "=" and pieces:
                    return ShellWord(pieces=tuple(pieces), line=line, elements=self.array())
                break
            if char == "\\":
                if self.text[self.at + 1 : self.at + 2] == "\n":
                    self.skip(2)
                    continue
                if _BROKEN_END.match(self.text, self.at):
                    break
                pieces.append(_text(self.text[self.at + 1 : self.at + 2], is_quoted=True))
                self.skip(2)
            elif char == "'":
                self.skip(1)
                pieces.append(_text(self.skip_to("'").removesuffix("'"), is_quoted=True))
            elif char == '"':
                self.skip(1)
                pieces += self.double_quoted()
            elif char in "$`":
                pieces.append(self.expansion(is_quoted=False))
            else:
                start = self.at
                while self.at < len(self.text) and self.text[self.at] not in _END_OF_WORD + "\\'\"$`":
                    self.at += 1
                pieces.append(_text(self.text[start : self.at], is_quoted=False))
        return ShellWord(pieces=tuple(pieces), line=line)

    def double_quoted(self) -> list[Piece]:
        """Read up to behind the closing quote."""
        pieces, plain, source = list[Piece](), "", ""

        def text() -> Piece:
            kept = source if source != plain and "\\\n" in source else None
            return Piece(kind=PieceKind.TEXT, text=plain, is_quoted=True, source=kept)

        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("\n", '"', "\\", "$", "`"):
                plain += self.text[self.at + 1].replace("\n", "")
                source += self.text[self.at + 1].replace("\n", "\\\n")
                self.skip(2)
            elif char in "$`":
                pieces += [text(), self.expansion(is_quoted=True)]
                plain = source = ""
            else:
                plain += char
                source += char
                self.skip(1)
        self.skip(1)
        return [*pieces, text()]

    def expansion(self, *, is_quoted: bool) -> Piece:
        """Read what begins with $ or a backquote."""
        start = self.at
        self.skip(1)
        if self.text[start] == "`":
            self.skip_to("`")
        elif self.text[self.at : self.at + 1] == "(":
            self.skip_balanced("(", ")")
        elif self.text[self.at : self.at + 1] == "{":
            self.skip_balanced("{", "}")
            inside = self.text[start + 2 : self.at - 1]
            if _NAME.fullmatch(inside):
                return Piece(kind=PieceKind.VARIABLE, text=inside, is_quoted=is_quoted)
            name, _, index = inside.partition("[")
            if index in ("@]", "*]") and _NAME.fullmatch(name):
                return Piece(kind=PieceKind.ARRAY, text=name, is_quoted=is_quoted)
        elif (parameter := _PARAMETER.match(self.text, self.at)) is not None:
            self.skip(len(parameter[0]))
            if _NAME.fullmatch(parameter[0]):
                return Piece(kind=PieceKind.VARIABLE, text=parameter[0], is_quoted=is_quoted)
        else:
            return _text("$", is_quoted=True)
        return Piece(kind=PieceKind.UNKNOWN, text=self.text[start : self.at], is_quoted=is_quoted)

    def skip_balanced(self, opening: str, closing: str) -> None:
        """Skip from an opening bracket to behind its closing one."""
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            depth += (char == opening) - (char == closing)
            if char == "'" and opening == "(":
                self.skip(1)
                self.skip_to("'")
                continue
            self.skip(1)
            if depth == 0:
                return

    def array(self) -> tuple[ShellWord, ...]:
        """Read NAME=( ... ); the position is at the bracket."""
        self.skip(1)
        words = list[ShellWord]()
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self.text[self.at]
            if char == "#":
                self.skip_to("\n")
            elif char in _END_OF_WORD or self.text[self.at : self.at + 2] == "\\\n":
                self.skip(2 if char == "\\" else 1)
            elif (broken := _BROKEN_END.match(self.text, self.at)) is not None:
                self.skip(len(broken[0]))
            else:
                words.append(self.word())
        self.skip(1)
        return tuple(words)


def _text(text: str, *, is_quoted: bool) -> Piece:
    return Piece(kind=PieceKind.TEXT, text=text, is_quoted=is_quoted)
