"""The program that a command line runs, behind env, srun, uv run and similar."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.command import ASSIGNMENT, RUN_LINES, SHELL_SUFFIXES, SHELLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PYTHON = re.compile(r"python(\d+(\.\d+)?)?t?$")
LAUNCHERS = ("accelerate", "zerofit", "accelerate-launch", "torchrun", "deepspeed", "deepspeed.pt")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_WRAPPERS = ("nohup", "time", "exec", "setsid", "command")
"""Commands that run the rest of the line unchanged."""
CONTAINERS = ("docker", "podman", "apptainer", "singularity")
RUNNERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("srun", "mpirun", "mpiexec", "numactl", "timeout", "nice", "taskset", "stdbuf"), ()),
    **dict.fromkeys(("sudo", "ionice", "ibrun", "jsrun", "ssh", "uvx"), ()),
    **dict.fromkeys(("uv", "poetry", "pipenv", "pdm", "hatch", "rye", "pixi"), ("run",)),
    **dict.fromkeys(("conda", "mamba", "micromamba"), ("run",)),
    **dict.fromkeys(CONTAINERS, ("run", "exec")),
    "kubectl": ("exec",),
    "nsys": ("profile", "launch"),
}
"""Commands with flags of their own before the command to run, and their subcommands that run one."""
_NAMING_WORDS = """
    -n --name -p --prefix -J --job-name -A --account --with --extra --group --package --env --network
    --container-name --hostname -w --workdir --project
    """
_NAMING = frozenset(_NAMING_WORDS.split())
"""Flags of these commands whose value may look like a launcher."""
_ENV_WITH_VALUE = ("-u", "--unset", "-C", "--chdir")
_TRAINERS = """
    llamafactory-cli train|lmf train|swift sft|swift pt|swift rlhf|axolotl train
    |trl sft|trl dpo|trl kto|trl grpo|trl rloo|trl reward|trl orpo|trl cpo|trl ppo
    """
_OF_TRAINER = frozenset(" ".join(line.split()) for line in _TRAINERS.split("|"))
"""Programs that give their recipe, or their flags, to a Trainer."""
_MODULES_OF_TRAINERS = {
    "axolotl.cli.train": "axolotl train",
    "llamafactory.cli": "llamafactory-cli train",
    "llamafactory.launcher": "llamafactory-cli train",
    "swift.cli.sft": "swift sft",
    "swift.cli.pt": "swift pt",
    "swift.cli.rlhf": "swift rlhf",
    "trl.scripts.sft": "trl sft",
    "trl.scripts.dpo": "trl dpo",
    "trl.scripts.kto": "trl kto",
    "trl.scripts.grpo": "trl grpo",
    "trl.scripts.rloo": "trl rloo",
    "trl.scripts.reward": "trl reward",
}
"""Modules, or files of these names, that a launcher can start in place of the program."""
AXOLOTL, LLAMA_FACTORY, SWIFT = "axolotl", "llamafactory-cli", "swift"
_FORMER_NAMES = {
    "llamafactory-cli": ("overwrite_output_dir", "logging_dir"),
    "lmf": ("overwrite_output_dir", "logging_dir"),
    "swift": ("overwrite_output_dir", "logging_dir", "group_by_length"),
}
"""Former fields of TrainingArguments that these programs still take.

Source: src/llamafactory/hparams/training_args.py of LLaMA-Factory, swift/trainers/arguments.py of ms-swift
"""
WORDS_OF_SWIFT = ("fsdp", "fsdp_config")
"""Fields of TrainingArguments to which ms-swift gives values of its own: swift sft --fsdp fsdp2."""
_TAKEN_BY_ALL = ("warmup_ratio",)
"""The field that transformers removed last: the programs pin an earlier release, or replace it."""
_OTHER_WORDS = "llamafactory-cli lmf trl axolotl swift tune xtuner composer litgpt"
_OTHERS = frozenset(_OTHER_WORDS.split())
"""Programs that train, and that check does not know."""

_TOOLS = ("pip", "venv", "virtualenv", "ensurepip", "pytest", "http", "json", "site", "build", "ipykernel")
"""Modules that train nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProgram:
    """A program whose flags check does not know, and its arguments."""

    name: str
    """With its subcommand: "trl sft"."""
    arguments: tuple[str, ...]
    is_trainer: bool
    """True if what it reads are TrainingArguments."""

    @property
    def package(self) -> str:
        """The program without its subcommand."""
        return self.name.partition(" ")[0]


def former_names_of(package: str) -> frozenset[str]:
    """Return the former fields of TrainingArguments that a program still takes."""
    return frozenset((*_TAKEN_BY_ALL, *_FORMER_NAMES.get(package, ())))


def program_of(word: str) -> str:
    """Return the name of a program without its folder."""
    return word.rpartition("/")[2]


