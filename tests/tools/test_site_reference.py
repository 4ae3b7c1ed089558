"""The site's pages of the command line and of Python: nothing is left out, and nothing hidden is shown."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import click

import zerofit as package
from tools.site_reference import command_line_reference, on_page_markdown, python_reference
from zerofit import data
from zerofit.cli.main import zerofit

_ROOT = Path(__file__).parents[2]


def _page(name: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


def test_command_line_has_each_verb_and_each_flag_that_is_not_hidden() -> None:
    sections = dict(re.findall(r"(?ms)^## (zerofit [a-z ]+)\n(.*?)(?=^## |\Z)", command_line_reference()))
    context = click.Context(zerofit)
    for name in zerofit.list_commands(context):
        verb = zerofit.get_command(context, name)
        assert verb is not None
        inner = {f"{name} {one}": two for one, two in getattr(verb, "commands", {}).items()} or {name: verb}
        for path, command in inner.items():
            text = sections[f"zerofit {path}"]
            for option in command.params:
                if isinstance(option, click.Option):
                    assert (
                        f"`{option.opts[0]}" in text or f", {option.opts[0]}" in text
                    ) is not option.hidden


def test_python_has_each_public_name_with_its_docstring() -> None:
    text = python_reference()
    headings = re.findall(r"(?m)^## (\S+)$", text)
    public = [f"zerofit.{one}" for one in package.__all__] + [f"zerofit.data.{one}" for one in data.__all__]
    assert sorted(headings) == sorted(public)
    assert "**Returns**" in text
    assert "| `micro_batch_size` | " in text
    assert "0x" not in text  # a default's address
    assert "| `precision` | `Precision | None` |" in text


def test_pages_of_git_stand_before_what_is_rendered() -> None:
    for name in ("command-line", "python"):
        written = (_ROOT / "docs" / "reference" / f"{name}.md").read_text("utf-8")
        shown = on_page_markdown(written, page=_page(f"reference/{name}.md"))
        assert shown.startswith(written)
        assert shown.count("\n## ") > 10
    assert on_page_markdown("as it is", page=_page("plan.md")) == "as it is"
