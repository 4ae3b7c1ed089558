"""Parses the arguments of `zerofit check` to Targets: reads the files they name, and those named by these."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from zerofit.checking import script_files
from zerofit.checking.inputs.command_line import read_command
from zerofit.checking.inputs.file_kinds import kind_of
from zerofit.checking.inputs.hostfiles import read_hostfile
from zerofit.checking.inputs.named_files import named_files, resumed_from
from zerofit.checking.inputs.programs import (
    LAUNCHERS,
    file_of_shell,
    is_launch_line,
    other_program,
    program_of_module,
    text_of_shell,
    unknown_program,
)
from zerofit.checking.inputs.zerofit_line import reads_default_file
from zerofit.checking.launch_line import with_line_behind
from zerofit.checking.script_files import inline_json, read_bytes, script_file
from zerofit.checking.targets import DICTIONARY, TargetFile, Targets
from zerofit.configs.document import FileKind
from zerofit.configs.text.json import why_not_json
from zerofit.configs.text.read import decode, format_of, read_document
from zerofit.core.command import Launcher, Refusal, Route, is_literal, is_truth
from zerofit.core.errors import Unreadable, UserError, nearest
from zerofit.core.setting import Confidence, Said

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from zerofit.checking.inputs.hostfiles import Hostfile
    from zerofit.checking.inputs.programs import OtherProgram
    from zerofit.checking.inputs.shell_lines import ShellLine, WrittenFile
    from zerofit.configs.document import Document
    from zerofit.configs.schema import Schemas
    from zerofit.core.command import LaunchCommand
    from zerofit.core.facts import Checkpoint

_MAX_FOLDERS = 4
"""ASSUMPTION: examples are at most this deep in a repository; without .git the folders above are others'."""


def _lacks_value(command: LaunchCommand) -> bool:
    return any(refused.why is Refusal.NO_VALUE for refused in command.refused)


def probe_resumed(arguments: Sequence[str]) -> Checkpoint | None:
    """Return the checkpoint that a script's arguments resume from.

    The folder is the argument of Trainer's --resume_from_checkpoint or accelerate's load_state: its file
    `latest` names the folder of the shards. None without one, or if it is not DeepSpeed's.
    """
    folder = resumed_from(arguments)
    if folder is None:
        return None
    from zerofit.core.checkpoints import read_shards  # imported only if needed, since it takes time

    try:
        tag = read_bytes(os.path.join(folder, "latest")).decode().strip()
        return read_shards(folder, tag) if tag else None
    except (OSError, UserError, ValueError):
        return None


_TYPED = "the command line"
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
    targets = reading.targets(words)
    if reading.errors:
        raise ExceptionGroup("targets that can't be checked", reading.errors)
    return targets


