"""The command lines of a shell script, with the values of its own variables, and where a line breaks off.

Nothing is run. What only the run will know stays as it is written: $NAME, $(...).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from zerofit.checking.inputs.batch_jobs import batch_job, with_options
from zerofit.checking.inputs.programs import (
    file_of_shell,
    is_launch_line,
    lacks_script,
    program_of,
    runs_heredoc,
    text_of_shell,
    variable_as_command,
    without_wrappers,
)
from zerofit.checking.inputs.shell_variables import (
    ShellVariables,
    arithmetic,
    sets_arguments,
    variables_of,
)
from zerofit.checking.inputs.shell_words import (
    BreakCause,
    LineBreak,
    Piece,
    PieceKind,
    ShellCommand,
    ShellWord,
    shell_commands,
)
from zerofit.core.setting import Place, Said

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zerofit.checking.inputs.batch_jobs import BatchJob

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*|\d+):?[-=](.*)\}", re.DOTALL)
_OWN_NAME = re.compile(r"\$\{?0|BASH_SOURCE")
_REFERENCE = re.compile(r"\\\$|\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_POSITIONAL = re.compile(r"\$\{?([1-9@*#])\}?")
_SUBSTITUTED = re.compile(r"\$\((?!\()|`")
"""The beginning of the output of a command in a value."""
_ARITHMETIC = re.compile(r"\$\(\((.*)\)\)", re.DOTALL)
_OF_FIRST_TASK = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables of a task, which are 0 in the batch shell: it is the job's first task, on its first node."""
_OF_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
"""Variables that Slurm sets to the job's number of nodes."""
_OPENING = ("if", "for", "while", "until", "case", "select", "{")
_BRANCHING = ("else", "elif")
_CLOSING = ("fi", "done", "esac", "}")
_PASSED = (*_BRANCHING, "if", "then", "do", "while", "until", "!", "{", "time")
"""Words before a command."""
_KEYWORDS = frozenset((*_PASSED, *_OPENING, *_CLOSING, "function"))
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file that a script writes by a heredoc."""

    text: str
    place: Place
    is_open: bool = False
    """True if it has values that only the run knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellLine:
    """A command line of a file, as the shell hands it on; with what it loses, as its author meant it."""

    words: tuple[str, ...]
    places: tuple[Place, ...]
    """The position of each word."""
    breaks: tuple[LineBreak, ...] = ()
    folder: str = ""
    """The folder that `cd` has changed to, relative to that of the script's start."""
    written: Mapping[str, WrittenFile] = field(default_factory=dict)
    """Files that the script has written before, by name."""
    named: frozenset[str] = frozenset()
    """Words and files of the commands before, which may have made a file of this name."""
    job: BatchJob | None = None
    """The Slurm job whose batch shell reads the line."""
    outer: tuple[str, ...] = ()
    """The command that hands the line to another shell: `srun --nodes 2 bash -c`."""
    from_batch_shell: tuple[str, ...] = ()
    """Variables of a task that the batch shell has expanded so far, each to 0."""
    variables: ShellVariables = field(default_factory=ShellVariables)
    """The names that the file sets."""
    is_conditional: bool = False
    """True in an if, a loop or a function."""
    visible_gpus: str | None = None
    """The value of CUDA_VISIBLE_DEVICES that the file has exported; None if it has not, or it is unknown."""

    @property
    def starters(self) -> tuple[str, ...]:
        """The words of the commands that start the line's program: `srun --nodes 2`."""
        return (*self.outer, *without_wrappers(self.words)[0])

    @property
    def unset_command(self) -> str | None:
        """The variable that stands for the command, or for Python's script, and that nothing sets."""
        name = variable_as_command(self.words)
        if name is None or not self.variables.lacks(name):
            return None
        is_sure = self.job is not None or bool(self.outer) or self.variables.nearest(name) is not None
        return name if is_sure else None

    def said(self, path: str) -> Said[str]:
        """Return a file as the line names it."""
        name = next((word for word in self.words if path.endswith(word)), path)
        return Said(value=path, text=name, place=self.place_of(name))

    def place_of(self, found: str) -> Place:
        """Return the position of the first word that a finding names; that of the line if it names none."""
        named = [word for word in found.split() if len(word) > 1]
        for name in named:
            if name in self.words:
                return self.places[self.words.index(name)]
        return self.places[0]


