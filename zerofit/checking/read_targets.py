"""Parses the arguments of `zerofit check` to Targets: reads the files they name, and those named by these."""

from __future__ import annotations

import base64
import io
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from zerofit.checking.inputs.command_line import PROGRAMS, read_command
from zerofit.checking.inputs.file_kinds import kind_of
from zerofit.checking.inputs.named_files import named_files, resumed_from
from zerofit.checking.targets import TargetFile, Targets
from zerofit.configs.document import FileKind
from zerofit.configs.text.read import decode, format_of, read_document
from zerofit.configs.text.unreadable import MAX_BYTES
from zerofit.core.checkpoints import read_shards
from zerofit.core.command import Launcher, is_truth
from zerofit.core.errors import Unreadable, UserError, nearest
from zerofit.core.setting import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zerofit.configs.document import Document
    from zerofit.configs.schema import Schemas
    from zerofit.core.command import LaunchCommand
    from zerofit.core.facts import Checkpoint

_MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""ASSUMPTION: no training script is longer; a hundred times the longest of transformers' examples."""
_MAX_FOLDERS = 4
"""ASSUMPTION: examples are at most this deep in a repository; without .git the folders above are others'."""


def read_bytes(name: str) -> bytes:
    """Return a file's bytes, at most one more than the maximum that can be checked.

    Raises:
        UserError: it is a folder, or can't be read.
    """
    try:
        with open(name, "rb") as file:
            return file.read(max(MAX_BYTES, _MAX_SCRIPT_BYTES) + 1)
    except OSError as error:
        is_folder = os.path.isdir(name)
        raise UserError(
            "target-unreadable",
            "the file can't be read",
            found=f"{name}: {'it is a folder' if is_folder else error.strerror}",
            why="files are read one by one" if is_folder else "permission denied",
            fix=f"name the files in it: {os.path.join(name, '*.json')}"
            if is_folder
            else "name a readable file",
        ) from None


def decode_script(data: bytes) -> str:
    """Return a script's text, in the encoding declared in its first lines.

    Raises:
        Unreadable: it is not text, or too long.
    """
    if len(data) > _MAX_SCRIPT_BYTES:
        raise Unreadable(
            f"the file has more than {_MAX_SCRIPT_BYTES} bytes",
            "no training script is that long, so this is another file",
            "name the script",
        )
    import tokenize  # imported only if needed, since it takes time

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(
            "the file is not text in its declared encoding",
            f"Python can't read it: {getattr(error, 'msg', None) or error}",
            "save the file as UTF-8",
        ) from None


def script_file(name: str) -> TargetFile:
    """Return a script's file, read.

    Raises:
        UserError: it can't be opened.
    """
    data = read_bytes(name)
    try:
        return TargetFile(name=name, kind=FileKind.SCRIPT, source=decode_script(data))
    except Unreadable as error:
        return TargetFile(name=name, kind=FileKind.SCRIPT, broken=error)


def probe_resumed(arguments: Sequence[str]) -> Checkpoint | None:
    """Return the checkpoint that a script's arguments resume from.

    The folder is the argument of Trainer's --resume_from_checkpoint or accelerate's load_state: its file
    `latest` names the folder of the shards. None without one, or if it is not DeepSpeed's.
    """
    folder = resumed_from(arguments)
    if folder is None:
        return None
    try:
        with open(os.path.join(folder, "latest"), encoding="utf-8") as file:
            return read_shards(folder, file.read().strip())
    except (OSError, ValueError):
        return None


STDIN = "standard input"
"""The name for standard input."""


def read_targets(
    words: Sequence[str],
    *,
    schemas: Schemas,
    stdin: Callable[[], bytes],
    overlay: Mapping[str, str] | None = None,
    reads_default: bool = True,
) -> Targets:
    """Return the files and command that the words name.

    Args:
        words: files, or a whole launch command.
        schemas: for parsing flags of `accelerate launch`.
        stdin: returns the content of "-".
        overlay: texts to read instead of files, by the files' real paths.
        reads_default: False to leave out accelerate's default file, if the command names none.

    Raises:
        ExceptionGroup: of one UserError for each word that can't be checked.
    """
    reading = _Reading(schemas, stdin, overlay or {}, reads_default=reads_default)
    command = read_command(words, schemas=schemas)
    if command is not None:
        arguments = command.arguments
        reading.read_command(command)
    else:
        arguments = reading.read_words(words)
    for kind, said, by in named_files(command, arguments, reading.files):
        reading.read_named(_beside(said, by.name) if by and command is None else said, kind)
    if reading.errors:
        raise ExceptionGroup("targets that can't be checked", reading.errors)
    return Targets(
        files=tuple(reading.files.values()),
        missing=tuple(reading.missing),
        command=command,
        arguments=arguments,
        are_all_arguments=command is not None or bool(arguments),
        checkpoint=probe_resumed(arguments),
        schemas=schemas,
    )