class _Reading:
    """The inputs read so far: those that the user typed, or those of one launch line of a file."""

    def __init__(
        self,
        schemas: Schemas,
        stdin: Callable[[], bytes],
        overlay: Mapping[str, str],
        *,
        reads_default: bool,
        line: ShellLine | None = None,
    ) -> None:
        self.files: dict[str, TargetFile] = {}
        """By real path, so that a file named twice is read once."""
        self.missing: list[Said[str]] = []
        self.missing_script: UserError | None = None
        self.hostfile: Hostfile | None = None
        self.missing_hostfile: str | None = None
        self.errors: list[UserError] = []
        self.runs: list[Targets] = []
        """Those of launch lines in files."""
        self.notes: list[str] = []
        self._schemas = schemas
        self._stdin = stdin
        self._overlay = overlay
        self._reads_default = reads_default
        self._line = line
        self._started: Sequence[str] = ()
        """The words of the line that starts a file of lines, where the user typed it."""

    def targets(self, words: Sequence[str]) -> Targets:
        """Read a command, or files."""
        command = self._command(words)
        other = None if command is not None else self._other_program(words)
        if command is not None:
            arguments = command.arguments
            other = program_of_module(command.script or "", list(arguments))
            self.read_command(command)
            self._read_recipes(arguments)
        elif other is not None:
            arguments = other.arguments
            self._read_program(other)
        elif (text := text_of_shell(words)) is not None:
            from zerofit.checking.inputs.shell_lines import shell_lines  # imported only if needed

            arguments = ()
            self._read_lines(shell_lines(text, name=_TYPED))
        else:
            file = file_of_shell(words) if not os.path.exists(words[0]) else None
            self._started = () if file is None else words
            arguments = self.read_words(words if file is None else [file])
        for kind, said, by in named_files(command, arguments, self.files):
            self.read_named(_beside(said, by.name) if by and command is None else said, kind)
        own = Targets(
            files=tuple(self.files.values()),
            missing=tuple(self.missing),
            missing_script=self.missing_script,
            hostfile=self.hostfile,
            missing_hostfile=self.missing_hostfile,
            command=command,
            arguments=arguments,
            are_all_arguments=command is not None or bool(arguments),
            route=Route.TRAINER if other is not None and other.is_trainer else None,
            checkpoint=probe_resumed(arguments),
            schemas=self._schemas,
            program=other,
            line=self._line,
            notes=tuple(self.notes),
        )
        return self._with_runs(own, words) if command is None and other is None else own

    def _command(self, words: Sequence[str]) -> LaunchCommand | None:
        """Return a launch command; one of zerofit with the line of another launcher behind it as its own."""
        command = read_command(words, schemas=self._schemas)
        try:
            whole = None if command is None else with_line_behind(command)
        except* UserError as group:
            self.errors += (error for error in group.exceptions if isinstance(error, UserError))
            whole = None if command is None else replace(command, script=None)
        return whole

    def _with_runs(self, own: Targets, words: Sequence[str]) -> Targets:
        """Return files as targets with a run for each launch line, each recipe, and the other files."""
        others = [file for file in own.files if file.kind is not FileKind.LINES]
        recipes = [file.name for file in others if file.kind is FileKind.RECIPE]
        runs = list(self.runs)
        if len(recipes) < 2:
            if not runs:
                return own
            runs += [replace(own, files=tuple(others), notes=())] if others else []
        else:
            lines = [file.name for file in own.files if file.kind is FileKind.LINES]
            for recipe in recipes:
                left_out = {*lines, *recipes} - {recipe}
                runs.append(self._for_line(None).targets([word for word in words if word not in left_out]))
        files = {os.path.realpath(file.name): _placed(file, run) for run in runs for file in run.files}
        files |= self.files
        ordered = {path: files[path] for path in (*self.files, *files)}
        return replace(own, files=tuple(ordered.values()), runs=tuple(runs))

    def _other_program(self, words: Sequence[str]) -> OtherProgram | None:
        """Return the program of a line that is no launch line and names no files itself."""
        found = other_program(words)
        if found is not None and len(words) > 1:
            return found
        is_word = len(words) > 1 and not os.path.splitext(words[0])[1] and not words[0].startswith("-")
        if self._line is not None or not is_word or os.path.exists(words[0]):
            return None
        is_shell = text_of_shell(words) is not None or file_of_shell(words) is not None
        return None if is_shell else unknown_program(words)

    def _read_program(self, program: OtherProgram) -> None:
        """Read the files that another program's arguments name."""
        self._read_recipes(program.arguments, others=True)
        read = [file.name for file in self.files.values()]
        is_read = bool(read) or (program.is_trainer and any(word[:2] == "--" for word in program.arguments))
        if not is_read and not self.missing and not self.errors and self._line is None:
            self.errors.append(_unknown_program(program))
        where = f"{self._line.places[0]}: " if self._line is not None else ""
        rest = f"; read: {', '.join(read)}" if read else ""
        self.notes.append(f"{where}the flags of {program.name}, a program that zerofit does not know{rest}")

    def _read_recipes(self, arguments: Sequence[str], *, others: bool = False) -> None:
        """Read the recipes among a program's arguments; with `others`, its other configurations too."""
        for word in arguments:
            name = word.partition("=")[2] if word.startswith("-") else word
            if not name.endswith((".yaml", ".yml", ".json")):
                continue
            path = self._found(name)
            if not os.path.isfile(path):
                if others and self._line is None:
                    self.missing.append(Said(value=name, text=word))
                continue
            with suppress(UserError):
                file = _configuration(path, self._content(path, read_bytes(path)))
                if file.broken is not None and others:
                    self.errors.append(_broken_recipe(path, file.broken))
                kind = kind_of(file.document, self._schemas) if file.document is not None else None
                if kind is FileKind.RECIPE or (others and isinstance(kind, FileKind)):
                    by = None if self._line is None else self._line.said(path)
                    self._add(path, replace(file, kind=kind, named_by=by))

    def _read_lines(self, lines: Sequence[ShellLine]) -> int:
        """Read the runs that a file's launch lines start; return the number of these lines."""
        num_lines = 0
        for line in lines:
            reading = self._for_line(line)
            if is_launch_line(line.words):
                num_lines += 1
                self.runs.append(reading.targets(line.words))
                self.notes += reading.notes
                self.notes += (
                    f"{line.places[0]}: {error.summary}: {error.found}" for error in reading.errors
                )
            elif (name := file_of_shell(line.words)) is not None:
                path = reading._found(name)
                if os.path.isfile(path) and os.path.realpath(path) not in self.files:
                    self._read_line_file(path, read_bytes(path), named_by=line.said(path), started=line.words)
            elif line.unset_command is not None:
                self.runs.append(self._of_line_alone(line))
        return num_lines

    def _of_line_alone(self, line: ShellLine) -> Targets:
        """Return a run of which nothing but its line is known."""
        return Targets(schemas=self._schemas, line=line)

    def _for_line(self, line: ShellLine | None) -> _Reading:
        return _Reading(
            self._schemas, self._stdin, self._overlay, reads_default=self._reads_default, line=line
        )

    def _found(self, name: str) -> str:
        """Return the path of a file that a line names, in the folders in which the line may run."""
        if self._line is None or not is_literal(name) or os.path.isabs(name):
            return name
        folder, file = self._line.folder, self._line.places[0].file.partition(", cell ")[0]
        above = [str(path) for path in _folders_above(file)]
        bases = [folder, "", *(os.path.join(path, folder) for path in above), *above]
        paths = (os.path.normpath(os.path.join(base, name)) for base in bases)
        return next(filter(os.path.isfile, paths), name)

    def read_words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Read files up to a script; return the words after it, which are its arguments."""
        for number, word in enumerate(words):
            try:
                if word.startswith("-") and word not in ("-", "--"):
                    raise UserError(
                        "flag-behind-file",
                        "flags of zerofit check come before the files",
                        found=word,
                        why="arguments after a script or launcher belong to it",
                        fix=f"zerofit check {word} FILES",
                    )
                if word == "--" or _is_argument(word, self.files.values()):
                    continue  # bash run.sh WORD
                if self._read_target(word).kind is FileKind.SCRIPT:
                    self._read_recipes(words[number + 1 :])
                    return tuple(words[number + 1 :])
            except UserError as error:
                self.errors.append(error)
        return ()

    def read_command(self, command: LaunchCommand) -> None:
        """Read a launch command's script, and accelerate's default file if no flag names one."""
        if command.script is not None:
            self._read_script(command, command.script)
        self._read_hostfile(command)
        flag = command.find("config_file")
        is_read = self._reads_default and reads_default_file(command)
        default = script_files.default_accelerate_file() if is_read else None
        if default is not None and (flag is None or not flag.value):
            said = Said(value=default, text="accelerate launch without --config_file")
            self.read_named(said, FileKind.ACCELERATE)

    def _read_hostfile(self, command: LaunchCommand) -> None:
        """Read the hostfile that a line of DeepSpeed's launcher names, unless its file may write it."""
        flag = command.find("hostfile") if command.launcher is Launcher.DEEPSPEED else None
        if flag is None or not flag.value or not is_literal(flag.value):
            return
        path = self._found(flag.value)
        is_written = self._line is not None and flag.value in {*self._line.written, *self._line.named}
        if os.path.isfile(path) and not is_written:
            with suppress(OSError, UnicodeDecodeError):
                self.hostfile = read_hostfile(read_bytes(path).decode(), name=flag.value)
        elif self._line is None:
            self.missing_hostfile = flag.text

    def _read_script(self, command: LaunchCommand, name: str) -> None:
        from zerofit.scripts.target import check_script, file_of_module

        script: str | None = name
        if command.find("module") is not None or (
            command.launcher is Launcher.PYTHON and not os.path.exists(name) and _is_dotted(name)
        ):
            script = file_of_module(name)  # one that is installed elsewhere stays unknown
        if not os.path.exists(name) and (is_truth(name) or _lacks_value(command)):
            return  # a value that was taken for the script, which a rule reports
        if self._line is not None:
            self._read_script_of_line(self._line, script if script is None else self._found(script))
            return
        try:
            if script == name:
                check_script((name,))
            if script is not None:
                self._add(script, script_file(script))
        except UserError as error:
            is_missing = error.rule == "script-missing" and (command.flags or command.arguments)
            if not is_missing:
                self.errors.append(error)
            self.missing_script = error if is_missing else None

    def _read_script_of_line(self, line: ShellLine, script: str | None) -> None:
        """Read the script of a line in a file; it may be in a folder that is not here."""
        written = line.written.get(script or "")
        if written is not None and script is not None:
            said = Said(value=script, text=f"written by {written.place}", place=written.place)
            file = TargetFile(name=script, kind=FileKind.SCRIPT, source=written.text, named_by=said)
            self._add(script, file)
        elif script is not None and os.path.isfile(script):
            self._add(script, replace(script_file(script), named_by=line.said(script)))
        elif script is not None and is_literal(script) and script.endswith(".py"):
            self.notes.append(f"{line.places[0]}: {script}, which is not found here")

    def read_named(self, said: Said[str], kind: FileKind) -> None:
        """Read a file named by a layer, relative to the current folder as the libraries do."""
        if self._line is not None:
            written = self._line.written.get(said.value)
            if written is not None:
                self._read_written(said.value, written, kind)
                return
            said = replace(said, value=self._found(said.value))
        path = said.value
        if os.path.realpath(path) in self.files:
            return
        if not os.path.exists(path):
            if kind is FileKind.DEEPSPEED and (text := inline_json(path)) is not None:
                if said.place is None:
                    name = re.split("[ =:]", said.text)[0]
                    self._add(name, _configuration(name, text, kind))
                else:
                    file = _configuration(f"{DICTIONARY}{said.place.file}", text, kind)
                    self._add(f"{file.name}:{said.place.line}", replace(file, named_by=said))
            elif _is_path(path):
                self._miss(said)
            return
        try:
            file = _configuration(path, self._content(path, read_bytes(path)), kind)
        except UserError as error:
            self.errors.append(error)
        else:
            self._add(path, replace(file, named_by=said))

    def _read_written(self, name: str, written: WrittenFile, kind: FileKind) -> None:
        """Read a file that the line's own script writes, unless it has values that only the run knows."""
        if written.is_open:
            self.notes.append(f"{name}, whose values {written.place} takes from variables")
            return
        said = Said(value=name, text=f"written by {written.place}", place=written.place)
        self._add(name, replace(_configuration(name, written.text, kind), named_by=said))

    def _has_script(self) -> bool:
        return any(file.kind is FileKind.SCRIPT for file in self.files.values())

    def _miss(self, said: Said[str]) -> None:
        """Remember a missing file.

        That of a line in a file is not checked if the line's script is not here either, or if a command
        before the line may write it.
        """
        if self._line is None:
            self.missing.append(said)
        elif said.value not in self._line.named and self._has_script():
            place = said.place or self._line.place_of(said.text)
            self.missing.append(replace(said, place=place, confidence=Confidence.LIKELY))
        else:
            self.notes.append(f"{self._line.place_of(said.text)}: {said.value}, which is not found here")

    def _read_target(self, name: str) -> TargetFile:
        if name == "-":
            return self._add(STDIN, _configuration(STDIN, self._stdin(), FileKind.DEEPSPEED))
        data = check_target(name)
        if name.endswith((".py", ".pyw")):
            return self._add(name, script_file(name))
        if _has_lines(name, data):
            return self._read_line_file(name, data, started=self._started)
        file = _configuration(name, self._content(name, data))
        if file.document is not None:
            found = kind_of(file.document, self._schemas)
            if not isinstance(found, FileKind):
                raise _not_a_configuration(name, found, file.document)
            file = replace(file, kind=found)
        return self._add(name, file)

    def _read_line_file(
        self, name: str, data: bytes, *, started: Sequence[str], named_by: Said[str] | None = None
    ) -> TargetFile:
        """Read a shell script or notebook, and what its launch lines name."""
        from zerofit.checking.inputs.line_files import lines_of_file  # imported only if needed

        file = self._add(name, TargetFile(name=name, kind=FileKind.LINES, named_by=named_by))
        try:
            text = self._overlay.get(os.path.realpath(name)) or data.decode("utf-8")
            lines = lines_of_file(name, text, started=started)
        except ValueError:
            if named_by is not None:
                return file
            raise _not_a_configuration(name, "neither a shell script nor a notebook", None) from None
        num_lines = self._read_lines(lines)
        if not self.runs and named_by is None:
            self.notes.append(f"{name}, which has no launch line")
        if not num_lines and (job_line := next((line for line in lines if line.job is not None), None)):
            self.runs.append(self._of_line_alone(job_line))  # its header is checked
        self.files[os.path.realpath(name)] = replace(file, num_lines=num_lines, shell_text=text)
        return file

    def _content(self, name: str, data: bytes) -> bytes | str:
        return self._overlay.get(os.path.realpath(name), data)

    def _add(self, path: str, file: TargetFile) -> TargetFile:
        return self.files.setdefault(os.path.realpath(path), file)


