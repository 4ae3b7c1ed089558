"""The variables that a shell script sets, or expects from its environment; and those that nothing sets."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_SETTING = re.compile(
    r"(?:^|[\s;&|({,='\"`])([A-Za-z_]\w*)(?:\[[^\]\n]*\])?\+?="  # NAME=, NAME+=, NAME[0]=
    r"|\b(?:for|select)\s+([A-Za-z_]\w*)\b"
    r"|\bgetopts\s+\S+\s+([A-Za-z_]\w*)"
    r"|\bprintf\s+-v\s+([A-Za-z_]\w*)"
    r"|\$\{([A-Za-z_]\w*)(?:\[[^\]\n]*\])?(?::?[-=?+]|@)"  # ${NAME:-default}, ${NAME:?message}
    r"|\$\{[!#]([A-Za-z_]\w*)",
    re.MULTILINE,
)
_LISTING = re.compile(
    r"\b(?:export|declare|local|readonly|typeset|read|mapfile|readarray|unset)\b((?:[ \t]+[-\w]+)+)"
)
_TEST = re.compile(r"(?:\[\[?|\btest|\bcase|\bif|\bwhile|\buntil|\(\()[^\n;]*")
_SCRIPT = re.compile(r"\b([A-Za-z_]\w*)=[\"']?[^\s\"';]*\.py[\s\"';]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SOURCE = re.compile(r"^[ \t]*(?:[^#\n]*(?:&&|;)\s*)?(?:source|\.)\s+([^\n;&|]+)", re.MULTILINE)
_OPENING = re.compile(
    r"\bset\s+-([a-z]*a[a-z]*|o\s+allexport)\b"
    r"|\beval\s+[\"']?(\$\(|`)(?!\S*(conda|mamba|pyenv|ssh-agent))"
)
"""Commands that may set any name."""
_SETS_OTHERS = re.compile(
    r"activate|conda\.sh|mamba\.sh|bashrc|bash_profile|\.profile|/etc/|modules?\.sh|/init/|lmod|nvm\.sh|setvars"
)
"""Files that are sourced for programs, and set none of the script's own variables."""
_OF_ENVIRONMENT = re.compile(
    r"(SLURM|SBATCH|SRUN|CUDA|NCCL|GLOO|UCX|HF|TORCH|PYTORCH|ACCELERATE|DEEPSPEED|PET|MASTER|MAIN_PROCESS|PBS|LSB|OMPI|PMI"
    r"|PMIX|MPI|AWS|AZ|AZUREML|GOOGLE|SM|SKYPILOT|KUBERNETES|CONDA|VIRTUAL|WANDB|COMET|XDG|LC|BASH|OMP"
    r"|MKL|SINGULARITY|APPTAINER|DOCKER|GIT|GITHUB|CI|ARNOLD|METIS|PAI|DLC|MLP|VOLC)(_\w+)?"
    r"|(WORLD|NODE|LOCAL|GROUP|ROLE|GPU|N?NODES?|N?PROC|NPROC)_?(SIZE|RANK|COUNT|NUM|PER_NODE|WORLD_SIZE)?"
    r"|PYTHON(PATH|HOME|UNBUFFERED|HASHSEED|_BIN|_EXE\w*)?|HOME|PATH|PWD|OLDPWD|USER|LOGNAME|UID|EUID|HOSTNAME|HOST|SHELL|TMPDIR|TMP|TEMP|RANDOM|SECONDS|LINENO|PPID"
    r"|LANG|TERM|EDITOR|IFS|OPTARG|OPTIND|REPLY|FUNCNAME|SCRATCH|WORK|STORE|RANK|DATE|LD_\w+|JOB_?ID|\w+_(HOME|ROOT|CACHE)"
)
"""Names that the system, a scheduler, a container or a library sets; the groups are their prefixes."""
_READ_BY_PROGRAMS = """
    MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_RANK NODE_RANK OMP_NUM_THREADS PYTHONPATH PYTHONUNBUFFERED
    LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS
    NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_GID_INDEX
    NCCL_IB_TIMEOUT NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_BLOCKING_WAIT
    NCCL_ASYNC_ERROR_HANDLING GLOO_SOCKET_IFNAME TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING
    TORCH_NCCL_BLOCKING_WAIT TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_DIR PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_ALLOC_CONF TOKENIZERS_PARALLELISM TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE HF_HUB_OFFLINE
    HF_HUB_CACHE HF_DATASETS_OFFLINE HF_DATASETS_CACHE HF_ENDPOINT HF_TOKEN HF_HOME WANDB_PROJECT
    WANDB_API_KEY WANDB_DISABLED WANDB_MODE ACCELERATE_LOG_LEVEL ACCELERATE_CONFIG_FILE DS_ACCELERATOR
    """
