"""A launch command as the user wrote it, and the kinds of launchers and routes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Route(StrEnum):
    """The library that reads the DeepSpeed configuration and fills in "auto" values."""

    ACCELERATE = "accelerate"
    """A script with Accelerator()."""
    TRAINER = "trainer"
    """A script with transformers' Trainer or a subclass."""
    NATIVE = "native"
    """A script that calls deepspeed.initialize()."""


class Launcher(StrEnum):
    """The launcher of the ranks."""

    ZEROFIT = "zerofit launch"
    ACCELERATE = "accelerate launch"
    DEEPSPEED = "deepspeed"
    TORCHRUN = "torchrun"
    PYTHON = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One command-line flag."""

    name: str
    """Without dashes, with underscores: zero_stage."""
    value: str | None
    """As written; None for a switch."""
    text: str
    """The flag and its value, verbatim: "--zero_stage 3"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The command line of a launcher, up to the script."""

    launcher: Launcher
    flags: tuple[Flag, ...]
    script: str | None
    """The script or module; None if there is none."""
    arguments: tuple[str, ...]
    """The script's own arguments."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables set at the start of the command line: VAR=value."""
    runner: str | None = None
    """The program that runs the launcher, such as srun."""

    def find(self, *names: str) -> Flag | None:
        """Return the flag of one of these names that takes effect: the last one."""
        return next((flag for flag in reversed(self.flags) if flag.name in names), None)
