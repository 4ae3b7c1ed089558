"""The words behind `zerofit check` to Targets: reads the files that they name, and those that these name."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.command_line import PROGRAMS, read_command
from zerofit.checking.inputs.kind_of_file import format_of, kind_of
from zerofit.checking.inputs.named_files import (
    named_by_accelerate,
    named_by_arguments,
    named_by_command,
    named_by_source,
    resumed_from,
)
from zerofit.checking.targets import TargetFile, Targets
from zerofit.configs.document import FileKind
from zerofit.configs.text.read import decode, read_document
from zerofit.configs.text.unreadable import MAX_BYTES
from zerofit.core.command import Launcher
from zerofit.core.errors import Unreadable, UserError, nearest
from zerofit.core.facts import Checkpoint
from zerofit.core.setting import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerofit.configs.document import Document
    from zerofit.configs.schema import Schemas
    from zerofit.core.command import LaunchCommand

_MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""ASSUMPTION: no training script is longer; a hundred times the longest of transformers' examples."""


def read_bytes(name: str) -> bytes:
    """Return a file's first bytes: all of it, or one more than anything that is checked may have.

    Raises:
        UserError: it is a folder, or the system refuses to read it.
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
            why="check reads files one by one" if is_folder else "the system does not allow it",
            fix=f"name the files in it: {os.path.join(name, '*.json')}"
            if is_folder
            else "name a file that you may read",
        ) from None


def decode_script(data: bytes) -> str:
    """Return a script's text, in the encoding that its first lines declare.

    Raises:
        Unreadable: it is no text, or too long.
    """
    if len(data) > _MAX_SCRIPT_BYTES:
        raise Unreadable(
            f"the file is longer than {_MAX_SCRIPT_BYTES} bytes",
            "no training script is so long, so this is another file",
            "name the script",
        )
    import tokenize  # only where there is a script: it takes its time

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(data.decode(encoding), final=True)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(
            "the file is no text in the encoding that it declares",
            f"Python can't read it: {getattr(error, 'msg', None) or error}",
            "save the file as UTF-8",
        ) from None
    if "\x00" in text:
        raise Unreadable(
            "the file holds zero bytes",
            "Python refuses them in source: the file is binary, or damaged",
            "name the script",
            text.count("\n", 0, text.index("\x00")) + 1,
        )
    return text


def script_file(name: str) -> TargetFile:
    """Return a script, read.

    Raises:
        UserError: it can't be opened.
    """
    data = read_bytes(name)
    try:
        return TargetFile(name=name, kind=FileKind.SCRIPT, source=decode_script(data))
    except Unreadable as error:
        return TargetFile(name=name, kind=FileKind.SCRIPT, broken=error)


# deepspeed/runtime/engine.py, _get_rank_zero_ckpt_name and _get_ckpt_name.
_OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_PARAMETER_SHARD = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")


def probe_resumed(arguments: Sequence[str]) -> Checkpoint | None:
    """Return the checkpoint that a script's arguments say to resume from; None where they name none."""
    folder = resumed_from(arguments)
    return probe_checkpoint(folder) if folder else None


def probe_checkpoint(folder: str) -> Checkpoint | None:
    """Return what a folder that a run is to resume from shows; None where DeepSpeed did not write it.

    The folder is the one that is given to Trainer's --resume_from_checkpoint or accelerate's load_state: the
    file `latest` in it names the folder of the shards.
    """
    try:
        with open(os.path.join(folder, "latest"), encoding="utf-8") as file:
            names = os.listdir(os.path.join(folder, file.read().strip()))
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    ranks = {match[1] for name in names if (match := _OPTIMIZER_STATES.fullmatch(name))}
    return Checkpoint(
        folder=folder,
        num_ranks=len(ranks),
        partitions_parameters=any(_PARAMETER_SHARD.fullmatch(name) for name in names),
        is_universal="zero" in names,  # deepspeed/checkpoint/ds_to_universal.py: one folder a parameter
    )


STDIN = "standard input"
"""The name of what - stands for."""


def read_targets(
    words: Sequence[str],
    *,
    schemas: Schemas,
    stdin: Callable[[], bytes],
    overlay: Mapping[str, str] | None = None,
) -> Targets:
    """Return what the words name, read.

    Args:
        words: files, or a whole launch command.
        schemas: the schemas; flags of `accelerate launch` are read by them.
        stdin: returns what - stands for.
        overlay: texts to read in place of files, by the files' real paths.

    Raises:
        ExceptionGroup: of one UserError for each word that is nothing to check.
    """
    reading = _Reading(schemas, stdin, overlay or {})
    command = read_command(words, launch_flags=schemas.accelerate_launch.root)
    if command is not None:
        arguments = command.arguments
        reading.read_command(command)
    else:
        arguments = reading.read_words(words)
    reading.read_arguments(arguments)
    reading.read_what_files_name()
    if reading.errors:
        raise ExceptionGroup("targets that can't be checked", reading.errors)
    return Targets(
        files=tuple(reading.files.values()),
        missing=tuple(reading.missing),
        command=command,
        arguments=arguments,
        checkpoint=probe_resumed(arguments),
        schemas=schemas,
    )


