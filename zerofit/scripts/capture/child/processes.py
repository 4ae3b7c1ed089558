"""Guards processes that a captured script starts, which could train, delete files or upload unobserved.

Programs on a short list of harmless ones are allowed, all others are refused. `python -c` is allowed without
inspection; like most programs, it is confined by the kernel where Landlock is available.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing.process
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.scripts.capture.child.file_calls import WILL_MAKE
from zerofit.scripts.capture.child.outcome import is_own_code
from zerofit.scripts.on_import import around, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.scripts.capture.child.confinement import Confinement

_HARMLESS = """
    [ : arp cat cd date df dpkg du echo egrep false file free grep head hostname id ifconfig ip ldconfig ldd
    ls lsb_release lscpu lspci netstat nproc objdump printf ps pwd readelf sleep stty tail test
    tput true uname wc whereis which whoami
    amd-smi cuobjdump hl-smi npu-smi nvdisasm nvidia-smi rocm-smi rocminfo xpu-smi
"""
"""Programs that only read.

ASSUMPTION: what scripts and libraries start before training, found by reading torch 2.13, DeepSpeed 0.19,
accelerate 1.15, datasets 5 and the standard library.
"""
_MAKERS = ("mkdir", "touch")
"""Programs that make what their arguments name."""
_COMPILERS = "ar as c++ cc clang clang++ g++ gcc hipcc ld ninja nvcc ptxas"
"""Programs that write the files that their arguments name, for torch, Triton and DeepSpeed."""
_HARMLESS_OF_GIT = {
    "cat-file",
    "config",
    "describe",
    "diff",
    "log",
    "ls-files",
    "ls-remote",
    "remote",
    "rev-list",
    "rev-parse",
    "show",
    "status",
    "symbolic-ref",
    "version",
}
_HARMLESS_ARGUMENTS = {
    "numactl": {"--hardware", "-H", "--show"},
    "openssl": {"sha512"},
    "pacman": {"-Q"},
    "rpm": {"-q"},
}
"""Programs that only read if this is their first argument, as DeepSpeed calls them (0.19: ops/op_builder,
utils/numa.py), and torch.compile (2.13: torch/_inductor/codecache.py)."""
_FOLDER_AT = 3
"""Position of the working folder among the arguments of subprocess._fork_exec after the first."""
_COMPILER = re.compile(r"(?:\w+-linux-gnu-)?([a-z+]+)(?:-\d+)?")
"""Debian's compiler names: x86_64-linux-gnu-gcc-12 is gcc."""
_HARMLESS_MODULES = {"joblib", "json", "pip", "platform"}
"""Packages that `python -m` may run."""
_HARMLESS_FILES = ("/torch/_inductor/", "/cpuinfo/cpuinfo.py")
"""Parts of the paths of torch's programs for parallel compilation, and of py-cpuinfo, which runs itself when
DeepSpeed loads its CPU Adam (0.19: ops/op_builder/builder.py, cpu_arch)."""
_SHELLS = {"sh", "bash", "dash"}
_SILENCED = re.compile(r"(?:[12&]?>\s*/dev/null|2>&1)(?=\s|$)")
_TORCH_SPAWN = "torch.multiprocessing.spawn"
"""Module of the function that torch.multiprocessing.spawn and start_processes run."""


def guard_processes(refuse: Callable[[str, str], Any], confinement: Confinement) -> None:
    """Refuse from now on any subprocess that could train, lose files or upload.

    Worker processes of installed packages are allowed.

    Args:
        refuse: ends this process; its arguments are the kind of failure and the reason in one line.
        confinement: confines the programs that are started by subprocess, os.system and os.posix_spawn.
    """

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        words = _command_line(event, arguments)
        if words and not is_harmless(words):
            shown = words[2] if _is_shell_text(words) else shlex.join(words)
            refuse("spawns", f"it starts another program: {shown}")

    @around(multiprocessing.process.BaseProcess, "start")
    def checked(start: Any, process: Any) -> Any:
        target = getattr(process, "_target", None)
        module = getattr(target, "__module__", "") or ""
        if module == _TORCH_SPAWN:
            refuse("spawns", "it starts its own ranks by torch.multiprocessing")
        if _is_spawned(process) and _is_of_script(module):
            name = getattr(target, "__qualname__", "its own code")
            refuse("spawns", f"it runs {name}() in a new interpreter process")
        return start(process)

    sys.addaudithook(on_event)
    _confine(confinement)
    when_imported("torch.distributed.launcher.api", lambda module: _guard_elastic(module, refuse))
    when_imported("accelerate.accelerator", lambda module: _guard_forks(module.Accelerator, refuse))


def _confine(confinement: Confinement) -> None:
    def start(words: list[str], folder: str, function: Callable[[], Any]) -> Any:
        if not _writes_files(words):
            return confinement.inside(function)
        return confinement.outside(_report_and_start, words, folder, function)

    @around(subprocess, "_fork_exec")
    def fork_exec(original: Any, arguments: Any, *others: Any) -> Any:
        words = [os.fsdecode(word) for word in arguments]
        folder = os.fsdecode(others[_FOLDER_AT] or ".")
        return start(words, folder, functools.partial(original, arguments, *others))

    for name in ("system", "posix_spawn", "posix_spawnp"):

        @around(os, name)
        def spawn(original: Any, *args: Any, **kwargs: Any) -> Any:
            event = "os.system" if original.__name__ == "system" else "os.posix_spawn"
            given = args or tuple(kwargs.values())
            sys.audit(event, *given)  # in this thread, where the script's line is found
            return start(_command_line(event, given), ".", functools.partial(original, *args, **kwargs))


def _report_and_start(words: list[str], folder: str, function: Callable[[], Any]) -> Any:
    """Raise the audit events of what a program is about to write, as its arguments say, and start it."""
    for command in _commands(words[2]) if _is_shell_text(words) else [words]:
        paths = [os.path.join(folder, word) for word in command[1:] if not word.startswith("-")]
        is_mkdir, is_touch = (os.path.basename((*command, "")[0]) == maker for maker in _MAKERS)
        if is_mkdir:
            for path in paths:
                for place in (*reversed(Path(path).parents), path):
                    sys.audit("os.mkdir", str(place), 0o777, -1)
        outputs = [os.path.join(folder, to) for flag, to in itertools.pairwise(command) if flag == "-o"]
        for path in paths if is_touch else () if is_mkdir else outputs:
            sys.audit(WILL_MAKE, path)
    return function()


def _guard_elastic(module: Any, refuse: Callable[[str, str], Any]) -> None:
    """Refuse torchrun's own function, which accelerate's notebook_launcher calls."""

    def launch_agent(*_: Any, **__: Any) -> None:
        refuse("spawns", "it starts its own ranks by torch.distributed")

    module.launch_agent = launch_agent


def _guard_forks(accelerator_class: Any, refuse: Callable[[str, str], Any]) -> None:
    """Refuse training in a process forked by the script: only the main one is stopped in time."""
    captured = os.getpid()

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() != captured:
            refuse("spawns", "it trains in a forked process")
        return original(*args, **kwargs)

    for name in ("prepare_model", "backward"):
        around(accelerator_class, name)(call)


def _command_line(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """Return the command line in an audit event; empty for other events."""
    if event == "os.system":
        return ["sh", "-c", os.fsdecode(arguments[0])]
    if event not in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        return []
    given = arguments[1]
    parts = [given] if isinstance(given, (str, bytes, os.PathLike)) else list(given)
    return [os.fsdecode(part) for part in parts]


def is_harmless(words: list[str]) -> bool:
    """Return True if a command line is known to train nothing, lose no file and send nothing."""
    name = os.path.basename(words[0])
    if _is_shell_text(words):
        return _is_harmless_text(words[2])
    if name == "git":
        return len(words) > 1 and words[1].removeprefix("--") in _HARMLESS_OF_GIT
    if re.fullmatch(r"python[\d.]*", name):
        return _is_harmless_python(words)
    if name == "env":  # with further arguments, it runs another program
        return len(words) == 1
    if name in _HARMLESS_ARGUMENTS:
        return len(words) > 1 and words[1] in _HARMLESS_ARGUMENTS[name]
    return name in _HARMLESS.split() or _writes_files(words) or words[1:] == ["--version"]


def _writes_files(words: list[str]) -> bool:
    """Return True if a harmless command line writes the files that its arguments name."""
    if _is_shell_text(words):
        return any(_writes_files(command) for command in _commands(words[2]) if command)
    name = os.path.basename(words[0])
    plain = _COMPILER.fullmatch(name)
    return name in _MAKERS or (plain[1] if plain else name) in _COMPILERS.split()


def _is_shell_text(words: list[str]) -> bool:
    return os.path.basename(words[0]) in _SHELLS and len(words) == 3 and words[1] == "-c"


def _is_harmless_text(text: str) -> bool:
    """Return True if a shell command only runs harmless programs, and writes no files."""
    plain = _SILENCED.sub(" ", text)
    if re.search(r"[<>`]|\$\(", plain):
        return False
    try:
        return all(is_harmless(words) for words in _commands(plain) if words)
    except ValueError:  # a quote around one of these
        return False


def _commands(text: str) -> list[list[str]]:
    return [shlex.split(part) for part in re.split(r"[;&|\n]+", text)]


def _is_harmless_python(words: list[str]) -> bool:
    for word, following in itertools.pairwise((*words[1:], "")):
        if word in ("-c", "-V", "--version"):
            return True
        if word.startswith("-m"):
            return (word[2:] or following).partition(".")[0] in _HARMLESS_MODULES
        if not word.startswith("-"):
            return any(path in word for path in _HARMLESS_FILES)
    return False


def _is_spawned(process: Any) -> bool:
    """Return True if a process starts as a new interpreter, which has none of the capture's hooks."""
    method = getattr(process, "_start_method", None)
    return (method or multiprocessing.get_start_method()) != "fork"


def _is_of_script(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and is_own_code(file))
