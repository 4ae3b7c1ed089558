"""Finds flags that a message names though the user did not type them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_MISSING = re.compile(
    r"(?:\b(?:no|nor|neither|without)\s(?:--[\w-]+,? (?:and|or) )?|Missing option '|`[^`]*)$"
)
"""What stands before a flag that a message misses, or before one in a command that it quotes."""
_FIRST = re.compile(r"(?:error|warning)\[[\w-]+\]")
_OFFERS = ("  fix:", "  next:")
_STANDS_FOR = {"--qlora": ("--lora",)}
"""Flags that are others together, as their help says."""
_BY_CLICK = "error[usage]"
"""Its `why:` is click's sentence about flags that do not go together, or that are not there."""


def untyped_flags(typed: Iterable[str], message: str) -> list[str]:
    """Return zerofit's flags that an error or a warning names, and that were neither typed nor offered.

    Its first line and `found:` may name what was typed, and what is missing ("no --model"); `why:` also what
    `fix:` offers.

    Args:
        typed: the words of the command line.
        message: one error or warning, with all its lines.
    """
    named = _named_by(tuple(typed))
    lines = message.splitlines()
    offered = {flag for line in lines if line.startswith(_OFFERS) for flag in _flags(line)}
    allowed = {"  found": named, "  why": named | offered}
    if lines[0].startswith(_BY_CLICK):
        del allowed["  why"]
    found = [(line, allowed.get(line.partition(":")[0])) for line in lines[1:]]
    return [
        flag
        for line, known in [(lines[0], named), *found]
        if known is not None
        for flag in _flags(line, are_there=True)
        if flag not in known and flag in _aliases().values()
    ]


def check_flags_were_typed(typed: Iterable[str], output: str) -> None:
    """Check that no error or warning of a command's output names a flag that its command line lacks."""
    words = tuple(typed)
    wrong = {message: flags for message in messages(output) if (flags := untyped_flags(words, message))}
    assert not wrong, f"flags that were not among {words}: {wrong}"


def messages(text: str) -> list[str]:
    """Return the errors and warnings of an output, each with its lines."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if _FIRST.match(line):
            found.append([line])
        elif found and line.startswith("  "):
            found[-1].append(line)
    return ["\n".join(lines) for lines in found]


def _named_by(words: tuple[str, ...]) -> set[str]:
    named = {flag for word in words for flag in _flags(word)}
    return named.union(*(_STANDS_FOR.get(flag, ()) for flag in named))


def _flags(line: str, *, are_there: bool = False) -> Iterator[str]:
    """Yield the flags of a line; with are_there those alone that it does not miss or quote."""
    for match in _FLAG.finditer(line):
        if not (are_there and _MISSING.search(line[: match.start()])):
            yield _canonical(match.group())


def _canonical(flag: str) -> str:
    """Return the first name of an option: that of `--max_seq_length` is `--seq-len`, of `--no-x` `--x`."""
    spelled = flag.replace("_", "-")
    return _aliases().get(spelled, spelled)


@cache
def _aliases() -> dict[str, str]:
    """Return the first name of each option of all verbs, by each of its names."""
    import click

    from zerofit.cli.main import zerofit

    context = click.Context(zerofit)
    aliases: dict[str, str] = {}
    for name in zerofit.list_commands(context):
        command = zerofit.get_command(context, name)
        for option in command.params if command else ():
            names = [name.replace("_", "-") for name in (*option.opts, *option.secondary_opts)]
            aliases |= {name: names[0] for name in names if name.startswith("--")}
    return aliases