def without_wrappers(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before a command, VAR=value, `env`, `srun --nodes 2` and similar, and the command."""
    rest = list(words)
    while rest:
        program = program_of(rest[0])
        if ASSIGNMENT.match(rest[0]) or rest[0] in _WRAPPERS:
            rest = rest[1:]
        elif program == "env":
            rest = rest[1:]
            while rest and rest[0].startswith("-"):
                rest = rest[2 if rest[0] in _ENV_WITH_VALUE else 1 :]
        elif program in RUNNERS and _is_running(program, rest):
            rest = _behind_runner(rest)
        else:
            break
    return list(words[: len(words) - len(rest)]), rest


def _is_running(program: str, words: list[str]) -> bool:
    """Return True unless the line's subcommand runs nothing, as in conda install."""
    subcommands = RUNNERS[program]
    return not subcommands or any(word in subcommands for word in words[1:3])


def _behind_runner(words: list[str]) -> list[str]:
    """Return the command that a runner starts; empty if that is none that check knows."""
    for number in range(1, len(words)):
        if words[number - 1] not in _NAMING and _starts_command(words[number]):
            return words[number:]
    return []


def _starts_command(word: str) -> bool:
    program = program_of(word)
    is_known = program in LAUNCHERS or program in _OTHERS or program in SHELLS
    return is_known or PYTHON.match(program) is not None


def script_of_runner(words: Sequence[str]) -> list[str]:
    """Return the script that `uv run` starts itself, with its arguments; empty for any other line."""
    behind = [word for word in words if not ASSIGNMENT.match(word)]
    if len(behind) < 3 or program_of(behind[0]) != "uv" or "run" not in behind[1:3]:
        return []
    begin = next((number for number, word in enumerate(behind) if word.endswith(".py")), None)
    return [] if begin is None else behind[begin:]


def other_program(words: Sequence[str]) -> OtherProgram | None:
    """Return the program of a line that trains by its own flags; None for any other line."""
    _, rest = without_wrappers(words)
    if not rest:
        return None
    program = program_of(rest[0])
    if program in _OTHERS or (program in ("accelerate", "zerofit") and rest[1:2] != ["launch"]):
        return _other(program, rest[1:])
    return None


def program_of_module(script: str, arguments: Sequence[str]) -> OtherProgram | None:
    """Return the program whose module, or its file, a launcher starts; None for any other script."""
    module = script.removesuffix(".py").replace("/", ".")
    for name, program in _MODULES_OF_TRAINERS.items():
        is_other = name == "llamafactory.cli" and arguments[:1] != ["train"]
        if f".{module}".endswith(f".{name}") and not is_other:
            return OtherProgram(name=program, arguments=tuple(arguments), is_trainer=True)
    return None


def unknown_program(words: Sequence[str]) -> OtherProgram:
    """Return a line's first word as a program."""
    _, rest = without_wrappers(words)
    program, *arguments = rest or words
    return _other(program, arguments)


def _other(program: str, words: Sequence[str]) -> OtherProgram:
    has_subcommand = bool(words) and re.fullmatch(r"[a-z][\w-]*", words[0]) is not None
    name = f"{program} {words[0]}" if has_subcommand else program
    return OtherProgram(name=name, arguments=tuple(words[has_subcommand:]), is_trainer=name in _OF_TRAINER)


def text_of_shell(words: Sequence[str]) -> str | None:
    """Return the text that a line hands to a shell, as bash -c TEXT does; None for any other line."""
    _, rest = without_wrappers(words)
    if not rest or program_of(rest[0]) not in SHELLS:
        return None
    for flag, text in itertools.pairwise(rest[1:]):
        if not flag.startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c", flag):
            return text
    return None


def variable_as_command(words: Sequence[str]) -> str | None:
    """Return the variable that stands for a line's command, or for Python's script; None for any other line.

    Behind srun, which has flags of its own, it is the first variable that is no flag's value.
    """
    before, rest = without_wrappers(words)
    if rest and PYTHON.match(program_of(rest[0])):
        rest = rest[1:]
    elif not rest and any(program_of(word) == "srun" for word in before):
        pairs = itertools.pairwise(before)
        rest = [word for last, word in pairs if word.startswith("$") and not re.fullmatch(r"--?[^=]+", last)]
    match = _VARIABLE.fullmatch(rest[0]) if rest else None
    return None if match is None else match[1]


def is_launch_line(words: Sequence[str]) -> bool:
    """Return True for a line that check can read something of, and False for cd, echo, pip install ..."""
    _, rest = without_wrappers(words)
    if not rest:
        return bool(script_of_runner(words))
    program = program_of(rest[0])
    if program in ("accelerate", "zerofit"):
        return rest[1:2] == ["launch"] and len(rest) > 2
    if PYTHON.match(program):
        return any(word.endswith(".py") for word in rest[1:]) or _runs_launcher(rest)
    is_asking = set(rest[1:]) <= {"--version", "--help", "-h", "-v"}
    is_launcher = program in LAUNCHERS and not is_asking
    return is_launcher or (program in _OTHERS and _other(program, rest[1:]).is_trainer)


def _runs_launcher(words: Sequence[str]) -> bool:
    """Return True for python -m MODULE, but for modules that train nothing."""
    return "-m" in words[:-1] and words[words.index("-m") + 1].partition(".")[0] not in _TOOLS


def runs_heredoc(words: Sequence[str]) -> bool:
    """Return True for a line that reads its script from standard input: bash, sbatch."""
    _, rest = without_wrappers(words)
    return any(program_of(word) in (*SHELLS, "sbatch", "qsub", "ssh") for word in (rest or words)[:1])


def file_of_shell(words: Sequence[str]) -> str | None:
    """Return the file of command lines that a line runs: bash FILE, sbatch FILE; None for any other line."""
    _, rest = without_wrappers(words)
    if not rest:
        return None
    if program_of(rest[0]) not in RUN_LINES:
        return rest[0] if rest[0].endswith(SHELL_SUFFIXES) else None
    return next((word for word in rest[1:] if not word.startswith("-") and "." in word), None)


def lacks_script(words: Sequence[str]) -> bool:
    """Return True for a line of a launcher that names no script yet."""
    is_launch = any(word.rpartition("/")[2] in ("accelerate", "torchrun", "deepspeed") for word in words)
    return is_launch and not any(
        word.endswith(".py") or word.startswith("$") or word in ("-m", "--module") for word in words
    )
