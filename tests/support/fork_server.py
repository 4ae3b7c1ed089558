"""Runs Python programs as forks of one process that has imported the libraries.

Most of a small launch is imports of torch, transformers and DeepSpeed: by zerofit, by the agent and by each
rank. Here they are imported once, before any thread or process group exists, and `python -m zerofit launch`,
its agent, accelerate's launcher, torchrun and the ranks under them are forks. All else is theirs: arguments,
environment, working folder, descriptors, sessions, parents, exit codes, torchrun's environment of each rank.
What is not: the interpreter's own start; modules are imported before the hooks, not after (_rebind); and what
libraries read of the environment when they are imported is the server's.

Started by forked_programs.py as `fork_server.py SOCKET`; ends when the last of its clients has gone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LAUNCHERS = (
    "zerofit",
    "zerofit.launching.agent",
    "accelerate.commands.launch",
    "torch.distributed.run",
)
"""Modules that start other programs: these are forks too. A script's own children are processes as always."""
_START_PROGRAM = subprocess.Popen._execute_child
_ARGUMENTS = (
    *("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo"),
    *("creationflags", "shell", "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"),
    *("restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)
"""Of _START_PROGRAM, which takes them by position (subprocess.py, Python 3.11 to 3.13)."""


class Spares:
    """Forks of a launcher, made before it has threads, each of which waits to become one of its ranks."""

    def __init__(self, number: int) -> None:
        self._waiting = [self._fork() for _ in range(number)]

    def _fork(self) -> tuple[int, socket.socket]:
        mine, its = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            mine.close()
            request = _receive(its)
            if request is None:  # the launcher has ended
                os._exit(0)
            its.close()
            _become(*request)
        its.close()
        return pid, mine

    def start(self, program: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """Let a fork become a program, and return its process id; None if none is left."""
        if not self._waiting:
            return None
        pid, channel = self._waiting.pop(0)
        with channel:
            send_program(channel, program, descriptors)
        return pid


_spares: Spares | None = None


def send_program(channel: socket.socket, program: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Send a program, and its descriptors, over a socket."""
    text = json.dumps(program).encode()
    socket.send_fds(channel, [len(text).to_bytes(4, "big")], descriptors)
    channel.sendall(text)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(channel, 4, 16)
    if not head:
        return None
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size:
        part = channel.recv(size - len(text))
        if not part:  # the peer has ended
            return None
        text += part
    return json.loads(text), descriptors


def _become(
    program: Mapping[str, Any], descriptors: Sequence[int], *, first: Callable[[], None] | None = None
) -> NoReturn:
    """Become a program in this process, a fork; the first three descriptors are its standard ones.

    Args:
        program: "command", the words after the interpreter; "cwd", "environment"; "kept", numbers of
            descriptors that it inherits as they are; "is_session", True if it leads a session of its own.
        descriptors: the standard ones.
        first: called before anything else.
    """
    code = 255
    try:
        if first is not None:
            first()
        _take_over(program, descriptors)
        code = _run(list(program["command"]))
        _end_threads_and_handlers()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code & 0xFF)


def _take_over(program: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    if program["is_session"]:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    _close_all_but(program["kept"])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["environment"])


def _close_all_but(kept: Sequence[int]) -> None:
    opened = [int(name) for name in os.listdir("/proc/self/fd")]
    for number in opened:
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(number)


def _run(command: list[str]) -> int:
    """Run a command's script or module as its main program; return the exit code."""
    global _spares
    sys.orig_argv = [sys.executable, *command]
    options = []
    while command[0].startswith("-") and command[0] != "-m":
        options.append(command.pop(0))
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    name = sys.argv[0]
    is_launcher = is_module and name in LAUNCHERS
    _open_streams(is_buffered="-u" not in options)
    is_safe = "-P" in options or os.environ.get("PYTHONSAFEPATH")
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(name))
    _set_path([] if is_safe else [folder])
    subprocess.Popen._execute_child = _start_fork if is_launcher else _START_PROGRAM
    _spares = Spares(_num_ranks(sys.argv)) if is_launcher and name != "zerofit" else None
    _use_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if not is_launcher:
            _run_sitecustomize()
        if is_module:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            _run_script(name)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_script(name: str) -> None:
    path = os.path.abspath(name)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = sys.modules["__main__"]
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    exec(code, main.__dict__)


def _num_ranks(arguments: Sequence[str]) -> int:
    """Return how many ranks a launcher's arguments ask for, at most: those of one node."""
    for flag in ("--num_processes", "--nproc_per_node", "--nproc-per-node"):
        for place, word in enumerate(arguments):
            if word == flag:
                return int(arguments[place + 1])
            if word.startswith(f"{flag}="):
                return int(word.partition("=")[2])
    return 1


def _open_streams(*, is_buffered: bool) -> None:
    """Give the program standard streams of its own: those of the server may hold text, and are buffered."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: Any = io.FileIO(number, "w" if number else "r", closefd=False)
        if number == 0:
            stream = io.BufferedReader(stream)
        elif is_buffered:
            stream = io.BufferedWriter(stream)
        text = io.TextIOWrapper(
            stream,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" and is_buffered,
            write_through=number > 0 and not is_buffered,
        )
        _redirect_handlers(getattr(sys, name), text)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _redirect_handlers(old: Any, new: Any) -> None:
    """Let the libraries' handlers of log lines, which hold the streams of the server, write to these."""
    import logging

    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if vars(handler).get("stream") is old:
                handler.stream = new


def _set_path(first: Sequence[str]) -> None:
    """Put the folder of the program, if any, and those of PYTHONPATH in front of the server's own path."""
    named = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*first, *named, *_OWN_PATH]
    sys.path_importer_cache.clear()


def _run_sitecustomize() -> None:
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and Path(folder, "sitecustomize.py").exists():
            sys.modules.pop("sitecustomize", None)
            import sitecustomize

            assert sitecustomize
            return


def _use_threads(number: int) -> None:
    import torch

    torch.set_num_threads(number)


def _end_threads_and_handlers() -> None:
    """End as the interpreter does: threads, then exit handlers."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
    atexit._run_exitfuncs()


def _start_fork(process: Any, *given: Any) -> None:
    """In place of Popen._execute_child: start a Python program as a fork."""
    asked = dict(zip(_ARGUMENTS, given, strict=True))
    command = python_command(asked["args"])
    # A fork of a process with threads has one of them, and whatever locks the others hold. Some are no
    # threads of Python: those of autograd, whose forks can't run backward passes.
    is_safe = len(os.listdir("/proc/self/task")) == 1
    can_be_spare = _spares is not None and not asked["pass_fds"] and asked["preexec_fn"] is None
    if command is None or not (is_safe or can_be_spare):
        _START_PROGRAM(process, *given)
        return
    standard = [
        asked[name] if asked[name] != -1 else number
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]
    program = {
        "command": command,
        "cwd": os.path.abspath(asked["cwd"] or os.getcwd()),
        "environment": dict(os.environ if asked["env"] is None else asked["env"]),
        "kept": list(asked["pass_fds"]),
        "is_session": asked["start_new_session"],
    }
    pid = _spares.start(program, standard) if _spares is not None and can_be_spare else None
    if pid is None and not is_safe:
        _START_PROGRAM(process, *given)
        return
    if pid is None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # a fork would write the same text again
        pid = os.fork()
        if pid == 0:
            _become(program, [os.dup(number) for number in standard], first=asked["preexec_fn"])
    process.pid = pid
    process._child_created = True
    process._close_pipe_fds(*(asked[name] for name in _ARGUMENTS if name[:3] in ("p2c", "c2p", "err")))


def python_command(command: Any) -> list[str] | None:
    """Return what stands behind the interpreter if a command is a program of this Python."""
    words = [os.fspath(word) for word in command] if isinstance(command, (list, tuple)) else []
    if len(words) < 2 or os.path.realpath(words[0]) != os.path.realpath(sys.executable):
        return None
    rest = words[1:]
    while rest and rest[0] in ("-u", "-P"):
        rest = rest[1:]
    return words[1:] if rest and (rest[0] == "-m" or not rest[0].startswith("-")) else None


def _install_rebinding() -> None:
    """Let a hook on a module's function act on all that have imported it by name, as if it had come first."""
    from zerofit.scripts import on_import

    when_imported = on_import.when_imported

    def rebinding(name: str, callback: Callable[[types.ModuleType], None]) -> None:
        def act(module: types.ModuleType) -> None:
            before = dict(vars(module))
            callback(module)
            _rebind(module, before)

        when_imported(name, act if name in sys.modules else callback)

    on_import.when_imported = rebinding


_places: dict[int, list[tuple[types.ModuleType, str]]] = {}
"""Modules that have a value, and the name under which they have it, by the value's id."""
_noted: set[str] = set()
"""Names of the modules in _places."""


def _note_places() -> None:
    """Note the values of all modules that are imported by now, so that no hook has to look through them."""
    for name in sys.modules.keys() - _noted:
        module = sys.modules[name]
        _noted.add(name)
        for own_name, value in list(getattr(module, "__dict__", {}).items()):
            _places.setdefault(id(value), []).append((module, own_name))


def _rebind(module: types.ModuleType, before: Mapping[str, Any]) -> None:
    _note_places()
    for name, old in before.items():
        new = vars(module).get(name)
        if new is old or getattr(old, "__module__", None) != module.__name__:
            continue
        for other, known_as in list(_places.get(id(old), ())):
            is_still = other is not module and vars(other).get(known_as) is old
            if is_still and not known_as.startswith("_zerofit"):
                setattr(other, known_as, new)
                _places.setdefault(id(new), []).append((other, known_as))


def _import_all() -> None:
    """Import the libraries, and zerofit, whose modules bind `when_imported` by name.

    Models of transformers are left out: a capture hooks their classes as they are defined.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    _install_rebinding()
    import accelerate.commands.launch
    import bitsandbytes
    import datasets
    import deepspeed
    import peft
    import torch.distributed.run
    import transformers.trainer_seq2seq

    import zerofit.cli.launch
    import zerofit.launching.agent
    import zerofit.scripts.capture.child.__main__
    import zerofit.training.runner

    assert all((accelerate, bitsandbytes, datasets, deepspeed, peft, torch, transformers, zerofit))


class _Server:
    """Takes requests of clients, and tells each how its program ended."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{address}.new")
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: set[socket.socket] = set()
        self._channels: dict[int, tuple[int, socket.socket]] = {}
        os.rename(f"{address}.new", address)

    def serve(self) -> None:
        """Serve until all clients have gone, then remove the folder of the address."""
        has_clients = False
        while not has_clients or self._clients:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    client, _ = self._listener.accept()
                    self._clients.add(client)
                    self._selector.register(client, selectors.EVENT_READ)
                    has_clients = True
                elif isinstance(key.fileobj, socket.socket):
                    self._answer(key.fileobj)
                else:
                    self._end(key.fd)

    def _answer(self, client: socket.socket) -> None:
        request = _receive(client)
        if request is None:
            self._selector.unregister(client)
            self._clients.discard(client)
            client.close()
            for pid, owner in self._channels.values():
                if owner is client:  # whoever asked for the program has ended before it
                    os.kill(pid, signal.SIGTERM)
            return
        program, descriptors = request
        pid = os.fork()
        if pid == 0:
            _become(program, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        watch = os.pidfd_open(pid)
        self._channels[watch] = (pid, client)
        self._selector.register(watch, selectors.EVENT_READ)
        client.sendall(json.dumps({"pid": pid}).encode() + b"\n")

    def _end(self, watch: int) -> None:
        pid, client = self._channels.pop(watch)
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            client.sendall(json.dumps({"exit_code": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def _ask_cpu_once() -> None:
    """Let all forks have one description of the CPU.

    Each rank asks py-cpuinfo for it twice when DeepSpeed loads an op, by a process: 1.6 s each time.
    """
    with contextlib.suppress(ImportError):
        import cpuinfo

        found = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: dict(found)


def main(address: str) -> None:
    """Import, and serve."""
    _import_all()
    _ask_cpu_once()
    _note_places()
    gc.collect()
    gc.freeze()  # the forks' collections leave the libraries' objects, and their pages, alone
    _Server(address).serve()
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)


_OWN_PATH = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]

if __name__ == "__main__":
    main(sys.argv[1])