def shell_lines(
    text: str, *, name: str, first_line: int = 1, started: Sequence[str] = ()
) -> tuple[ShellLine, ...]:
    """Return the command lines of a script, in order.

    Args:
        text: the script.
        name: its file, for positions.
        first_line: the line of the file at which the text starts.
        started: the words of the line that starts it: sbatch --nodes 2 FILE WORD; empty if that is unknown.
    """
    carriages = [number for number, line in enumerate(text.split("\n"), first_line) if line.endswith("\\\r")]
    before, arguments = _around_file(started)
    job = with_options(batch_job(text, name=name, first_line=first_line), before)
    variables = variables_of(text, first_line=first_line)
    shell = _Shell(name=name, offset=first_line - 1, job=job, variables=variables, arguments=arguments)
    shell.run(shell_commands(text.replace("\r\n", "\n")))
    return tuple(_with_carriage(line, carriages) for line in shell.lines)


def _with_carriage(line: ShellLine, carriages: Iterable[int]) -> ShellLine:
    """Return a line with the first carriage return that breaks it."""
    lines = range(line.places[0].line, line.places[-1].line)
    number = next((number for number in carriages if number in lines), None)
    if number is None:
        return line
    place = replace(line.places[0], line=number)
    lost = " ".join(word for word, at in zip(line.words, line.places, strict=True) if at.line > number)
    return replace(line, breaks=(LineBreak(place=place, lost=lost, cause=BreakCause.CARRIAGE_RETURN),))


