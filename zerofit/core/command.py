"""A launch command as the user wrote it, and the kinds of launchers and routes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""The start of a shell's VAR=value."""
RANK_FOR_EACH_GPU = 0
"""A number of ranks per node: torchrun's `--nproc-per-node gpu`."""
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
RUN_LINES = (*SHELLS, "sbatch", "qsub", "bsub")
"""Commands that run a file of command lines."""
SHELL_SUFFIXES = (*(f".{shell}" for shell in SHELLS), ".sbatch", ".slurm", ".pbs", ".lsf")
_SHEBANG = re.compile(rf"#!\s*\S*/(env\s+)?({'|'.join(SHELLS)})\b".encode())


def is_literal(value: str | None) -> bool:
    """Return True if a value is literal: no shell variable, and no placeholder."""
    return value is not None and not any(sign in value for sign in "$<>{}`")


def is_truth(word: str) -> bool:
    """Return True for true, false and similar, which somebody may write after a switch."""
    return word.lower() in ("true", "false", "yes", "no", "1", "0")


def is_shell_script(name: str, data: bytes) -> bool:
    """Return True if a file is a shell script or a batch job, by its name or its first line."""
    return name.lower().endswith(SHELL_SUFFIXES) or _SHEBANG.match(data) is not None


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

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the line that it consists of."""
        if self.value is None or not self.text.endswith(f" {self.value}"):
            return (self.text,)
        return (self.text.removesuffix(f" {self.value}"), self.value)


class Refusal(StrEnum):
    """Why a launcher's parser refuses a flag."""

    UNKNOWN = "unknown"
    AMBIGUOUS = "ambiguous"
    """It abbreviates several flags."""
    NO_VALUE = "no value"
    NEEDLESS_VALUE = "needless value"
    """A switch with =VALUE."""
    WRONG_VALUE = "wrong value"
    NO_SCRIPT = "no script"
    """No flag, but the line: it starts nothing."""
    OTHER = "other"
    """The line as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFlag:
    """A flag that the launcher's parser refuses."""

    flag: Flag | None
    """None for the line as a whole."""
    why: Refusal
    message: str = ""
    """The parser's own words."""


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
    program: str = ""
    """The launcher as written: "torchrun", "python -m torch.distributed.launch"."""
    behind: LaunchCommand | None = None
    """The line of another launcher behind `zerofit launch`, whose flags are here as zerofit's."""
    own_flags: frozenset[str] = frozenset()
    """Names of the flags in front of that line."""
    refused: tuple[RefusedFlag, ...] = ()
    """Flags that the launcher's own parser refuses."""

    def find(self, *names: str) -> Flag | None:
        """Return the flag of one of these names that takes effect: the last one."""
        return next((flag for flag in reversed(self.flags) if flag.name in names), None)
