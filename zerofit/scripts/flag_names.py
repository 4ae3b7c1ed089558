"""The names under which a script may read its command line, from its source and that of local modules."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.scripts.facts import TRAINING_ARGUMENTS
from zerofit.scripts.source.names import PLAIN_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORD = re.compile(r"[A-Za-z_][\w-]*")
_PARSERS_OF_ANYTHING = frozenset(
    {"argv", "hydra", "OmegaConf", "fire", "tyro", "jsonargparse", "LightningCLI"}
)
"""Names in a source that may accept any flag: pass-through, or parsers of classes defined elsewhere."""
_WITH_TRAINING_ARGUMENTS = frozenset({"HfArgumentParser", "TrlParser"})
_OF_TRL = frozenset({"dtype", "lora_alpha", "lora_dropout", "lora_modules_to_save", "trust_remote_code"})
"""Fields of the dataclasses that TRL gives these parsers, as far as zerofit has flags of the same names."""
_PARSERS = frozenset({"ArgumentParser", "add_argument", "click", "typer", "absl", *_WITH_TRAINING_ARGUMENTS})
_LEAVES_SOME = "parse_known_args"
"""argparse's method that leaves arguments to another parser."""
_OWNERS_OF_OTHERS = ("accelerator", "state")
"""Objects of accelerate, whose num_processes is no argument of the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagNames:
    """Names in a source that may be flags, with underscores."""

    names: frozenset[str]
    has_parser: bool
    """True if a parser is made in these sources, rather than in a library."""
    takes_any: bool
    """True if a parser of the source may take any flag."""
    takes_training_arguments: bool
    """True if a parser of it takes the fields of TrainingArguments, or leaves some to another parser."""

    def has(self, flag: str) -> bool:
        """Return True if the source contains a flag, or one that it abbreviates, as argparse allows."""
        plain = flag.lstrip("-").replace("-", "_")
        return any(name.startswith((plain, f"no_{plain}")) or plain == f"no_{name}" for name in self.names)


def flag_names(script: str | Path, source: str | None = None) -> FlagNames:
    """Return the names in a script and the local modules that it imports.

    Args:
        script: its file.
        source: its text, if it was read already.
    """
    names = frozenset(_names(Path(script), source, seen=set()))
    return FlagNames(
        names=names | _OF_TRL if names & _WITH_TRAINING_ARGUMENTS else names,
        has_parser=bool(names & _PARSERS),
        takes_any=bool(names & _PARSERS_OF_ANYTHING),
        takes_training_arguments=bool(names & {*_WITH_TRAINING_ARGUMENTS, _LEAVES_SOME}),
    )


def _names(path: Path, source: str | None, *, seen: set[Path]) -> Iterator[str]:
    """Yield each name in a script and its local modules, and each word in their strings."""
    if path in seen:
        return
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes() if source is None else source)
    except (OSError, SyntaxError, ValueError):  # Python itself will report what is wrong
        yield "argv"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (word.replace("-", "_") for word in _WORD.findall(node.value.replace("--", " ")))
        for field in ("id", "attr", "arg", "name", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not (field == "attr" and _is_of_others(node)):
                yield from name.split(".")
        for module in _imported(node):
            beside = path.parent.joinpath(*module.split(".")).with_suffix(".py")
            if beside.is_file():
                yield from _names(beside, None, seen=seen)


def _is_of_others(node: ast.AST) -> bool:
    owner = ast.unparse(node.value).lower() if isinstance(node, ast.Attribute) else ""
    return any(name in owner for name in _OWNERS_OF_OTHERS)


def _imported(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    return (node.module,) if isinstance(node, ast.ImportFrom) and node.module else ()


def dataclass_fields(tree: ast.Module) -> frozenset[str] | None:
    """Return the fields that HfArgumentParser takes from the command line; None if not all are known.

    TRAINING_ARGUMENTS among them stands for those of transformers' class.
    """
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = [(ast.unparse(call.func).rpartition(".")[2], call) for call in calls]
    parsers = [call for name, call in called if name == "HfArgumentParser"]
    parses = [call for name, call in called if name == "parse_args_into_dataclasses"]
    is_strict = parses and not any(call.args or call.keywords for call in parses)
    is_changed = any(name in ("add_argument", "parse_known_args") for name, _ in called)
    if not parsers or not is_strict or is_changed:
        return None
    own = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    fields: set[str] = set()
    for name in classes_of_parsers(tree):
        found = _fields_of(name, own, depth=0)
        if found is None:
            return None
        fields |= found
    return frozenset(fields) if fields else None


def classes_of_parsers(tree: ast.Module) -> set[str]:
    """Return the dataclasses that HfArgumentParser is made for, as written."""
    return {
        ast.unparse(elt)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "HfArgumentParser"
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        for elt in (argument.elts if isinstance(argument, (ast.Tuple, ast.List)) else (argument,))
    }


def _fields_of(name: str, own: dict[str, ast.ClassDef], *, depth: int) -> set[str] | None:
    """Return the fields of a dataclass of the script or of transformers; None if unknown."""
    if name.rpartition(".")[2] in PLAIN_ARGUMENTS and name not in own:
        return {TRAINING_ARGUMENTS}
    if name not in own or depth > len(own):
        return None
    fields = {
        item.target.id
        for item in own[name].body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for base in own[name].bases:
        found = _fields_of(ast.unparse(base), own, depth=depth + 1)
        if found is None:
            return None
        fields |= found
    return fields