def _around_file(words: Sequence[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """Return the options of sbatch in front of a file, and the words behind it; None if there are none."""
    file = file_of_shell(words) if words else None
    if file is None:
        return [], None
    _, rest = without_wrappers(words)
    number = rest.index(file)
    is_sbatch = program_of(rest[0]) == "sbatch"
    return list(rest[1:number]) if is_sbatch else [], tuple(rest[number + 1 :]) or None


_Word = tuple[str, int]
"""A word and its line."""
_Value = tuple[str, ...] | str
"""A variable's: the words of an array, or a text."""


@dataclass(slots=True, kw_only=True)
class _Block:
    """The state at the start of an if, a loop, a function or a subshell."""

    opened_by: str
    values: dict[str, _Value]
    folder: str
    arguments: tuple[str, ...] | None
    touched: set[str] = field(default_factory=set)


class _Shell:
    """A script's variables and folder, as far as its text alone gives them."""

    def __init__(
        self,
        *,
        name: str,
        offset: int,
        job: BatchJob | None = None,
        variables: ShellVariables | None = None,
        outer: tuple[str, ...] = (),
        arguments: tuple[str, ...] | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.offset = offset
        self.job = job
        self.variables = variables or ShellVariables()
        self.outer = outer
        self.from_batch_shell: dict[str, None] = {}
        self.values: dict[str, _Value] = {"PWD": "."}
        self.exported: set[str] = set()
        if job is not None and not outer:
            self.values |= dict.fromkeys(_OF_FIRST_TASK, "0")
            self.values |= dict.fromkeys(_OF_NODES, str(job.nodes)) if job.nodes else {}
        self.folder = ""
        self.blocks: list[_Block] = []
        self.written: dict[str, WrittenFile] = {}
        self.named: set[str] = set()
        self.lines: list[ShellLine] = []

    def run(self, commands: list[ShellCommand]) -> None:
        before = ""
        for meant in _merged(commands):
            self.step(meant.command, meant.breaks, is_conditional=before in ("&&", "||"))
            before = meant.command.end
            if before in ("(", ";;"):
                self.enter("(") if before == "(" else self.restore()
            elif before == ")" and self.blocks and self.blocks[-1].opened_by == "(":
                self.leave()

    def enter(self, opened_by: str) -> None:
        values = dict(self.values)
        block = _Block(opened_by=opened_by, values=values, folder=self.folder, arguments=self.arguments)
        self.blocks.append(block)
        if opened_by == "{":
            self.arguments = None  # those of a function

    def restore(self) -> None:
        """Begin another branch: the variables are as before the block."""
        if self.blocks:
            self.values = dict(self.blocks[-1].values)

    def leave(self) -> None:
        """End a block: what it assigns is not known behind it."""
        if self.blocks:
            block = self.blocks.pop()
            self.values, self.arguments = block.values, block.arguments
            if block.opened_by == "(":
                self.folder = block.folder
                return
            self.forget(block.touched)

    def step(
        self, command: ShellCommand, breaks: tuple[tuple[int, str, BreakCause], ...], *, is_conditional: bool
    ) -> None:
        words = list(command.words)
        while words and (keyword := words[0].plain) in _KEYWORDS:
            if keyword in _CLOSING:
                self.leave()
            elif keyword == "function" and words[-1].plain == "{":
                self.enter("{")
            elif keyword in _OPENING:
                self.enter(keyword)
            elif keyword in _BRANCHING:
                self.restore()
            if keyword in ("for", "select", "case", "function"):
                self.forget(word.plain for word in words[1:2])
                return
            words = words[1:]
        if command.writes is not None:
            self.named.add(self.text(command.writes))
        self.command(words, breaks, is_conditional=is_conditional)
        if command.heredoc is not None and words:
            self.read_heredoc(command, words)

    def command(
        self,
        words: list[ShellWord],
        breaks: tuple[tuple[int, str, BreakCause], ...],
        *,
        is_conditional: bool,
    ) -> None:
        assigned = [word for word in words if _ASSIGNED.match(word.unquoted_start)]
        first = words[0].plain if words else ""
        if first in _DECLARING or len(assigned) == len(words):
            for word in assigned:
                self.assign(word, is_conditional=is_conditional)
            if first == "export":
                self.exported.update(word.unquoted_start.partition("=")[0] for word in words[1:])
        elif first == "cd":
            target = self.text(words[1]) if len(words) > 1 else "$HOME"
            self.folder = _in_folder(self.folder, target) if "$" not in target else ""
        elif first in ("read", "unset", "mapfile", "readarray"):
            self.forget(word.plain for word in words[1:])
        elif first == "shift" or (first == "set" and sets_arguments([word.plain for word in words[1:]])):
            self.lose_arguments()
        elif first == "eval":
            texts = [text for word in words[1:] for text, _ in self.fields(word)]
            self.run_text(" ".join(texts), at=words[0].line)
        else:
            fields = [pair for word in words for pair in self.fields(word)]
            text = text_of_shell([text for text, _ in fields])
            outer = tuple(word for word, _ in fields if word != text)
            if text is None:
                self.add(fields, breaks)
            else:
                self.run_quoted(words, outer=outer)

    def run_quoted(self, words: list[ShellWord], *, outer: tuple[str, ...]) -> None:
        """Take over the lines of the text behind bash -c, each at its own line of the file."""
        written = [word.in_file for word in words]
        fields = [pair for word in written for pair in self.fields(word)]
        text = text_of_shell([text for text, _ in fields])
        assert text is not None, "the caller has looked"
        line = next(line for field, line in fields if field == text)
        num_breaks = sum(piece.text.count("\n") for word in written for piece in word.pieces)
        is_whole = text.count("\n") == num_breaks  # a variable's value may have more
        self.run_text(text, at=line if is_whole else fields[0][1], outer=outer, is_in_place=is_whole)

    def run_text(
        self,
        text: str,
        *,
        at: int,
        outer: tuple[str, ...] = (),
        is_heredoc: bool = False,
        is_literal: bool = False,
        is_in_place: bool = False,
    ) -> None:
        """Take over the lines of a text that another shell runs: behind eval or bash -c, or in a heredoc."""
        offset = self.offset + (at if is_heredoc else at - 1 if is_in_place else 0)
        job = self.job
        starters = {program_of(word) for word in outer}  # behind assignments, exec and the like too
        if is_heredoc and "sbatch" in starters:
            job, outer = batch_job(text, name=self.name, first_line=offset + 1, is_literal=is_literal), ()
        inner = _Shell(
            name=self.name, offset=offset, job=job, variables=self.variables, outer=(*self.outer, *outer)
        )
        tasks = inner.values if job is not None and not inner.outer else {}
        inner.values, inner.folder = {**self.values, **tasks}, self.folder
        inner.from_batch_shell = dict(self.from_batch_shell)
        if "srun" in starters:  # each task has its own
            inner.values = {name: value for name, value in inner.values.items() if name not in _OF_FIRST_TASK}
        inner.written, inner.named = dict(self.written), set(self.named)
        inner.exported = set(self.exported)
        inner.arguments = self.arguments if not outer else None
        inner.run(shell_commands(text))
        self.lines += (
            inner.lines if is_heredoc or is_in_place else (self.at_line(line, at) for line in inner.lines)
        )

    def add(self, fields: list[_Word], breaks: tuple[tuple[int, str, BreakCause], ...]) -> None:
        if fields:
            words = tuple(text for text, _ in fields)
            is_launch = is_launch_line(words)  # the others are many, and name nothing that is looked up
            self.lines.append(
                ShellLine(
                    words=words,
                    places=tuple(self.place(line) for _, line in fields),
                    breaks=tuple(
                        LineBreak(place=self.place(line), lost=lost, cause=cause)
                        for line, lost, cause in breaks
                    ),
                    folder=self.folder,
                    written=dict(self.written) if is_launch else {},
                    named=frozenset(self.named) if is_launch else frozenset(),
                    job=self.job,
                    outer=self.outer,
                    from_batch_shell=tuple(self.from_batch_shell),
                    variables=self.variables,
                    is_conditional=bool(self.blocks),
                    visible_gpus=self.visible_gpus(),
                )
            )
            self.named.update(text.rpartition("=")[2] for text in words)

    def visible_gpus(self) -> str | None:
        value = self.values.get(_VISIBLE)
        is_known = isinstance(value, str) and "$" not in value and _VISIBLE in self.exported
        return value if is_known and isinstance(value, str) else None

    def place(self, line: int) -> Place:
        return Place(file=self.name, line=line + self.offset)

    def at_line(self, line: ShellLine, number: int) -> ShellLine:
        """Return a line of a text in quotes, at the line of the command that it is part of."""
        place = self.place(number)
        breaks = tuple(replace(found, place=place) for found in line.breaks)
        places = (place,) * len(line.words)
        return replace(line, places=places, breaks=breaks)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.values.pop(name, None)
            for block in self.blocks[-1:]:
                block.touched.add(name)

    def lose_arguments(self) -> None:
        """Take the script's own arguments for unknown from here on, also behind the blocks around."""
        self.arguments = None
        for block in self.blocks:
            block.arguments = None

    def assign(self, word: ShellWord, *, is_conditional: bool) -> None:
        """Take over NAME=value, NAME+=value or NAME=(...)."""
        match = _ASSIGNED.match(word.unquoted_start)
        assert match is not None, "the caller has matched it"
        name, is_added = match[1], bool(match[2])
        first, *rest = word.pieces
        pieces = (replace(first, text=first.text[match.end() :]), *rest)
        value: _Value = self.text(ShellWord(pieces=pieces, line=word.line))
        if word.elements is not None:
            value = tuple(text for element in word.elements for text, _ in self.fields(element))
        before = self.values.get(name)
        if is_conditional or (is_added and before is None):
            self.forget([name])
            return
        if is_added and before is not None:
            as_words = isinstance(before, tuple) or isinstance(value, tuple)
            value = (*_as_words(before), *_as_words(value)) if as_words else f"{before}{value}"
        self.values[name] = value
        for block in self.blocks[-1:]:
            block.touched.add(name)

    def text(self, word: ShellWord) -> str:
        """Return a word without splitting."""
        return "".join(" ".join(self.piece(replace(piece, is_quoted=True))) for piece in word.pieces)

    def fields(self, word: ShellWord) -> Iterator[_Word]:
        """Yield the words that a word expands to."""
        if word.elements is not None:
            return
        current, is_begun = "", any(piece.is_quoted for piece in word.pieces if piece.kind is PieceKind.TEXT)
        for piece in word.pieces:
            texts = self.piece(piece)
            if not texts:
                continue
            is_begun = True
            current += texts[0]
            for text in texts[1:]:
                yield current, word.line
                current = text
        if is_begun:
            yield current, word.line

    def piece(self, piece: Piece) -> list[str]:
        """Return the texts that a part of a word expands to: more than one if a space splits it."""
        if piece.kind is PieceKind.TEXT:
            return [piece.text]
        if piece.kind is PieceKind.UNKNOWN:
            return self.unknown(piece)
        value = self.values.get(piece.text)
        self.remember(piece.text)
        if value is None:
            return [f"${piece.text}"] if piece.kind is PieceKind.VARIABLE else [f"${{{piece.text}[@]}}"]
        if piece.kind is PieceKind.ARRAY:
            return list(_as_words(value))
        text = value if isinstance(value, str) else next(iter(value), "")
        if _SUBSTITUTED.search(text) is not None:
            return [f"${piece.text}"]  # only the run knows the value
        return [text] if piece.is_quoted else text.split()

    def remember(self, name: str) -> None:
        """Remember that the batch shell expands a variable of a task."""
        if name in _OF_FIRST_TASK and name in self.values:
            self.from_batch_shell[name] = None

    def unknown(self, piece: Piece) -> list[str]:
        """Return what is known of another expansion: an argument, a sum, a default, the file's folder."""
        if self.arguments is not None and (match := _POSITIONAL.fullmatch(piece.text)) is not None:
            return self.positional(match[1], is_quoted=piece.is_quoted)
        if (match := _ARITHMETIC.fullmatch(piece.text)) is not None:
            number = arithmetic(match[1], self.values)
            if number is not None:
                return [str(number)]
        if (default := _DEFAULT.fullmatch(piece.text)) is not None:
            name, text = default.groups()
            if not text:
                return [f"${name}"]  # the environment may set it
            value = self.values.get(name)
            if name.isdecimal() and self.arguments is not None:
                value = "".join(self.arguments[int(name) - 1 : int(name)]) or None
            self.remember(name)
            text = self.expanded(text.strip("\"'")) if not isinstance(value, str) else value
            return [text] if piece.is_quoted else text.split()
        if "dirname" in piece.text and _OWN_NAME.search(piece.text):
            above = piece.text.count("/..") + piece.text.count("dirname") - 1
            return [_in_folder(str(PurePosixPath(self.name).parent), *[".."] * above)]
        if piece.text in ("$(pwd)", "`pwd`"):
            return ["."]
        return [re.sub(r"\s+", " ", piece.text) or "$"]

    def positional(self, name: str, *, is_quoted: bool) -> list[str]:
        """Return the words that one of the script's own arguments expands to, or all of them."""
        arguments = self.arguments or ()
        if name == "#":
            return [str(len(arguments))]
        if name in "@*":
            return list(arguments)
        text = "".join(arguments[int(name) - 1 : int(name)])
        return [text] if is_quoted else text.split()

    def expanded(self, text: str) -> str:
        """Return a text with the known variables' values."""

        def value_of(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name is None:
                return "$"  # it has a backslash
            value = self.values.get(name)
            self.remember(name)
            return value if isinstance(value, str) else match[0]

        return _REFERENCE.sub(value_of, text)

    def read_heredoc(self, command: ShellCommand, words: list[ShellWord]) -> None:
        """Remember a file or variable that a heredoc fills; take over the lines that it hands to a shell."""
        assert command.heredoc is not None, "the caller has looked"
        text = command.heredoc
        if not command.is_heredoc_literal:
            text = self.expanded(text.replace("\\\n", ""))
        if command.writes is not None:
            place = self.place(command.writes.line)
            is_open = not command.is_heredoc_literal and ("$" in text or "`" in text)
            self.written[self.text(command.writes)] = WrittenFile(text=text, place=place, is_open=is_open)
        elif words[0].plain == "read" and any(word.plain == "-d" for word in words):
            self.values[words[-1].plain] = text
        elif runs_heredoc([word.text for word in words]):
            outer = tuple(text for word in words for text, _ in self.fields(word))
            is_literal = command.is_heredoc_literal
            self.run_text(text, at=command.last_line, outer=outer, is_heredoc=True, is_literal=is_literal)


def _in_folder(folder: str, *parts: str) -> str:
    """Return a folder below another, as cd reaches it."""
    return str(PurePosixPath(folder, *parts))


def _as_words(value: _Value) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(slots=True, kw_only=True)
class _Meant:
    """A command with the lines that it loses."""

    command: ShellCommand
    breaks: tuple[tuple[int, str, BreakCause], ...] = ()


def _merged(commands: list[ShellCommand]) -> Iterator[_Meant]:
    """Yield the commands, each with the lines that a missing or broken continuation makes commands."""
    meant: _Meant | None = None
    for command in commands:
        cause = _cause(meant.command, command) if meant is not None else None
        if meant is None or cause is None:
            if meant is not None:
                yield _with_trailing(meant)
            meant = _Meant(command=command)
            continue
        lost = " ".join(word.text for word in command.words)
        line = meant.command.last_line
        meant.breaks = (*meant.breaks, (line, lost, cause))
        meant.command = replace(command, words=[*meant.command.words, *command.words])
    if meant is not None:
        yield _with_trailing(meant)


def _with_trailing(meant: _Meant) -> _Meant:
    r"""Return a command with the \ and a blank at its very end, behind which nothing is lost."""
    command = meant.command
    if not command.broken_lines or command.broken_lines[-1] != command.last_line:
        return meant
    trailing = (command.last_line, "", BreakCause.BLANK_BEHIND)
    return replace(meant, breaks=(*meant.breaks, trailing))


def _cause(command: ShellCommand, behind: ShellCommand) -> BreakCause | None:
    """Return why a command ends before the next one, which belongs to it; None if that is another command."""
    if command.end != "\n" or not command.words or not behind.words:
        return None
    first, last = behind.words[0], command.last_line
    is_flag = re.match(r"--?[A-Za-z]", first.plain) is not None
    is_broken = bool(command.broken_lines) and command.broken_lines[-1] == last
    if is_broken:
        is_next = first.line == last + 1
        if not is_flag and not (is_next and (first.text.startswith("$") or first.plain.endswith(".py"))):
            return None
        return BreakCause.BLANK_BEHIND
    if not is_flag and not (
        first.plain.endswith(".py") and lacks_script([word.text for word in command.words])
    ):
        return None
    if last in command.comment_lines:
        return BreakCause.COMMENT
    return BreakCause.EMPTY_LINE if command.words[-1].line < last else BreakCause.MISSING