class _Reading:
    """The inputs read so far."""

    def __init__(
        self,
        schemas: Schemas,
        stdin: Callable[[], bytes],
        overlay: Mapping[str, str],
        *,
        reads_default: bool,
    ) -> None:
        self.files: dict[str, TargetFile] = {}
        """By real path, so that a file named twice is read once."""
        self.missing: list[Said[str]] = []
        self.errors: list[UserError] = []
        self._schemas = schemas
        self._stdin = stdin
        self._overlay = overlay
        self._reads_default = reads_default

    def read_words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Read files up to a script; return the words after it, which are its arguments."""
        for number, word in enumerate(words):
            try:
                if word.startswith("-") and word != "-":
                    raise UserError(
                        "flag-behind-file",
                        "flags of zerofit check come before the files",
                        found=word,
                        why="arguments after a script or launcher belong to it",
                        fix=f"zerofit check {word} FILES",
                    )
                if self._read_target(word).kind is FileKind.SCRIPT:
                    return tuple(words[number + 1 :])
            except UserError as error:
                self.errors.append(error)
        return ()

    def read_command(self, command: LaunchCommand) -> None:
        """Read a launch command's script, and accelerate's default file if no flag names one."""
        if command.script is not None:
            self._read_script(command, command.script)
        flag = command.find("config_file")
        is_read = self._reads_default and command.launcher is Launcher.ACCELERATE
        default = _default_accelerate_file() if is_read else None
        if default is not None and (flag is None or not flag.value):
            said = Said(value=default, text="accelerate launch without --config_file")
            self.read_named(said, FileKind.ACCELERATE)

    def _read_script(self, command: LaunchCommand, name: str) -> None:
        script: str | None = name
        if command.find("module") is not None or (
            command.launcher is Launcher.PYTHON and not os.path.exists(name) and _is_dotted(name)
        ):
            script = _file_of_module(name)  # one that is installed elsewhere stays unknown
        if is_truth(name) and not os.path.exists(name):
            return  # the value of a switch, which a rule reports
        try:
            if script == name:
                from zerofit.scripts.target import check_script

                check_script((name,))
            if script is not None:
                self._add(script, script_file(script))
        except UserError as error:
            self.errors.append(error)

    def read_named(self, said: Said[str], kind: FileKind) -> None:
        """Read a file named by a layer, relative to the current folder as the libraries do."""
        path = said.value
        if os.path.realpath(path) in self.files:
            return
        if not os.path.exists(path):
            if kind is FileKind.DEEPSPEED and (text := inline_json(path)) is not None:
                name = re.split("[ =:]", said.text)[0]
                self._add(name, _configuration(name, text, kind))
            elif _is_path(path):
                self.missing.append(said)
            return
        try:
            file = _configuration(path, self._content(path, read_bytes(path)), kind)
        except UserError as error:
            self.errors.append(error)
        else:
            self._add(path, replace(file, named_by=said))

    def _read_target(self, name: str) -> TargetFile:
        if name == "-":
            return self._add(STDIN, _configuration(STDIN, self._stdin(), FileKind.DEEPSPEED))
        data = check_target(name)
        if name.endswith((".py", ".pyw")):
            return self._add(name, script_file(name))
        file = _configuration(name, self._content(name, data))
        if file.document is not None:
            found = kind_of(file.document, self._schemas)
            if not isinstance(found, FileKind):
                raise _not_a_configuration(name, found, file.document)
            file = replace(file, kind=found)
        return self._add(name, file)

    def _content(self, name: str, data: bytes) -> bytes | str:
        return self._overlay.get(os.path.realpath(name), data)

    def _add(self, path: str, file: TargetFile) -> TargetFile:
        return self.files.setdefault(os.path.realpath(path), file)


def _beside(said: Said[str], file: str) -> Said[str]:
    """Return the named file, looked up beside and above the file that names it if not found here.

    The libraries look in the folder in which the command runs; without a command, one of these is as likely.
    """
    paths = [said.value, *(str(folder / said.value) for folder in _folders_above(file))]
    return replace(said, value=next(filter(os.path.isfile, paths), said.value))


def _folders_above(file: str) -> Iterator[PurePath]:
    """Yield a file's folder and those above, up to its repository's; neither the home folder nor the root."""
    for level, folder in enumerate(PurePath(file).parents[:_MAX_FOLDERS]):
        if level and os.path.realpath(folder) in (os.path.realpath(os.path.expanduser("~")), os.path.sep):
            return
        yield folder
        if os.path.exists(folder / ".git"):
            return


def _configuration(name: str, content: bytes | str, kind: FileKind | None = None) -> TargetFile:
    """Return a configuration, read; a target's kind is given by its extension.

    Raises:
        UserError: it is a target, and has no configuration syntax.
    """
    is_yaml = name.lower().endswith((".yaml", ".yml"))
    kind_read = kind or (FileKind.ACCELERATE if is_yaml else FileKind.DEEPSPEED)
    try:
        text = decode(content) if isinstance(content, bytes) else content
        language = format_of(name, text)
        if language is None and kind is None:
            raise _not_a_configuration(name, f"a {os.path.splitext(name)[1] or 'text'} file", None)
        document = read_document(text, name=name, format=language)
    except Unreadable as error:
        return TargetFile(name=name, kind=kind_read, broken=error)
    return TargetFile(name=name, kind=kind_read, document=document)


def _is_path(value: str) -> bool:
    """Return True if a value can only be a file, not a script's keyword or a shell variable."""
    return "$" not in value and ("/" in value or "." in value)


