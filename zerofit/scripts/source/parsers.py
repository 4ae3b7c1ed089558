"""argparse parsers: their options, and where they refuse unknown ones."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action, ScriptArgument
from zerofit.scripts.source.values import Constant, ObjectKind, TrackedObject

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.scripts.facts import Plain
    from zerofit.scripts.source.reading import CallSite, Reading
    from zerofit.scripts.source.values import Scope, Value

UNKNOWN = "**"
"""Represents unknown options among a parser's options."""
_PARSER_WIDE = {
    "parents",
    "prefix_chars",
    "exit_on_error",
    "fromfile_prefix_chars",
    "conflict_handler",
    UNKNOWN,
}
"""Arguments of a parser that add options, or change how unknown ones are handled."""
_NUMBERS: dict[str, type[int] | type[float]] = {"int": int, "float": float}
_GROUPS = {"add_argument_group", "add_mutually_exclusive_group"}
_ADDS_NOTHING = {
    "parse_known_args", "get_default", "print_help", "print_usage", "format_help",
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
        _record_argument(reading, call)
    elif name == "parse_args":
        if isinstance(call.node, ast.Call) and not call.node.args and not call.node.keywords:
            _record_strict(reading, parser, call)
            return TrackedObject(kind=ObjectKind.NAMESPACE, node=call.node)
    elif name == "set_defaults":
        changed = reading.arguments if UNKNOWN in call.keywords or not call.keywords else call.keywords
        reading.arguments.update(dict.fromkeys(changed))
    elif name not in _ADDS_NOTHING:
        parser.options.add(UNKNOWN)
    return None


def _record_strict(reading: Reading, parser: TrackedObject, call: CallSite) -> None:
    """Record that a parser refuses unknown options, if the script certainly gets here."""
    if reading.root == 0 and not reading.conditions:
        reading.record(Action.PARSE_STRICTLY, call.node, more={"options": frozenset(parser.options)})


def _record_argument(reading: Reading, call: CallSite) -> None:
    """Record an option whose value follows from a command line; one that two parsers have is unknown."""
    names = [value.value for value in call.arguments if isinstance(value, Constant)]
    options = tuple(name for name in names if isinstance(name, str) and name.startswith("-"))
    given = {keyword.arg for keyword in call.node.keywords} if isinstance(call.node, ast.Call) else {None}
    if not options or len(options) != len(call.arguments):
        return
    dest = (
        next((option for option in options if option.startswith("--")), options[0])
        .lstrip("-")
        .replace("-", "_")
    )
    action, default = call.keywords.get("action"), call.keywords.get("default")
    kind = action.value if isinstance(action, Constant) else None
    type_name = call.expression("type", len(call.arguments))
    converts_to = type_name.id if isinstance(type_name, ast.Name) else None
    is_plain = not {"action", "nargs", "const"} & given and (
        "type" not in given or converts_to in ("str", *_NUMBERS)
    )
    is_known = (
        not {"dest", None} & given
        and ("default" not in given or isinstance(default, Constant))
        and (is_plain or kind in ("store_true", "store_false"))
        and dest not in reading.arguments
    )
    default_value = default.value if isinstance(default, Constant) else None
    if kind in ("store_true", "store_false") and "default" not in given:
        default_value = kind == "store_false"
    sets = None if is_plain else kind == "store_true"
    number = _NUMBERS.get(converts_to or "") if is_plain else None
    known = ScriptArgument(dest=dest, options=options, sets=sets, default=default_value, number=number)
    reading.arguments[dest] = known if is_known else None


_KEEP_THEM = frozenset(
    {
        "print",
        "vars",
        "repr",
        "str",
        "getattr",
        "hasattr",
        "dict",
        "asdict",
        "dumps",
        "dump",
        "info",
        "debug",
        "warning",
        "set_seed",
    }
)
"""Functions that do not change the arguments that they are passed."""


def mark_arguments_unknown(values: Iterable[Value], called: str) -> None:
    """Mark parsed arguments that are passed to unanalysed code, which may set others."""
    for value in values:
        if isinstance(value, TrackedObject) and value.kind is ObjectKind.NAMESPACE:
            value.options |= set() if called in _KEEP_THEM else {UNKNOWN}


_ARGUMENT = re.compile(r"(\w+)\.(\w+)( ==| is None| is not None)?")


def needs_of(facts: Iterable[tuple[str, Plain]], scope: Scope) -> frozenset[tuple[str, str, Plain]]:
    """Return those facts that are about parsed arguments: destination, comparison and value."""
    found = set()
    for text, value in facts:
        read = _ARGUMENT.fullmatch(text)
        owner = scope.look_up(read[1]) if read else None
        if not read or not isinstance(owner, TrackedObject) or owner.kind is not ObjectKind.NAMESPACE:
            continue
        if UNKNOWN not in owner.options and read[2] not in owner.attributes:
            found.add((read[2], (read[3] or "").strip(), value))
    return frozenset(found)


def with_options(parser: Value, options: Iterable[str]) -> Value:
    """Return a parser to which a library's function adds options."""
    if isinstance(parser, TrackedObject) and parser.kind is ObjectKind.PARSER:
        parser.options |= set(options)
    return parser


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
