"""What a captured script starts: programs and processes that would train, lose files or upload, unseen.

What is told of a program is its command line. What it can't tell is let be: what `python -c` or a program on
standard input does, programs that are compiled, and words that a shell works out itself.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
import os
import re
import shlex
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from zerofit.scripts.capture.child.command_lines import (
    Program,
    programs_in,
    programs_of,
    shell_file,
    shell_text,
)
from zerofit.scripts.capture.child.installed import innermost, installed_folders
from zerofit.scripts.capture.child.native_files import tell_of_write
from zerofit.scripts.capture.child.programs import is_upload, lost_by, overwritten_by
from zerofit.scripts.on_import import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LAUNCHERS = {
    *("torchrun", "deepspeed", "ds", "accelerate-launch", "horovodrun"),
    *("mpirun", "mpiexec", "srun", "sbatch", "qsub", "bsub"),
}
_LAUNCH_MODULES = {
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed.launcher.runner",
    "torch.distributed.launch",
    "torch.distributed.run",
    "zerofit",
}
_TORCH_SPAWN = "torch.multiprocessing.spawn"
"""Module of what torch.multiprocessing.spawn and its start_processes run."""


class FileWatch(Protocol):
    """Who refuses, and knows which files are the user's."""

    def refuse(self, kind: str, message: str) -> NoReturn:
        """End this process, with one line that says why."""

    def before_loss(self, path: str, verb: str) -> None:
        """Refuse what would remove or rename a file or folder of the user's."""


def guard_processes(watch: FileWatch) -> None:
    """Have whatever would train in a process of its own, lose files or upload refused, from now on.

    Left alone are programs that do nothing of that (nvidia-smi, a compiler) and worker processes of installed
    packages. What they are known to overwrite is told as if this process did.

    Args:
        watch: who refuses.
    """
    refuse = watch.refuse

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        line, programs = _told(event, arguments)
        for program in programs:
            if trains(program):
                refuse("spawns", f"it starts another program: {line}")
            if is_upload(program):
                refuse("uploads", f"it starts another program: {line}")
            for path, verb in lost_by(program):
                watch.before_loss(path, verb)
            for path in overwritten_by(program):
                tell_of_write(path)

    start: Any = multiprocessing.process.BaseProcess.start

    def checked(process: Any) -> Any:
        target = getattr(process, "_target", None)
        module = getattr(target, "__module__", "") or ""
        if module == _TORCH_SPAWN:
            refuse("spawns", "it starts its own ranks by torch.multiprocessing")
        if _is_spawned(process) and _is_the_scripts(module):
            name = getattr(target, "__qualname__", "its own code")
            refuse("spawns", f"it runs {name}() in a process that it starts anew")
        return start(process)

    sys.addaudithook(hear)
    base: Any = multiprocessing.process.BaseProcess
    base.start = checked
    when_imported("torch.distributed.launcher.api", lambda module: _guard_elastic(module, refuse))
    when_imported("accelerate.accelerator", lambda module: _guard_forks(module.Accelerator, refuse))


def _guard_elastic(module: Any, refuse: Callable[[str, str], Any]) -> None:
    """Have torchrun's own function refused; accelerate's notebook_launcher calls it."""

    def launch_agent(*_: Any, **__: Any) -> None:
        refuse("spawns", "it starts its own ranks by torch.distributed")

    module.launch_agent = launch_agent


def _guard_forks(accelerator_class: Any, refuse: Callable[[str, str], Any]) -> None:
    """Have training refused in a process that the script forked: only its own is stopped in time."""
    captured = os.getpid()

    def checked(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != captured:
                refuse("spawns", "it trains in a process that it forks")
            return original(*args, **kwargs)

        return call

    for name in ("prepare_model", "backward"):
        setattr(accelerator_class, name, checked(getattr(accelerator_class, name)))


def _told(event: str, arguments: tuple[Any, ...]) -> tuple[str, tuple[Program, ...]]:
    """Return the command line that an audit event tells of, and its programs; none for any other event."""
    if event == "os.system":
        text = os.fsdecode(arguments[0])
        return text, programs_in(text, cwd=os.getcwd())
    if event not in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        return "", ()
    given = arguments[1]
    parts = [given] if isinstance(given, (str, bytes, os.PathLike)) else list(given)
    words = [os.fsdecode(part) for part in parts]
    if not words:
        return "", ()
    cwd = os.getcwd()
    if event == "subprocess.Popen" and arguments[2] is not None:
        cwd = os.path.join(cwd, os.fsdecode(arguments[2]))
    in_shell = shell_text(Program(words=tuple(words), cwd=cwd))
    return in_shell or shlex.join(words), programs_of(words, cwd=cwd)


def trains(program: Program) -> bool:
    """Return whether a program is a launcher, or runs code that no package brings."""
    if program.name in _LAUNCHERS:
        return True
    if program.name in ("accelerate", "zerofit"):
        return program.words[1:2] == ("launch",)
    if re.fullmatch(r"python[\d.]*w?|pypy[\d.]*", program.name):
        return _python_trains(program)
    file = shell_file(program) or (program.words[0] if "/" in program.words[0] else None)
    return file is not None and _is_own_script(os.path.join(program.cwd, file))


def _python_trains(program: Program) -> bool:
    words = list(program.words[1:])
    while words:
        word = words.pop(0)
        if word == "--check-hash-based-pycs":
            words = words[1:]
        elif word == "-" or word.startswith("--"):
            return False
        elif word.startswith("-"):
            letter = re.search("[cmWX]", word[1:])
            if letter is None:
                continue
            value = word[1 + letter.end() :] or (words.pop(0) if words else "")
            if letter[0] == "m":
                return _module_trains(value, words, program.cwd)
            if letter[0] == "c":
                return False
        else:
            file = os.path.join(program.cwd, word)
            launcher = Program(words=(word, *words), cwd=program.cwd)
            return not _is_installed(os.path.realpath(file)) or trains(launcher)
    return False


def _module_trains(module: str, arguments: Sequence[str], cwd: str) -> bool:
    if module in _LAUNCH_MODULES:
        return module != "zerofit" or list(arguments[:1]) == ["launch"]
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return False
    spec = PathFinder.find_spec(top, [cwd, *sys.path])
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    return not places or any(place and not _is_installed(os.path.realpath(place)) for place in places)


def _is_own_script(path: str) -> bool:
    """Whether a file is a text that a shell or an interpreter runs, and no installed one."""
    whole = os.path.realpath(path)
    if not os.path.isfile(whole) or _is_installed(whole):
        return False
    with contextlib.suppress(OSError), open(whole, "rb") as file:
        return b"\0" not in file.read(256)
    return False


def _is_spawned(process: Any) -> bool:
    """Whether a process begins as a new interpreter, in which none of the capture's hooks are."""
    method = getattr(process, "_start_method", None)
    return (method or multiprocessing.get_start_method()) != "fork"


def _is_the_scripts(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not _is_installed(os.path.realpath(file)))


def _is_installed(path: str) -> bool:
    return innermost(path, installed_folders()) > 0