def inline_json(value: str) -> str | None:
    """Return the JSON given instead of a file name, plain or in base64; accelerate accepts both."""
    with suppress(ValueError):  # raised by binascii and utf-8
        value = value if value.lstrip().startswith("{") else base64.urlsafe_b64decode(value).decode("utf-8")
    return value if value.lstrip().startswith("{") else None


def _is_dotted(name: str) -> bool:
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is not None and not name.endswith(".py")


def _file_of_module(name: str) -> str | None:
    """Return the file that `python -m name` runs, if it is below the current folder."""
    path = name.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__main__.py") if os.path.isfile(file)), None)


def _default_accelerate_file() -> str | None:
    """Return the file that `accelerate launch` reads by default.

    Source:
    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/config/config_args.py
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = os.path.expanduser(os.environ.get("HF_HOME", os.path.join(cache, "huggingface")))
    files = (os.path.join(home, "accelerate", f"default_config.{suffix}") for suffix in ("yaml", "json"))
    return next((file for file in files if os.path.isfile(file)), None)


def check_target(name: str) -> bytes:
    """Return the bytes of a file that the user names.

    Raises:
        UserError: it does not exist (with the most similar file), is a folder, or can't be read.
    """
    if os.path.exists(name):
        return read_bytes(name)
    folder, base = os.path.split(name)
    stem, suffix = os.path.splitext(base)
    # By stems, since equal extensions make names similar; dangling links are not suggested.
    stems = {
        os.path.splitext(file)[0]: file
        for file in (os.listdir(folder or ".") if os.path.isdir(folder or ".") else [])
        if os.path.splitext(file)[1] == suffix and os.path.exists(os.path.join(folder, file))
    }
    near = stems.get(nearest(stem, stems) or "")
    program = nearest(base, PROGRAMS) if not suffix else None
    if program:
        near, folder = program, ""
    raise UserError(
        "target-missing",
        "there is no such file",
        found=name,
        why="check takes files, or a whole command such as accelerate launch train.py",
        fix=f"did you mean {os.path.join(folder, near)}?" if near else "name an existing file",
    )


def _not_a_configuration(name: str, looks_like: str, document: Document | None) -> UserError:
    named = document.value("deepspeed") if document else None
    fix = "name a DeepSpeed JSON, an accelerate YAML, a script, or a whole launch command"
    if isinstance(named, str) and named:
        fix = f"it names a DeepSpeed configuration, which you can check: zerofit check {named}"
    return UserError(
        "not-a-configuration",
        "the file can't be checked",
        found=f"{name} looks like {looks_like}",
        why="check supports configurations of DeepSpeed and accelerate, and scripts",
        fix=fix,
    )
