"""Hints can be typed: each `zerofit ...` of an error's fix, of a failure or of a document's text."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from commands import ROOT, documents, parse

from zerofit.cli.main import zerofit
from zerofit.cli.options import check_script_flags
from zerofit.core.errors import UserError

_VERBS = "|".join(zerofit.list_commands(click.Context(zerofit)))
_QUOTED = re.compile(rf"`(zerofit (?:{_VERBS})\b[^`]*)`")
_PLAIN = re.compile(rf"(?<![`\w.])(zerofit (?:{_VERBS})\b[^`;\n]*)")
_WORD = re.compile(r"-\w|--[\w-]+(=\S+)?|[A-Z][A-Z_]+|[\w./-]*[./][\w./-]+|<>")
"""A word of a command within a sentence: a flag, a placeholder, a file, or a value of the program."""
_PLACEHOLDER = re.compile(r"<>|(?<![\w-])[A-Z][A-Z_]*(?![\w-])")
_VALUES = ("train.py", "1", "8xA100-80G", "2G", "bf16", "gpt2", "kubernetes", "dp=8")
"""What a placeholder may stand for; one of them must be accepted."""
_ENDS = ",:.)?"
_FORMS = {"...", "ARGS", "LINE", "[flags]"}
"""What stands for any number of words."""


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings of a module but for docstrings, with `<>` for what is filled in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "<>" for part in child.values)
            yield "".join(map(str, parts))
        else:
            yield from _texts(child)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _hints() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of everything that may tell a user what to type."""
    for module in sorted((ROOT / "zerofit").rglob("*.py")):
        for text in _texts(ast.parse(module.read_text("utf-8"))):
            yield str(module.relative_to(ROOT)), text
    failures = "zerofit/catalog/failures.toml"
    for text in _strings(tomllib.loads((ROOT / failures).read_text("utf-8"))):
        yield failures, text
    for document in documents():
        yield (
            document,
            re.sub(r"^ *```.*?^ *```$", "", (ROOT / document).read_text("utf-8"), flags=re.M | re.S),
        )
    for page in sorted((ROOT / "tests" / "cli" / "messages").glob("*.txt")):
        fixes = re.findall(r"^  fix: +(.*)$", page.read_text("utf-8"), re.M)
        yield str(page.relative_to(ROOT)), "\n".join(fixes)


def _commands(text: str) -> Iterator[str]:
    """Yield the commands of a text: whole between backticks, else up to the first word of the sentence."""
    yield from (" ".join(found.split()) for found in _QUOTED.findall(text))
    for found in _PLAIN.findall(_QUOTED.sub("", text)):
        _, verb, *words = found.split()
        taken, valued = [verb.rstrip(_ENDS)], _valued(verb.rstrip(_ENDS))
        for word in words if taken == [verb] else ():
            bare = word.rstrip(_ENDS)
            is_value = taken[-1] in valued
            if not (is_value or _WORD.fullmatch(bare) or bare in _FORMS or bare in _subcommands(verb)):
                break
            taken.append(bare)
            if bare != word:
                break
        yield " ".join(("zerofit", *taken))


@cache
def _valued(verb: str) -> set[str]:
    """Return the flags of a verb that have a value."""
    command = zerofit.get_command(click.Context(zerofit), verb)
    params = command.params if command is not None else []
    return {
        name
        for param in params
        if isinstance(param, click.Option) and not param.is_flag
        for name in param.opts
    }


@cache
def _subcommands(verb: str) -> tuple[str, ...]:
    command = zerofit.get_command(click.Context(zerofit), verb)
    return tuple(command.list_commands(click.Context(command))) if isinstance(command, click.Group) else ()


@cache
def _found() -> dict[tuple[str, str], None]:
    """Return (place, command) of every command that a user may be told to type."""
    return dict.fromkeys((place, command) for place, text in _hints() for command in _commands(text))


def _refusal(command: str) -> Exception | None:
    """Return why a command can't be typed; a mention of a verb may lack what the verb requires."""
    words = ["train.py" if word == "SCRIPT" else word for word in command.split(" > ")[0].split()[1:]]
    words = [
        "<>" if word == "..." and (before.startswith("--") or word is words[-1]) else word
        for before, word in itertools.pairwise(("", *words))
    ]
    words = [word for word in words if word not in _FORMS]
    places = [number for number, word in enumerate(words) if _PLACEHOLDER.search(word)]
    refusal: Exception | None = None
    for values in itertools.product(_VALUES, repeat=len(places)):
        filled = list(words)
        for number, value in zip(places, values, strict=True):
            filled[number] = _PLACEHOLDER.sub(value, filled[number])
        try:
            context = parse(filled)
            with context:
                if script := context.params.get("script"):
                    check_script_flags(script, context.params.get("script_args", ()))
            return None
        except (click.MissingParameter, click.exceptions.Exit):  # a mention; --help
            return None
        except (click.UsageError, UserError) as error:
            refusal = error
    return refusal


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a script that knows no flag of zerofit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('a script')\n")
    for name in ("plan.json", "ds_config.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_hints_are_found_in_code_failures_documents_and_messages() -> None:
    places = {place.partition("/")[0] if place.endswith(".md") else place for place, _ in _found()}
    assert {"zerofit/catalog/failures.toml", "README.md", "docs", "tests/cli/messages/plan.txt"} <= places
    assert len(_found()) > 150


def test_a_command_of_a_hint_can_be_typed() -> None:
    refused = {found: refusal for found in _found() if (refusal := _refusal(found[1])) is not None}
    assert not refused


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        (
            "plan within it: zerofit launch --reserve SIZE SCRIPT, the rest",
            ["zerofit launch --reserve SIZE SCRIPT"],
        ),
        ("`zerofit plan --gpus\nSPEC train.py` says so", ["zerofit plan --gpus SPEC train.py"]),
        ("zerofit doctor shows the memory", ["zerofit doctor"]),
        ("follow it: zerofit runs logs -f <>", ["zerofit runs logs -f <>"]),
        (
            "see zerofit rule; or zerofit explain FOLDER of all logs",
            ["zerofit rule", "zerofit explain FOLDER"],
        ),
        ("zerofit splits the batch", []),
    ],
)
def test_commands_are_read_from_sentences(text: str, commands: list[str]) -> None:
    assert list(_commands(text)) == commands


@pytest.mark.parametrize(
    "command",
    [
        "zerofit launch SCRIPT --reserve SIZE",
        "zerofit plan --gpu-count 8 train.py",
        "zerofit config train.py --zero-stage 3",
        "zerofit runs fllow NAME",
        "zerofit launch --zero-stage 5 train.py",
        "zerofit plan --seq-len long --model gpt2",
    ],
)
def test_a_command_that_is_refused_is_noticed(command: str) -> None:
    assert _refusal(command) is not None
