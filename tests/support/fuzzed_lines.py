"""Command lines drawn by a seed from all verbs, their flags and hostile values, each run by itself."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import click

LIMIT_S = 60
"""CPU time of a line's process, and of that and the processes that it waited for."""
_WALL_LIMIT_S = 10.0 * LIMIT_S
"""Time of a line that waits for something; a busy machine may give it a tenth of a core."""
_GROUPS = ("runs", "bench")
_DRY = ("launch", "tune", "submit", "generate", "bench", "config")
"""Verbs that start or write something, with --dry-run in each line."""
_NEVER = ("--calibrate", "--show-completion", "--follow", "-f", "--fix", "--help", "-h", "--yes", "--capture")
_VALUES = (
    *("0", "1", "-1", "3.5", "1e999", "nan", "9" * 5000, "0x10", "", " ", "auto", "none", "true"),
    *("gpt2", "1xA100-40G", "8xH100", "999999xH100", "16G", "1e5T", "bf16", "adamw", "z3", "cpu", "nvme"),
    *("train.py", "here.json", "here.yaml", "here.log", "run", "nowhere", "nowhere.py", ".", "..", "/", "-"),
    *(
        "bad\udcff\udcfe",
        "x" * 300,
        "x/" * 3000,
        "a\nb",
        "\x1b[31m",
        "\u202e",
        "é日本",
        "~",
        "~nobody/x",
        "$HOME",
    ),
    *(
        "--",
        "---",
        "=",
        "a=b",
        "[1,2",
        "{}",
        '{"a": 1}',
        "a,b",
        ":",
        "h:1",
        "s3://b:/d",
        "00:00:00",
        "/dev/null",
    ),
    *("/proc/self/mem", "/proc/1/root", "/dev/full", "here.zip", "loop", "deep.json", "empty", "binary"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a line ended."""

    code: int
    """Negative after a signal: -SIGXCPU or -SIGKILL after a time limit."""
    errors: str
    cpu_s: float
    """Of its process and those that it waited for."""
    wall_s: float
    left: tuple[str, ...]
    """Names of files in the folder that were not there before."""

    def faults(self) -> list[str]:
        """Return what must not happen, in words."""
        found = [f"files left: {self.left}"] if self.left else []
        if "Traceback (most recent call last)" in self.errors:
            found.append(self.errors[-1500:])
        if self.cpu_s >= LIMIT_S or self.wall_s >= _WALL_LIMIT_S:
            found.append(f"no end: {self.cpu_s:.0f} s of CPU time, {self.wall_s:.0f} s")
        elif self.code not in (0, 1, 2, 130, 141):
            found.append(f"exit code {self.code}")
        return found


def lines(seed: int, count: int) -> Iterator[tuple[str, ...]]:
    """Yield command lines."""
    random = Random(seed)
    verbs = list(_verbs())
    for _ in range(count):
        yield _line(random, *random.choice(verbs))


def _verbs() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    from zerofit.cli.main import zerofit

    context = click.Context(zerofit)
    for name in zerofit.list_commands(context):
        command = zerofit.get_command(context, name)
        if isinstance(command, click.Group):
            yield from (((name, inner), command.commands[inner]) for inner in command.commands)
        elif command is not None:
            yield (name,), command


def _line(random: Random, words: tuple[str, ...], command: click.Command) -> tuple[str, ...]:
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    drawn = list(words)
    if words[0] in _DRY and any("--dry-run" in option.opts for option in options):
        drawn.append("--dry-run")
    if words[0] in ("plan", "launch", "tune", "submit") and random.random() < 0.7:
        drawn += (
            ["--model", random.choice(("gpt2", "qwen2.5-0.5b"))] if words[0] == "plan" else ["--no-capture"]
        )
    for option in random.sample(options, min(len(options), random.randrange(5))):
        name = random.choice(option.opts)
        if name in _NEVER or option.is_eager:
            continue
        drawn.append(name)
        if not option.is_flag and random.random() < 0.9:
            drawn += [_value(random, option) for _ in range(max(1, option.nargs))]
    drawn += [random.choice(_VALUES) for _ in range(random.randrange(4))]
    rest = drawn[len(words) :]
    if random.random() < 0.1 and words[0] not in _DRY:
        random.shuffle(rest)
    return (*words, *rest)


def _value(random: Random, option: click.Option) -> str:
    choices = getattr(option.type, "choices", None)
    if choices and random.random() < 0.5:
        return str(random.choice([*choices]))
    return random.choice(_VALUES)


def make_folder(folder: Path) -> None:
    """Write the files that lines name."""
    (folder / "train.py").write_text("import accelerate_that_is_not_there\n")
    (folder / "here.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    (folder / "here.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n")
    (folder / "here.log").write_text("Traceback (most recent call last):\nKeyError: '\x1b]0;x\x07'\n")
    (folder / "here.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 10)
    (folder / "loop").symlink_to("loop")
    (folder / "run").mkdir()
    (folder / "run" / "plan.json").write_text("{")
    (folder / "run" / "command.sh").write_text("")


def run_line(line: tuple[str, ...], folder: Path) -> Ended:
    """Run a line in a fork of this process, in a folder."""
    return _run(folder, lambda: _be_zerofit(line))


def run_process(line: tuple[str, ...], folder: Path) -> Ended:
    """Run a line as a process of its own, in a folder."""
    return _run(folder, lambda: os.execv(sys.executable, [sys.executable, "-P", "-m", "zerofit", *line]))


def _run(folder: Path, act: Callable[[], object]) -> Ended:
    """Fork, and return how the fork ended, which acts in a folder."""
    before, errors = set(_names(folder)), folder.parent / "errors"
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _enter(folder, errors)
            act()
        finally:
            os._exit(99)
    code, cpu_s = _wait(pid, began + _WALL_LIMIT_S)
    return Ended(
        code=code,
        errors=errors.read_text(encoding="utf-8", errors="replace"),
        cpu_s=cpu_s,
        wall_s=time.monotonic() - began,
        left=tuple(sorted(set(_names(folder)) - before)),
    )


def _enter(folder: Path, errors: Path) -> None:
    """Make this process one of its own session, in a folder, with limits and without a terminal."""
    os.setsid()
    os.chdir(folder)
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, flags), number)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    caches = str(folder.parent / "cache")
    os.environ.update({"XDG_CACHE_HOME": caches, "HF_HOME": caches, "HF_HUB_OFFLINE": "1"})
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))


def _names(folder: Path) -> Iterator[str]:
    for at, folders, files in os.walk(folder):
        yield from (os.path.join(at, name) for name in (*folders, *files) if name != "__pycache__")


def _be_zerofit(line: tuple[str, ...]) -> None:
    """Run the line and exit; this process is a fork."""
    code = 99
    try:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
        )
        sys.argv = ["zerofit", *line]
        from zerofit.cli.main import main

        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, until: float) -> tuple[int, float]:
    """Return the exit code of a process, and the CPU time of it and of those that it waited for."""
    ended = 0
    while not ended and time.monotonic() < until:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if not ended:
            time.sleep(0.005)
    if not ended:
        os.killpg(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