class _Reading:
    """What was read so far."""

    def __init__(self, schemas: Schemas, stdin: Callable[[], bytes], overlay: Mapping[str, str]) -> None:
        self.files: dict[str, TargetFile] = {}
        """By real path, so that a file which is named twice is read once."""
        self.missing: list[Said[str]] = []
        self.errors: list[UserError] = []
        self._has_command = False
        self._schemas = schemas
        self._stdin = stdin
        self._overlay = overlay

    def read_words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Read files up to a script; return the words behind it, which are its arguments."""
        for number, word in enumerate(words):
            try:
                if word.startswith("-") and word != "-":
                    raise _flag_behind_a_file(word)
                if self._read_target(word).kind is FileKind.SCRIPT:
                    return tuple(words[number + 1 :])
            except UserError as error:
                self.errors.append(error)
        return ()

    def read_command(self, command: LaunchCommand) -> None:
        """Read the script of a launch command, and the files that its flags name."""
        self._has_command = True
        try:
            self._read_script_of(command)
        except UserError as error:
            self.errors.append(error)
        named = tuple(named_by_command(command))
        for kind, said in named:
            self._read_named(said, kind)
        default = _default_accelerate_file() if command.launcher is Launcher.ACCELERATE else None
        if default is not None and all(kind is not FileKind.ACCELERATE for kind, _ in named):
            said = Said(value=default, text="accelerate launch without --config_file")
            self._read_named(said, FileKind.ACCELERATE)

    def read_arguments(self, arguments: Sequence[str]) -> None:
        """Read the DeepSpeed configuration that the script's own arguments name, or hold."""
        for said in named_by_arguments(arguments):
            self._read_named(said, FileKind.DEEPSPEED)

    def read_what_files_name(self) -> None:
        """Read each DeepSpeed configuration that an accelerate configuration or a script names."""
        for file in tuple(self.files.values()):
            if file.source is not None:
                for said in named_by_source(file.name, file.source):
                    self._read_named(said, FileKind.DEEPSPEED)
            if file.document is not None and file.kind is FileKind.ACCELERATE:
                for said in named_by_accelerate(file.document):
                    self._read_named(self._beside(said, file.name), FileKind.DEEPSPEED)

    def _beside(self, said: Said[str], file: str) -> Said[str]:
        """Return a named file as it is found beside the file that names it, where no command says otherwise.

        The libraries look in the folder in which the command runs; without one, that may well be this.
        """
        path = os.path.join(os.path.dirname(file), said.value)
        if self._has_command or os.path.exists(said.value) or not os.path.exists(path):
            return said
        return replace(said, value=path)

    def _read_script_of(self, command: LaunchCommand) -> None:
        script = command.script
        if script is None:
            return
        is_module = command.find("module") is not None or (
            command.launcher is Launcher.PYTHON and not os.path.exists(script) and _is_dotted(script)
        )
        if is_module:
            script = _file_of_module(script)
            if script is None:
                return  # it is installed somewhere; what it does stays unknown
        else:
            from zerofit.scripts.target import check_script

            check_script(script, module=False)
        self._read_script(script)

    def _read_target(self, name: str) -> TargetFile:
        if name == "-":
            file = self._configuration(STDIN, _text_of(self._stdin()), FileKind.DEEPSPEED, None)
            return self._add(STDIN, file)
        data = check_target(name)
        if _is_script(name):
            return self._read_script(name)
        text = self._text(name, data)
        kind = _kind_of_broken(name)
        if isinstance(text, Unreadable):
            return self._add(name, TargetFile(name=name, kind=kind, broken=text))
        format = format_of(name, text)  # noqa: A001 - the field's word
        if format is None:
            raise _not_a_configuration(name, f"a {os.path.splitext(name)[1] or 'text'} file", None)
        try:
            document = read_document(text, name=name, format=format)
        except Unreadable as error:
            return self._add(name, TargetFile(name=name, kind=kind, broken=error))
        found = kind_of(document, self._schemas)
        if isinstance(found, FileKind):
            return self._add(name, TargetFile(name=name, kind=found, document=document))
        raise _not_a_configuration(name, found, document)

    def _read_script(self, name: str) -> TargetFile:
        return self._add(name, script_file(name))

    def _read_named(self, said: Said[str], kind: FileKind) -> None:
        """Read a file that a layer names; the libraries look for it in the current folder, as this does."""
        path = said.value
        if os.path.realpath(path) in self.files:
            return
        if not os.path.exists(path):
            if kind is FileKind.DEEPSPEED and (text := _inline(path)) is not None:
                name = re.split("[ =:]", said.text)[0]
                self._add(name, self._configuration(name, text, kind, None))
            elif _is_path(path):
                self.missing.append(said)
            return
        try:
            data = read_bytes(path)
        except UserError as error:
            self.errors.append(error)
            return
        self._add(path, self._configuration(path, self._text(path, data), kind, said))

    def _configuration(
        self, name: str, text: str | Unreadable, kind: FileKind, named_by: Said[str] | None
    ) -> TargetFile:
        """Return a file whose kind is known from what names it."""
        try:
            if isinstance(text, Unreadable):
                raise text
            document = read_document(text, name=name, format=format_of(name, text))
        except Unreadable as error:
            return TargetFile(name=name, kind=kind, broken=error, named_by=named_by)
        return TargetFile(name=name, kind=kind, document=document, named_by=named_by)

    def _text(self, name: str, data: bytes) -> str | Unreadable:
        overlaid = self._overlay.get(os.path.realpath(name))
        return _text_of(data) if overlaid is None else overlaid

    def _add(self, path: str, file: TargetFile) -> TargetFile:
        return self.files.setdefault(os.path.realpath(path), file)


