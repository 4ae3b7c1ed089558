"""A hook of mkdocs: on the site, the command line and the Python interface."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

# mkdocs imports a hook by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerofit.cli.main import zerofit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MODULES = ("zerofit", "zerofit.data")
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page of git with what is rendered behind it."""
    rendered = {
        "reference/command-line.md": command_line_reference,
        "reference/python.md": python_reference,
    }
    if page.file.src_uri not in rendered:
        return markdown
    return markdown + "\n" + rendered[page.file.src_uri]()


def command_line_reference() -> str:
    """Return each verb's usage, text and flags."""
    context = click.Context(zerofit, info_name="zerofit")
    return "\n".join(line for name, verb in _verbs(zerofit, context) for line in _verb_lines(name, verb))


def python_reference() -> str:
    """Return each public name's signature and docstring."""
    lines: list[str] = []
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            lines += _object_lines(f"{module_name}.{name}", getattr(module, name))
    return "\n".join(lines)


def _verbs(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Yield the name and context of each verb below a group, those of subgroups too."""
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        assert verb is not None
        inner = click.Context(verb, info_name=name, parent=context)
        if isinstance(verb, click.Group):
            yield from _verbs(verb, inner)
        else:
            yield inner.command_path, inner


def _verb_lines(name: str, context: click.Context) -> Iterator[str]:
    verb = context.command
    usage = " ".join((name, *verb.collect_usage_pieces(context)))
    yield from (f"## {name}", "", "```text", usage, "```", "")
    yield from (_prose(inspect.cleandoc(verb.help or "")), "")
    rows = [
        record
        for parameter in verb.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    if rows:
        yield from ("| flag | meaning |", "|---|---|")
        yield from (f"| {_cell(f'`{flags}`')} | {_cell(_prose(text))} |" for flags, text in rows)
        yield ""


def _object_lines(name: str, value: Any) -> Iterator[str]:
    yield from (f"## {name}", "")
    if inspect.isclass(value):
        yield from _docstring_lines(_docstring(value))
        yield from _field_lines(value)
    else:
        yield from ("```python", *_signature_lines(name.rpartition(".")[2], value), "```", "")
        yield from _docstring_lines(_docstring(value))
    yield ""


def _signature_lines(name: str, function: Any) -> list[str]:
    """Return a function's signature as its source has it, each parameter on its line."""
    text = textwrap.dedent(inspect.getsource(function))
    node = next(one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef))
    arguments = node.args
    words = [*_with_defaults([*arguments.posonlyargs, *arguments.args], arguments.defaults)]
    if arguments.vararg:
        words.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        words.append("*")
    words += _with_defaults(arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        words.append(f"**{ast.unparse(arguments.kwarg)}")
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return [f"{name}(", *(f"    {word}," for word in words), f"){returned}"]


def _with_defaults(names: Sequence[ast.arg], defaults: Sequence[ast.expr | None]) -> Iterator[str]:
    """Yield parameters; the last of them have these defaults."""
    padded = (None,) * (len(names) - len(defaults)) + tuple(defaults)
    for name, default in zip(names, padded, strict=True):
        yield ast.unparse(name) + (f" = {ast.unparse(default)}" if default is not None else "")


def _docstring_lines(text: str) -> Iterator[str]:
    """Yield a docstring in Markdown: the names of its sections in bold, their entries as lists."""
    in_section = ""
    for paragraph in re.split(r"\n\s*\n", text):
        head, _, body = paragraph.partition("\n")
        if found := _SECTION.match(head):
            in_section = found[1]
            yield from (f"**{in_section}**", "")
            yield from _entries(textwrap.dedent(body), is_list=in_section in ("Args", "Raises"))
        else:
            yield _prose(paragraph)
        yield ""


def _entries(body: str, *, is_list: bool) -> Iterator[str]:
    if not is_list:
        yield _prose(body)
        return
    for entry in re.split(r"\n(?=\S)", body):
        name, _, text = entry.partition(":")
        yield f"- `{name.strip()}`: {_prose(textwrap.dedent(text))}"


def _field_lines(value: type) -> Iterator[str]:
    """Yield a table of a class's fields, each with the docstring under it; nothing if it has none."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    except (OSError, TypeError):
        return
    assert isinstance(node, ast.ClassDef)
    rows: list[tuple[str, str, str]] = []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            rows.append((statement.target.id, ast.unparse(statement.annotation), ""))
        elif rows and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            rows[-1] = (*rows[-1][:2], str(statement.value.value))
    if rows:
        yield from ("| field | type | meaning |", "|---|---|---|")
        yield from (
            f"| `{name}` | {_cell(f'`{kind}`')} | {_cell(_prose(inspect.cleandoc(text)))} |"
            for name, kind, text in rows
        )


def _docstring(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _prose(text: str) -> str:
    """Return text that click or a docstring has wrapped on lines as it is long, one line a paragraph."""
    text = text.replace("\b\n", "").replace("\b", "").replace("\f", "")
    code_or_not = re.split(r"(`[^`]*`)", text)
    escaped = "".join(one if one.startswith("`") else one.replace("<", "&lt;") for one in code_or_not)
    return "\n\n".join(" ".join(one.split()) for one in re.split(r"\n\s*\n", escaped)).strip()


def _cell(text: str) -> str:
    """Return text for a cell of a table; a pipe within code needs no backslash, and would show it."""
    code_or_not = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(one if one.startswith("`") else one.replace("|", "\\|") for one in code_or_not)
