"""Finds zerofit's flags after the script that the script itself does not know."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.configs.schemas.catalog import load_schema
from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WORD = re.compile(r"[A-Za-z_][\w-]*")
_PARSERS_OF_ANYTHING = frozenset(
    {"argv", "hydra", "OmegaConf", "fire", "tyro", "jsonargparse", "LightningCLI"}
)
"""Names in a source that may accept any flag: pass-through, or parsers of classes defined elsewhere."""
_WITH_TRAINING_ARGUMENTS = frozenset({"HfArgumentParser", "TrlParser"})


def check_misplaced_flags(
    target: tuple[str, ...], *, before: tuple[str, ...], flags: Mapping[str, bool]
) -> None:
    """Check that no flag of the verb follows a script whose source does not contain it.

    A script that ignores its arguments would train despite a --dry-run after it. Only the source is searched:
    the script's, and that of local modules that it imports.

    Args:
        target: the script and its arguments.
        before: the words of the command line before the script.
        flags: long names of the verb's flags, with hyphens, and True for those with a value.

    Raises:
        UserError: there is such a flag; the fix is the whole command.
    """
    script, *arguments = target
    spelled = {word: word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}
    misplaced = [word for word, flag in spelled.items() if flag in flags]
    if not misplaced or not script.endswith(".py"):
        return
    names = set(_names(Path(script), seen=set()))
    if names & _PARSERS_OF_ANYTHING:
        return
    if names & _WITH_TRAINING_ARGUMENTS:
        names |= {key.name for key in load_schema("training_arguments").root.keys}
    unknown = [word for word in misplaced if not _is_known(spelled[word], names)]
    if unknown:
        raise _misplaced(unknown, target, before, valued={word for word in unknown if flags[spelled[word]]})


def _is_known(flag: str, names: set[str]) -> bool:
    """Return True if a source contains a flag, or one that it abbreviates, as argparse allows."""
    plain = flag.lstrip("-").replace("-", "_")
    return any(name.startswith((plain, f"no_{plain}")) or plain == f"no_{name}" for name in names)


def _names(path: Path, *, seen: set[Path]) -> Iterator[str]:
    """Yield each name in a script and its local modules, and each word in their strings."""
    if path in seen:
        return
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # Python itself will report what is wrong
        yield "argv"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (word.replace("-", "_") for word in _WORD.findall(node.value.replace("--", " ")))
        for field in ("id", "attr", "arg", "name", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from name.split(".")
        for module in _imported(node):
            beside = path.parent.joinpath(*module.split(".")).with_suffix(".py")
            if beside.is_file():
                yield from _names(beside, seen=seen)


def _imported(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    return (node.module,) if isinstance(node, ast.ImportFrom) and node.module else ()


def _misplaced(
    unknown: list[str], target: tuple[str, ...], before: tuple[str, ...], *, valued: set[str]
) -> UserError:
    script, *rest = target
    moved = []
    for word in unknown:
        at = rest.index(word)
        end = at + (2 if word in valued and "=" not in word else 1)
        moved += rest[at:end]
        del rest[at:end]
    named = ", ".join(unknown)
    return UserError(
        "flag-behind-script",
        f"a zerofit flag follows {script}, which does not know it",
        found=f"{script} ... {named}",
        why=f"arguments after the script belong to it, but its source has no {named}",
        fix=shlex.join([*before, *moved, script, *rest]),
    )