def _text_of(data: bytes) -> str | Unreadable:
    try:
        return decode(data)
    except Unreadable as error:
        return error


def _is_path(value: str) -> bool:
    """Return whether a value can only be a file: some scripts take words, and a shell fills in variables."""
    return "$" not in value and ("/" in value or "." in value)


def _inline(value: str) -> str | None:
    """Return the JSON that stands in place of a file's name, as it is or in base64; accelerate takes both."""
    if value.lstrip().startswith("{"):
        return value
    import base64

    try:
        text = base64.urlsafe_b64decode(value).decode("utf-8")
    except ValueError:  # of binascii and of utf-8
        return None
    return text if text.lstrip().startswith("{") else None


def _is_script(name: str) -> bool:
    return name.endswith((".py", ".pyw"))


def _is_dotted(name: str) -> bool:
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is not None and not name.endswith(".py")


def _file_of_module(name: str) -> str | None:
    """Return the file that `python -m name` runs, where it stands below the current folder."""
    path = name.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__main__.py") if os.path.isfile(file)), None)


def _kind_of_broken(name: str) -> FileKind:
    """Return what a file that can't be read was meant for, as far as its suffix tells."""
    return FileKind.ACCELERATE if name.lower().endswith((".yaml", ".yml")) else FileKind.DEEPSPEED


def _default_accelerate_file() -> str | None:
    """Return the file that `accelerate launch` reads where no flag names one.

    Source: https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/config/config_args.py
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = os.path.expanduser(os.environ.get("HF_HOME", os.path.join(cache, "huggingface")))
    files = (os.path.join(home, "accelerate", f"default_config.{suffix}") for suffix in ("yaml", "json"))
    return next((file for file in files if os.path.isfile(file)), None)


def check_target(name: str) -> bytes:
    """Return the bytes of a file that the user names.

    Raises:
        UserError: it is not there, with the nearest file; or it is a folder, or can't be read.
    """
    if os.path.exists(name):
        return read_bytes(name)
    folder, base = os.path.split(name)
    stem, suffix = os.path.splitext(base)
    # By stems, as the same suffix makes any two names alike; a link that leads nowhere is no better.
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
        fix=f"did you mean {os.path.join(folder, near)}?" if near else "name a file that is there",
    )


def _flag_behind_a_file(word: str) -> UserError:
    return UserError(
        "flag-behind-file",
        "flags of zerofit check stand before the files",
        found=word,
        why="what stands behind a script or a launcher belongs to those",
        fix=f"zerofit check {word} FILES",
    )


def _not_a_configuration(name: str, looks_like: str, document: Document | None) -> UserError:
    named = document.value("deepspeed") if document else None
    fix = "name a DeepSpeed JSON, an accelerate YAML, a script, or a whole launch command"
    if isinstance(named, str) and named:
        fix = f"it names a DeepSpeed configuration, which can be checked: zerofit check {named}"
    return UserError(
        "not-a-configuration",
        "the file is nothing that can be checked",
        found=f"{name} looks like {looks_like}",
        why="check reads what DeepSpeed and accelerate read, and scripts",
        fix=fix,
    )
