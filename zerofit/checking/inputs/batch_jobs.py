"""The header of a Slurm job: its #SBATCH lines, and how many nodes, tasks and GPUs they ask for."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from zerofit.core.setting import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = re.compile(r"#SBATCH\s+(\S.*)")
SHORT_NAMES = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus",
    "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit",
    "S": "core-spec", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency",
    "e": "error", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist",
    "x": "exclude",
}  # fmt: skip
"""sbatch(1), 22.05 to 25.05: one-letter options by the names that srun shares where a job needs them."""
_HETEROGENEOUS = re.compile(r"#SBATCH\s+(hetjob|packjob)")
_OWN_CODE = re.compile(
    r"\bexport\s+-f\b|^[^#\n]*\b(srun|ssh|mpirun|pdsh)\b[^\n]*(\$\{?0\b|BASH_SOURCE)", re.MULTILINE
)
_MKDIR = re.compile(r"^[^#\n]*?\bmkdir\s+([^\n;&|#]+)", re.MULTILINE)
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")
_GPU_GRES = re.compile(r"gpu(?::([\w.-]+))?(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOption:
    """An option of sbatch or srun."""

    name: str
    """The long one, without dashes: "ntasks-per-node"."""
    value: str | None
    text: str
    """As written: "--ntasks-per-node=2"."""
    place: Place | None = None

    @property
    def number(self) -> int | None:
        """The value as a count; None if it is none, such as a range or a variable."""
        return int(self.value) if self.value is not None and re.fullmatch(r"\d{1,9}", self.value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A Slurm job as its header asks for it."""

    options: tuple[JobOption, ...]
    starts_own_code: bool = False
    """True if its lines may be run by its tasks: it starts itself by srun, or exports functions."""
    made_folders: frozenset[str] = frozenset()
    """Folders that its lines make, as written and without a last slash."""

    def find(self, *names: str) -> JobOption | None:
        """Return the option of one of these names that takes effect: the last one."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    def number(self, name: str) -> int | None:
        """Return an option as a count; None if it is not given, or no literal."""
        option = self.find(name)
        return None if option is None else option.number

    @property
    def nodes(self) -> int | None:
        """The nodes; None if the header leaves them open."""
        tasks, per_node = self.number("ntasks"), self.number("ntasks-per-node")
        if self.find("nodes") is not None:
            return self.number("nodes")
        return -(-tasks // per_node) if tasks and per_node else None

    @property
    def tasks_per_node(self) -> int | None:
        """The tasks that srun starts on each node; None if the header leaves them open."""
        if (tasks := self.find("ntasks")) is None:
            per_node = self.find("ntasks-per-node")
            return 1 if per_node is None else per_node.number
        if tasks.number is None or not self.nodes:
            return 1 if tasks.number == 1 else None
        return -(-tasks.number // self.nodes)

    @property
    def gpus_per_node(self) -> tuple[int, JobOption] | None:
        """The GPUs of each node, and the option that asks for them; None if the header leaves them open."""
        asked = [option for option in self.options if option.name in _COUNTING_GPUS]
        if len(asked) != 1 or asked[0].value is None:
            return None
        (option,) = asked
        number = _gpus(option)
        if number is None:
            return None
        if option.name == "gpus":
            return (number // self.nodes, option) if self.nodes and number % self.nodes == 0 else None
        if option.name == "gpus-per-task":
            return (number * self.tasks_per_node, option) if self.tasks_per_node else None
        return number, option


_COUNTING_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")


def _gpus(option: JobOption) -> int | None:
    """Return the number in gpu:a100:4, a100:4 or 4; None if it is not literal or counts something else."""
    value = option.value or ""
    if option.name != "gres":
        match = _GPUS.fullmatch(value)
        return None if match is None else int(match[1])
    counts = gpus_in(value)
    return counts[0] if len(counts) == 1 and "$" not in value else None


def gpus_in(gres: str) -> list[int]:
    """Return the GPUs that each part of a --gres asks for: [8] for "gpu:a100:8,nvme:1"."""
    found = []
    for part in gres.split(","):
        match = _GPU_GRES.fullmatch(part.removeprefix("gres/").strip().replace("=", ":"))
        if match is not None:  # "gpu:8" has its number where others have a type
            number = match[2] or (match[1] if (match[1] or "").isdecimal() else None)
            found.append(int(number or 1))
    return found


def batch_job(text: str, *, name: str, first_line: int = 1, is_literal: bool = True) -> BatchJob | None:
    """Return the job that a file's header asks Slurm for; None without one, or if it has several parts.

    Slurm reads the header up to the first command.

    Args:
        text: the file.
        name: its name, for positions.
        first_line: the line of the file at which the text starts.
        is_literal: False if another shell expands the text before Slurm reads it.
    """
    options = list[JobOption]()
    for number, line in enumerate(text.splitlines(), first_line):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if _HETEROGENEOUS.match(line):
            return None
        if (match := _HEADER.match(line)) is not None:
            options += job_options(_words(match[1]), place=Place(file=name, line=number))
    if not is_literal:
        options = [option for option in options if "$" not in (option.value or "")]
    if not options:
        return None
    made = (word for match in _MKDIR.finditer(text) for word in _words(match[1]) if not word.startswith("-"))
    return BatchJob(
        options=tuple(options),
        starts_own_code=_OWN_CODE.search(text) is not None,
        made_folders=frozenset(str(PurePosixPath(word)) for word in made),
    )


def with_options(job: BatchJob | None, words: list[str]) -> BatchJob | None:
    """Return a job with the options on the line of sbatch, which take the place of those in its header."""
    options = tuple(job_options(words))
    if not options:
        return job
    if job is None:
        return BatchJob(options=options)
    named = {option.name for option in options}
    kept = (option for option in job.options if option.name not in named)
    return replace(job, options=(*kept, *options))


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an open quote
        return line.split()


def job_options(words: list[str], *, place: Place | None = None) -> Iterator[JobOption]:
    """Yield the options of sbatch or srun among these words."""
    while words:
        word, *rest = words
        words = rest
        name, equals, value = word.lstrip("-").partition("=")
        text, found = word, value if equals else None
        if not word.startswith("--"):
            if not word.startswith("-") or word[1:2] not in SHORT_NAMES:
                continue
            name, found = SHORT_NAMES[word[1]], word[2:].removeprefix("=") or None
        if found is None and rest and not rest[0].startswith("-"):
            found, words = rest[0], rest[1:]
            text = f"{word} {found}"
        yield JobOption(name=name, value=found, text=text, place=place)
