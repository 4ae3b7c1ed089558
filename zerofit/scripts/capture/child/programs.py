"""Other programs that a captured script starts: those known to lose files, overwrite them, or upload."""

from __future__ import annotations

import glob
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.scripts.capture.child.command_lines import Program

_LOSES = {"rm": "remove", "rmdir": "remove", "unlink": "remove", "shred": "remove", "mv": "rename"}
"""Programs that lose what their operands name."""
_OVERWRITES = {"tee", "truncate"}
"""Programs that overwrite what their operands name."""
_GIT_LOSES = {
    "checkout",
    "clean",
    "merge",
    "mv",
    "pull",
    "rebase",
    "reset",
    "restore",
    "rm",
    "stash",
    "switch",
}
"""Of git, those that change files of the working tree (https://git-scm.com/docs)."""
_GIT_WITH_VALUE = {"-C", "-c", "--git-dir", "--work-tree", "--namespace"}
_UPLOADS: dict[str, frozenset[tuple[str, ...]]] = {
    "aws": frozenset({("s3", "rm"), ("s3", "rb"), ("s3", "mv")}),
    "docker": frozenset({("push",)}),
    "dvc": frozenset({("push",)}),
    "gh": frozenset({("release",), ("repo",), ("pr",), ("gist",)}),
    "git": frozenset({("push",), ("lfs", "push")}),
    "gsutil": frozenset({("rm",), ("mv",)}),
    "gcloud": frozenset({("storage", "rm"), ("storage", "mv")}),
    "hf": frozenset({("upload",), ("upload-large-folder",), ("repo",), ("repos",), ("repo-files",)}),
    "huggingface-cli": frozenset({("upload",), ("upload-large-folder",), ("repo",), ("repo-files",)}),
    "kaggle": frozenset({("datasets", "create"), ("datasets", "version"), ("kernels", "push")}),
    "rclone": frozenset({("delete",), ("deletefile",), ("move",), ("moveto",), ("purge",)}),
    "s5cmd": frozenset({("rm",), ("mv",)}),
    "ssh": frozenset({()}),
    "sftp": frozenset({()}),
    "twine": frozenset({("upload",)}),
    "wandb": frozenset({("sync",), ("artifact", "put"), ("launch",)}),
}
"""Programs, and their first operands where they send or remove something elsewhere. Source: their manuals."""
_COPIES = {
    "aws": ("s3", {"cp", "sync"}),
    "gcloud": ("storage", {"cp", "rsync"}),
    "gsutil": ("", {"cp", "rsync"}),
    "rclone": ("", {"copy", "copyto", "sync", "bisync"}),
    "s5cmd": ("", {"cp", "sync"}),
    "scp": ("", {""}),
    "rsync": ("", {""}),
}
"""Programs that copy here or there, by their last operand; the group of commands and the commands that do."""
_CURL_SENDS = (
    *("-T", "--upload-file", "-d", "--data", "-F", "--form", "--json"),
    *("--post", "--body", "--method"),
)
"""Options of curl and of wget by which they send."""


def is_upload(program: Program) -> bool:
    """Return whether a program sends something elsewhere, or removes it there."""
    operands = _operands(program)
    if any(operands[: len(first)] == first for first in _UPLOADS.get(program.name, ())):
        return True
    if program.name in ("curl", "wget"):
        return any(word.startswith(_CURL_SENDS) for word in program.words) or _asks_to_change(program)
    return _copies(program, operands) and _is_remote(operands[-1])


def lost_by(program: Program) -> Iterator[tuple[str, str]]:
    """Yield each path that a program would remove or rename, absolute, with the verb."""
    operands = _operands(program)
    verb = _LOSES.get(program.name)
    if verb is not None:
        moved = operands[:-1] if verb == "rename" and len(operands) > 1 else operands
        yield from ((path, verb) for word in moved for path in _paths(word, program.cwd))
        if verb == "rename":
            yield from ((path, "overwrite") for path in _targets(operands, program.cwd))
    elif program.name == "git" and operands[:1] and operands[0] in _GIT_LOSES:
        yield program.cwd, f"let git {operands[0]} change"
    elif program.name == "find" and ("-delete" in program.words or _finds_to_lose(program)):
        starts = [word for word in operands[:1] if not word.startswith("-")] or ["."]
        yield from ((path, "let find remove files in") for path in _paths(starts[0], program.cwd))
    elif _copies(program, operands) and _has_option(program, "--del", "--remove-"):
        here = [word for word in operands if not _is_remote(word)]
        yield from (
            (path, f"let {program.name} remove files in")
            for word in here
            for path in _paths(word, program.cwd)
        )


def overwritten_by(program: Program) -> Iterator[str]:
    """Yield each path that a program, or the shell that runs it, would write over or make; absolute."""
    operands = _operands(program)
    named = list(program.overwritten)
    if program.name in _OVERWRITES:
        named += operands
    elif program.name in ("sed", "perl") and _has_option(program, "-i", "--in-place"):
        named += operands[1:]
    elif program.name == "dd":
        named += [word.removeprefix("of=") for word in operands if word.startswith("of=")]
    for word in named:
        yield from _paths(word, program.cwd)
    if program.name in ("cp", "install", "ln"):
        yield from _targets(operands, program.cwd)


def _targets(operands: tuple[str, ...], cwd: str) -> Iterator[str]:
    """Yield the files that cp or mv would write over."""
    if len(operands) < 2:
        return
    for target in _paths(operands[-1], cwd):
        if os.path.isdir(target):
            inside = [os.path.join(target, os.path.basename(word.rstrip("/"))) for word in operands[:-1]]
            yield from (path for path in inside if os.path.isfile(path))
        else:
            yield target


def _operands(program: Program) -> tuple[str, ...]:
    words = list(program.words[1:])
    found: list[str] = []
    while words:
        word = words.pop(0)
        if program.name == "git" and not found and word in _GIT_WITH_VALUE:
            words = words[1:]
        elif word == "--":
            return (*found, *words)
        elif not word.startswith("-"):
            found.append(word)
    return tuple(found)


def _copies(program: Program, operands: tuple[str, ...]) -> bool:
    if program.name not in _COPIES or len(operands) < 2:
        return False
    group, commands = _COPIES[program.name]
    first = operands if not group else operands[1:] if operands[0] == group else ()
    return commands == {""} or (first[:1] != () and first[0] in commands)


def _is_remote(word: str) -> bool:
    """Whether an operand names another place: "s3://bucket", "host:folder"."""
    return "://" in word or ":" in word.partition("/")[0]


def _asks_to_change(program: Program) -> bool:
    pairs = zip(program.words, program.words[1:], strict=False)
    asked = {value for flag, value in pairs if flag in ("-X", "--request")}
    return bool(asked & {"POST", "PUT", "PATCH", "DELETE"})


def _finds_to_lose(program: Program) -> bool:
    pairs = zip(program.words, program.words[1:], strict=False)
    names = (name for word, name in pairs if word in ("-exec", "-execdir", "-ok"))
    return any(os.path.basename(name) in _LOSES for name in names)


def _has_option(program: Program, *beginnings: str) -> bool:
    return any(word.startswith(beginnings) for word in program.words)


def _paths(word: str, cwd: str) -> list[str]:
    """Return the paths that a word of a command line names, as a shell reads it."""
    path = os.path.normpath(os.path.join(cwd, os.path.expandvars(os.path.expanduser(word))))
    found = glob.glob(path) if glob.has_magic(path) else []
    parted = [os.path.split(one) for one in found or [path]]
    return [os.path.join(os.path.realpath(folder), name) for folder, name in parted]
