"""Command lines as the programs that they run: shells taken apart, what only starts another one left out."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
_STARTERS: dict[str, tuple[frozenset[str], int]] = {
    "chrt": (frozenset(), 1),
    "command": (frozenset(), 0),
    "env": (frozenset({"-u", "--unset", "-C", "--chdir"}), 0),
    "exec": (frozenset({"-a"}), 0),
    "ionice": (frozenset({"-c", "-n", "--class", "--classdata"}), 0),
    "nice": (frozenset({"-n", "--adjustment"}), 0),
    "nohup": (frozenset(), 0),
    "numactl": (frozenset({"-N", "-m", "-C", "-i", "-p"}), 0),
    "setsid": (frozenset(), 0),
    "stdbuf": (frozenset({"-i", "-o", "-e"}), 0),
    "sudo": (frozenset({"-u", "-g", "-h", "-p"}), 0),
    "taskset": (frozenset(), 1),
    "time": (frozenset({"-f", "-o"}), 0),
    "timeout": (frozenset({"-s", "-k", "--signal", "--kill-after"}), 1),
    "xargs": (frozenset({"-I", "-L", "-n", "-P", "-d", "-s", "-E", "-a"}), 0),
}
"""Programs that run another one: their options that take a value, and the operands before its name.

Source: their manuals in coreutils, util-linux, findutils, numactl and sudo.
"""
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "for", "case"}
_JOINS = frozenset(";|&()<>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program with its arguments."""

    words: tuple[str, ...]
    """Its name or path, and its arguments."""
    cwd: str
    """Where it runs."""
    overwritten: tuple[str, ...] = ()
    """Files that a shell sends its output to, as they are named."""

    @property
    def name(self) -> str:
        """Its name, without the folder."""
        return os.path.basename(self.words[0])


def programs_of(words: Sequence[str], *, cwd: str) -> tuple[Program, ...]:
    """Return the programs that a command line runs, those in the text of a shell's -c among them.

    Args:
        words: the command line.
        cwd: where it is run.
    """
    program = _without_starters(Program(words=tuple(words), cwd=cwd))
    if program is None:
        return ()
    text = shell_text(program)
    return (program,) if text is None else programs_in(text, cwd=program.cwd)


def programs_in(text: str, *, cwd: str) -> tuple[Program, ...]:
    """Return the programs that the text of a shell runs, as far as the text names them.

    Args:
        text: "cd runs && python train.py".
        cwd: where it is run.
    """
    found: list[Program] = []
    for words, overwritten in _simple_commands(text):
        while words and (words[0] in _KEYWORDS or _is_assignment(words[0])):
            words = words[1:]
        if not words:
            found += [Program(words=(":",), cwd=cwd, overwritten=overwritten)] if overwritten else []
        elif words[0] == "cd" and len(words) > 1:
            cwd = os.path.join(cwd, os.path.expanduser(words[1]))
        else:
            inner = programs_of(words, cwd=cwd)
            if inner and overwritten:
                inner = (replace(inner[0], overwritten=overwritten), *inner[1:])
            found += inner
    return tuple(found)


def shell_text(program: Program) -> str | None:
    """Return the text that a shell is given by -c; None for any other program."""
    if program.name not in _SHELLS:
        return None
    for place, word in enumerate(program.words[1:-1], start=1):
        if re.fullmatch(r"-[a-z]*c[a-z]*", word):
            return program.words[place + 1]
        if not word.startswith(("-", "+")):
            break
    return None


def shell_file(program: Program) -> str | None:
    """Return the file that a shell runs; None where it runs none, or the program is no shell."""
    if program.name in ("source", "."):
        return program.words[1] if len(program.words) > 1 else None
    if program.name not in _SHELLS or shell_text(program) is not None:
        return None
    return next((word for word in program.words[1:] if not word.startswith(("-", "+"))), None)


def _without_starters(program: Program) -> Program | None:
    """Return what env, nohup, timeout and their like run in the end; None where they run nothing."""
    words, cwd = list(program.words), program.cwd
    while words:
        name = os.path.basename(words[0])
        if name not in _STARTERS:
            return Program(words=tuple(words), cwd=cwd)
        with_value, operands = _STARTERS[name]
        rest = words[1:]
        while rest and (rest[0].startswith("-") or operands or (name == "env" and _is_assignment(rest[0]))):
            word = rest.pop(0)
            if word in with_value and rest:
                value = rest.pop(0)
                cwd = os.path.join(cwd, value) if word in ("-C", "--chdir") and name == "env" else cwd
            elif not word.startswith("-") and not _is_assignment(word):
                operands -= 1
        if name == "xargs" and rest:  # what it adds is not known: anything in the folder
            rest.append(".")
        words = rest
    return None


def _simple_commands(text: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the words of each simple command of a shell's text, and the files that it overwrites."""
    lexer = shlex.shlex(text.replace("\n", " ; ").replace("`", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:  # an open quote
        tokens = text.split()
    found: list[tuple[list[str], list[str]]] = [([], [])]
    redirection = ""
    for token in tokens:
        if set(token) <= _JOINS and token:
            redirection = token if set(token) & set("<>") and "(" not in token else ""
            if not redirection:
                found.append(([], []))
            elif found[-1][0] and found[-1][0][-1] in ("1", "2"):  # of `2> file`
                found[-1][0].pop()
        elif redirection:
            if redirection in (">", ">|", "&>"):
                found[-1][1].append(token)
            redirection = ""
        else:
            found[-1][0].append(token)
    return [(tuple(words), tuple(files)) for words, files in found if words or files]


def _is_assignment(word: str) -> bool:
    return re.match(r"[A-Za-z_]\w*=", word) is not None
