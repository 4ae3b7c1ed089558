"""argparse parsers: their options, and where they refuse unknown ones."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action
from zerofit.scripts.source.values import Constant, ObjectKind, TrackedObject

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.scripts.source.reading import CallSite, Reading
    from zerofit.scripts.source.values import Value

UNKNOWN = "**"
"""Represents unknown options among a parser's options."""
_PARSER_WIDE = {
    *("parents", "prefix_chars", "exit_on_error", "fromfile_prefix_chars", "conflict_handler", UNKNOWN),
}
"""Arguments of a parser that add options, or change how unknown ones are handled."""
_GROUPS = {"add_argument_group", "add_mutually_exclusive_group"}
_ADDS_NOTHING = {
    "parse_known_args", "set_defaults", "get_default", "print_help", "print_usage", "format_help",
    "format_usage", "error", "exit",
}  # fmt: skip


def make_parser(node: ast.expr) -> TrackedObject | None:
    """Return a parser; None if its own arguments leave its options open."""
    given = {keyword.arg or UNKNOWN for keyword in node.keywords} if isinstance(node, ast.Call) else set()
    return None if given & _PARSER_WIDE else TrackedObject(kind=ObjectKind.PARSER, node=node)


def call_parser(reading: Reading, parser: TrackedObject, name: str, call: CallSite) -> Value:
    """Record a method call of a parser, and return its result."""
    if name in _GROUPS:
        return parser
    if name == "add_argument":
        parser.options |= _options(call)
        record_default(reading, call)
    elif name == "parse_args":
        if isinstance(call.node, ast.Call) and not call.node.args and not call.node.keywords:
            _record_strict(reading, parser, call)
    elif name not in _ADDS_NOTHING:
        parser.options.add(UNKNOWN)
    return None


def _record_strict(reading: Reading, parser: TrackedObject, call: CallSite) -> None:
    """Record that a parser refuses unknown options, if the script certainly gets here."""
    if reading.root == 0 and not reading.conditions:
        reading.record(Action.PARSE_STRICTLY, call.node, more={"options": frozenset(parser.options)})


def record_default(reading: Reading, call: CallSite) -> None:
    """Record the default of a script's argument."""
    name, default = call.value("dest", 0), call.keywords.get("default")
    if isinstance(name, Constant) and isinstance(default, Constant):
        reading.defaults[str(name.value).lstrip("-").replace("-", "_")] = default.value


def mark_options_unknown(values: Iterable[Value]) -> None:
    """Mark the options of parsers that are passed to unanalysed code as unknown."""
    for value in values:
        if isinstance(value, TrackedObject) and value.kind is ObjectKind.PARSER:
            value.options.add(UNKNOWN)


def _options(call: CallSite) -> set[str]:
    # nargs=argparse.REMAINDER, or "...", takes everything that follows, including unknown options.
    written = call.node.keywords if isinstance(call.node, ast.Call) else []
    nargs = [keyword.value for keyword in written if keyword.arg in (None, "nargs")]
    takes_all = any(not isinstance(value, ast.Constant) or value.value == "..." for value in nargs)
    names = {str(value.value) if isinstance(value, Constant) else UNKNOWN for value in call.arguments}
    return names | {UNKNOWN} if takes_all or not call.arguments else names