_KNOWN = frozenset(_READ_BY_PROGRAMS.split())
"""Variables of torch, NCCL, CUDA and Hugging Face's libraries that launch scripts set."""
_SHORTEST, _LONG = 8, 16
"""Letters from which a name that differs by one letter, and by two, is taken for misspelt. ASSUMPTION."""
_HANDED_ON = re.compile(
    r"^[ \t]*(?:[^#\n]*(?:&&|;)[ \t]*)?(?:export|declare[ \t]+-x|typeset[ \t]+-x|env)[ \t]+([^#\n]*)"
    r"|^[ \t]*((?:[A-Z]\w*=\S*[ \t]+)+)[\w./$\\]",
    re.MULTILINE,
)
"""What a command gives the programs it starts: export NAME=VALUE, and NAME=VALUE PROGRAM."""
_ASSIGNED = re.compile(r"(?:^|[ \t])([A-Z][A-Z0-9_]*)=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Misspelt:
    """A variable that is one of a library's but for a letter or two."""

    name: str
    meant: str
    line: int
    """From 1, in its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellVariables:
    """The names that a script gives a value, or whose value it looks at before it uses them."""

    names: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    """Those of them that it gives a value."""
    scripts: frozenset[str] = frozenset()
    """Those of them whose value is a Python file."""
    misspelt: tuple[Misspelt, ...] = ()
    """Names that it gives its programs, and that none of them is likely to read."""
    is_open: bool = True
    """True if other names may be set too: by another file that it sources, by eval."""

    def nearest(self, name: str) -> str | None:
        """Return the name that the file sets in place of another: spelt alike, or the only script."""
        alike = nearest(name, self.assigned - {name})
        return alike or (next(iter(self.scripts)) if len(self.scripts) == 1 else None)

    def lacks(self, name: str) -> bool:
        """Return True if nothing in the file, and nothing that commonly is in an environment, sets a name."""
        if self.is_open or name in self.names:
            return False
        return _OF_ENVIRONMENT.fullmatch(name) is None


def variables_of(text: str, *, first_line: int = 1) -> ShellVariables:
    """Return the variables of a script, comments included: those name what the user has to set.

    Args:
        text: the script.
        first_line: the line of its file that it begins in.
    """
    assigned = {name for match in _SETTING.finditer(text) for name in match.groups() if name}
    names = set(assigned)
    for listing in _LISTING.finditer(text):
        names.update(_NAME.findall(listing[1]))
    for test in _TEST.finditer(text):
        names.update(_NAME.findall(test[0]))
    sourced = (match[1] for match in _SOURCE.finditer(text))
    is_open = _OPENING.search(text) is not None or any(not _SETS_OTHERS.search(file) for file in sourced)
    return ShellVariables(
        names=frozenset(names),
        assigned=frozenset(assigned),
        scripts=frozenset(_SCRIPT.findall(text)),
        misspelt=tuple(_misspelt(text, assigned, first_line)),
        is_open=is_open,
    )


def _misspelt(text: str, assigned: set[str], first_line: int) -> Iterator[Misspelt]:
    """Yield the names that the text gives its programs, does not use itself, and may have meant otherwise."""
    seen: set[str] = set()
    for match in _HANDED_ON.finditer(text):
        given = match[1] or match[2]
        start = match.start(1) if match[1] else match.start(2)
        for found in _ASSIGNED.finditer(given):
            name = found[1]
            if name in seen:
                continue
            seen.add(name)
            meant = None if name in _KNOWN else _known_name(name)
            if meant is None or meant in assigned:
                continue
            is_used = len(re.findall(rf"\b{name}\b", text)) > len(re.findall(rf"\b{name}=", text))
            if not is_used:
                line = first_line + text.count("\n", 0, start + found.start(1))
                yield Misspelt(name=name, meant=meant, line=line)


def _known_name(name: str) -> str | None:
    """Return the library's variable that a name differs from by a letter, or by two if it is long."""
    if len(name) < _SHORTEST:
        return None
    most = 2 if len(name) >= _LONG and not name.startswith("NCCL_") else 1
    near = nearest(name, _KNOWN)
    # Another first letter is another vendor's library: HCCL_SOCKET_IFNAME, MUSA_VISIBLE_DEVICES.
    is_alike = near is not None and near[0] == name[0] and _num_edits(name, near, most) <= most
    return near if is_alike else None


def _num_edits(one: str, other: str, most: int) -> int:
    """Return how many letters have to be added, left out, replaced or swapped; above `most` any number."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        above, row, older = row, [i], before
        for j, its in enumerate(other, start=1):
            least = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != its))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == its:
                least = min(least, older[j - 2] + 1)
            row.append(least)
        before = above
    return row[-1]


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_DIVISIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGIL = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_MOST = 10**9
"""ASSUMPTION: launch lines count ranks, nodes, ports and batches."""


def arithmetic(text: str, values: Mapping[str, object]) -> int | None:
    """Return the number that a shell's $((...)) stands for; None if a name in it has none."""
    plain = _SIGIL.sub(lambda match: match[1] or match[2], text).strip()
    try:
        return _number(ast.parse(plain, mode="eval").body, values)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _number(node: ast.expr, values: Mapping[str, object]) -> int:
    """Return the value of a whole-number expression.

    Raises:
        ValueError: it is none.
    """
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return _in_range(number)
        case ast.Name(id=name):
            value = values.get(name)
            if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value):
                return int(value)
        case ast.BinOp():
            left, right = _number(node.left, values), _number(node.right, values)
            operation = _OPERATIONS.get(type(node.op))
            if operation is not None:
                return _in_range(operation(left, right))
            division = _DIVISIONS.get(type(node.op))
            if division is not None and left >= 0 and right > 0:
                return division(left, right)
    raise ValueError("no whole number")


def _in_range(number: int) -> int:
    if abs(number) > _MOST:
        raise ValueError("not a count")
    return number


def sets_arguments(words: Sequence[str]) -> bool:
    """Return True if `set` gives the script other arguments, as `set -euo pipefail` does not."""
    pairs = zip(("", *words), words, strict=False)
    names = (word for before, word in pairs if not re.fullmatch(r"[-+][a-z]*o", before))
    return any(word == "--" or not word.startswith(("-", "+")) for word in names)
