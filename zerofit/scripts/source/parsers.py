"""Parsers of argparse: which options they take, and where they refuse all others."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action
from zerofit.scripts.source.values import Constant, Kind, Thing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.scripts.source.reading import Reading
    from zerofit.scripts.source.values import Value

UNKNOWN = "**"
"""Stands among a parser's options for those that are not known."""
_PARSER_WIDE = {
    "parents",
    "prefix_chars",
    "exit_on_error",
    "fromfile_prefix_chars",
    "conflict_handler",
    UNKNOWN,
}
"""Arguments of a parser that bring options with them, or change what becomes of unknown ones."""
_GROUPS = {"add_argument_group", "add_mutually_exclusive_group"}
_ADDS_NOTHING = {
    "parse_known_args", "set_defaults", "get_default", "print_help", "print_usage", "format_help",
    "format_usage", "error", "exit",
}  # fmt: skip


def make_parser(node: ast.Call) -> Thing | None:
    """Return a parser; None where its own arguments leave its options open."""
    given = {keyword.arg or UNKNOWN for keyword in node.keywords}
    return None if given & _PARSER_WIDE else Thing(kind=Kind.PARSER, node=node)


def call_parser(
    reading: Reading,
    parser: Thing,
    name: str,
    node: ast.Call,
    arguments: list[Value],
    keywords: dict[str, Value],
) -> Value:
    """Note a method of a parser; return what it returns."""
    if name in _GROUPS:
        return parser
    if name == "add_argument":
        parser.options |= _options(node, arguments)
        see_default(reading, arguments, keywords)
    elif name == "parse_args":
        if not node.args and not node.keywords and _is_reached(reading):
            reading.see(Action.PARSE_STRICTLY, node, more={"options": frozenset(parser.options)})
    elif name not in _ADDS_NOTHING:
        parser.options.add(UNKNOWN)
    return None


def see_default(reading: Reading, arguments: list[Value], keywords: dict[str, Value]) -> None:
    """Note the default of an argument of the script."""
    default = keywords.get("default")
    if arguments and isinstance(arguments[0], Constant) and isinstance(default, Constant):
        reading.defaults[str(arguments[0].value).lstrip("-").replace("-", "_")] = default.value


def hand_on(values: Iterable[Value]) -> None:
    """Note that code which is not read gets these values: it may add options to the parsers among them."""
    for value in values:
        if isinstance(value, Thing) and value.kind is Kind.PARSER:
            value.options.add(UNKNOWN)


def _options(node: ast.Call, arguments: list[Value]) -> set[str]:
    # nargs=argparse.REMAINDER, or "...", takes all that follows, unknown options too.
    nargs = [keyword.value for keyword in node.keywords if keyword.arg in (None, "nargs")]
    takes_all = any(not isinstance(value, ast.Constant) or value.value == "..." for value in nargs)
    is_open = takes_all or not arguments
    names = {str(value.value) if isinstance(value, Constant) else UNKNOWN for value in arguments}
    return names | {UNKNOWN} if is_open else names


def _is_reached(reading: Reading) -> bool:
    """Return whether running the script surely gets here."""
    return reading.root == 0 and all(
        "__name__" in ast.unparse(condition.test) for condition in reading.conditions
    )