def _has_lines(name: str, data: bytes) -> bool:
    """Return True if a file has command lines."""
    if name.lower().endswith((".json", ".hjson", ".yaml", ".yml")):
        return False
    from zerofit.checking.inputs.line_files import has_lines  # imported only if needed, since it takes time

    return has_lines(name, data)


def _is_argument(word: str, files: Collection[TargetFile]) -> bool:
    """Return True for a word behind a shell script that names no file."""
    is_behind = bool(files) and all(file.kind is FileKind.LINES for file in files)
    return is_behind and not (os.path.exists(word) or os.path.splitext(word)[1] or word.startswith("-"))


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
        if kind is FileKind.FSDP and (problem := why_not_json(text)) is not None:
            raise problem  # the others' readers also take HJSON
        document = read_document(text, name=name, format=language)
    except Unreadable as error:
        return TargetFile(name=name, kind=kind_read, broken=error)
    return TargetFile(name=name, kind=kind_read, document=document)


def _is_path(value: str) -> bool:
    """Return True if a value can only be a file, not a script's keyword or a shell variable."""
    return "$" not in value and ("/" in value or "." in value)


def _is_dotted(name: str) -> bool:
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is not None and not name.endswith(".py")


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
    program = nearest(base, LAUNCHERS) if not suffix else None
    if program:
        near, folder = program, ""
    raise UserError(
        "target-missing",
        "there is no such file",
        found=name,
        why="check takes files, or a whole command such as accelerate launch train.py",
        fix=f"did you mean {os.path.join(folder, near)}?" if near else "name an existing file",
    )


def _placed(file: TargetFile, run: Targets) -> TargetFile:
    """Return a run's file with the line that names it, if that is in a file: --fix leaves it as it is."""
    by, line = file.named_by, run.line
    if by is None or by.place is not None or line is None:
        return file
    return replace(file, named_by=replace(by, place=line.place_of(by.text)))


def _broken_recipe(name: str, error: Unreadable) -> UserError:
    found = f"{name}:{error.line}: {error.problem}"
    return UserError(
        "recipe-unreadable", "the recipe can't be read", found=found, why=error.why, fix=error.fix
    )


def _unknown_program(program: OtherProgram) -> UserError:
    line = " ".join([program.name, *program.arguments[:3], *(["..."] if program.arguments[3:] else [])])
    name = program.name.partition(" ")[0]
    near = nearest(name, LAUNCHERS) if name not in LAUNCHERS else None
    return UserError(
        "unknown-program",
        "check does not know this program, and its line names no file to check",
        found=line,
        why="check knows accelerate launch, torchrun, deepspeed, python and zerofit launch",
        fix=f"did you mean {near}?" if near else "name the configurations and the script that it reads",
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
        why="check reads configurations of DeepSpeed and accelerate, recipes, scripts and launch lines",
        fix=fix,
    )
