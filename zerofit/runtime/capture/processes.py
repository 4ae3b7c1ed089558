"""What a captured script starts: programs and processes that would train where nothing is seen of it."""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from zerofit.runtime.on_import import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LAUNCHERS = {"torchrun", "deepspeed", "mpirun", "mpiexec", "srun"}
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


def guard_processes(refuse: Callable[[str, str], Any]) -> None:
    """Have whatever would train in a process of its own refused, from now on.

    Left alone are programs that train nothing (git, nvidia-smi, a compiler) and worker processes of
    installed packages.

    Args:
        refuse: called with the kind and one line; does not return.
    """

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        words = _words(event, arguments)
        if words and starts_python_code(words):
            refuse("spawns", f"it starts another program: {shlex.join(words)}")

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


def _words(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """Return the command line that an audit event tells of; empty for any other event."""
    if event == "os.system":
        return _split(arguments[0])
    if event not in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        return []
    given = arguments[1]
    words = [given] if isinstance(given, (str, bytes, os.PathLike)) else list(given)
    return [os.fsdecode(word) for word in words]


def _split(text: str | bytes) -> list[str]:
    try:
        return shlex.split(os.fsdecode(text))
    except ValueError:  # an open quote
        return os.fsdecode(text).split()


def starts_python_code(words: Sequence[str]) -> bool:
    """Return whether a command line runs a launcher, or a Python file that no package brings."""
    if os.path.basename(words[0]) in ("sh", "bash", "dash") and "-c" in words[1:-1]:
        words = _split(words[list(words).index("-c") + 1])
    return any(_starts_here(words[place:]) for place in range(len(words)))


def _starts_here(words: Sequence[str]) -> bool:
    name = os.path.basename(words[0])
    if name in _LAUNCHERS:
        return True
    if name in ("accelerate", "zerofit"):
        return words[1:2] == ["launch"]
    if not name.startswith("python"):
        return False
    for place, word in enumerate(words[1:], start=1):
        if word == "-m":
            return words[place + 1 : place + 2] != [] and words[place + 1] in _LAUNCH_MODULES
        if word == "-c":
            return False
        if not word.startswith("-"):
            return word.endswith(".py") and not _is_installed(os.path.realpath(word))
    return False


def _is_spawned(process: Any) -> bool:
    """Whether a process begins as a new interpreter, in which none of the capture's hooks are."""
    method = getattr(process, "_start_method", None)
    return (method or multiprocessing.get_start_method()) != "fork"


def _is_the_scripts(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not _is_installed(os.path.realpath(file)))


def _is_installed(path: str) -> bool:
    return path.startswith((os.path.join(sys.prefix, ""), os.path.join(sys.base_prefix, "lib", "")))
