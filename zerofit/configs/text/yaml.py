"""YAML text to a tree with exact spans, by the parser and types of yaml.safe_load, which accelerate uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.configs.document import Entries, Items, KeyValue, Node, Scalar, Span
from zerofit.configs.text.unreadable import (
    LONE_SURROGATE,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NODES,
    TOO_DEEP,
    TOO_MANY_DIGITS,
    cut,
    has_lone_surrogate,
    not_a_mapping,
    unreadable,
)

if TYPE_CHECKING:
    from zerofit.core.errors import Unreadable

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}


def tree_of_yaml(text: str) -> Entries:
    """Return the mapping in a YAML text.

    Raises:
        Unreadable: the text is not YAML or not a mapping, or no configuration has such content.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        tree = _Tree(text, loader).node(root, 1) if root is not None else None
    except yaml.MarkedYAMLError as error:
        raise _syntax(text, error) from None
    except yaml.reader.ReaderError as error:
        problem = f"the file contains the character U+{ord(text[error.position]):04X}"
        fix = "write it as an escape in double quotes, or remove it"
        raise unreadable(text, error.position, problem, "YAML does not allow it", fix) from None
    except RecursionError:
        raise unreadable(text, 0, *TOO_DEEP) from None
    if isinstance(tree, Entries):
        return tree
    kinds = {type(None): "nothing but comments", Items: "a list", Scalar: "a single value"}
    raise not_a_mapping(text, root.start_mark.index if root else 0, kinds[type(tree)])


def shares_nodes(text: str) -> bool:
    """Return True if a valid YAML text has anchors, aliases or merges: one position, several uses."""
    import yaml

    return any(
        getattr(event, "anchor", None) is not None
        or (isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<")
        for event in yaml.parse(text, yaml.SafeLoader)
    )


class _Tree:
    """Builds the tree of one text, with aliases and merges expanded."""

    def __init__(self, text: str, loader: Any) -> None:
        self.text = text
        self.loader = loader
        self.count = 0

    def node(self, node: Any, depth: int) -> Node:
        import yaml

        at = node.start_mark.index
        self.count += 1
        if self.count > MAX_NODES:
            problem = f"the file has more than {MAX_NODES} values"
            why = "no configuration has that many, even with aliases expanded"
            raise unreadable(self.text, at, problem, why, "give the configuration's file, without aliases")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, at)
        if depth > MAX_DEPTH:
            raise unreadable(self.text, at, *TOO_DEEP)
        is_list = isinstance(node, yaml.SequenceNode)
        if node.tag != f"{_TAG}{'seq' if is_list else 'map'}":
            raise self._unsupported_tag(node.tag, at)
        if not is_list:
            return self._entries(node, depth)
        nodes = tuple(self.node(item, depth + 1) for item in node.value)
        has_end = node.flow_style or not nodes
        return Items(
            nodes=nodes, span=Span(at, node.end_mark.index if has_end else max(at, nodes[-1].span.end))
        )

    def _scalar(self, node: Any, at: int) -> Scalar:
        if node.tag not in _SCALARS:
            raise self._unsupported_tag(node.tag, at)
        if node.tag in (f"{_TAG}int", f"{_TAG}float") and len(node.value) > MAX_DIGITS:
            raise unreadable(self.text, at, *TOO_MANY_DIGITS)
        if has_lone_surrogate(node.value):
            raise unreadable(self.text, at, *LONE_SURROGATE)
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError):  # yaml/constructor.py accepts them
            name = node.tag.removeprefix(_TAG)
            problem = f"{cut(node.value)!r} is not a valid {name}"
            why = f"accelerate uses yaml.safe_load, which parses it as type {name}"
            raise unreadable(self.text, at, problem, why, "put it in quotes if it is a string") from None
        end = node.end_mark.index
        if node.style in ("|", ">"):  # the marks of a block scalar extend into the lines after it
            end = at + len(self.text[at:end].rstrip())
        return Scalar(value=value, span=Span(at, end))

    def _unsupported_tag(self, tag: str, at: int) -> Unreadable:
        problem = f"a value of YAML's type {cut(tag.removeprefix(_TAG))} is used for a setting"
        why = "a setting is a string, a number, true, false, null, a list or a mapping"
        return unreadable(self.text, at, problem, why, "put it in quotes, or remove the tag")

    def _entries(self, mapping: Any, depth: int) -> Entries:
        own = [pair for pair in mapping.value if pair[0].tag != f"{_TAG}merge"]
        names = {key.value for key, _ in own if isinstance(key.value, str)}
        self.loader.flatten_mapping(mapping)  # entries merged by << come before the mapping's own
        inherited = {
            key.value: (key, value)
            for key, value in mapping.value[: len(mapping.value) - len(own)]
            if key.value not in names
        }
        mapping.value = [*inherited.values(), *own]  # an alias of the mapping includes them, too
        entries = tuple(self._entry(key, value, depth) for key, value in mapping.value)
        start, end = mapping.start_mark.index, mapping.end_mark.index
        if not mapping.flow_style and entries:
            end = max(entries[-1].key_span.end, entries[-1].node.span.end)
        return Entries(entries=entries, span=Span(start, end))

    def _entry(self, key: Any, value: Any, depth: int) -> KeyValue:
        at = key.start_mark.index
        if not isinstance(self.node(key, MAX_DEPTH), Scalar):
            problem = "a list or a mapping is used as a key"
            why = "keys of a configuration are strings"
            raise unreadable(self.text, at, problem, why, "write a string for the key")
        node = self.node(value, depth + 1)
        return KeyValue(key=key.value, key_span=Span(at, key.end_mark.index), node=node)


def _syntax(text: str, error: Any) -> Unreadable:
    """Return the error for an exception of yaml's scanner, parser or composer, reworded if unclear."""
    mark = error.problem_mark or error.context_mark
    for words, (problem, why, fix) in _SYNTAX_PROBLEMS.items():
        if words in (error.problem or ""):
            is_open = problem == _UNCLOSED[0]
            at = (error.context_mark or mark).index if is_open else mark.index
            return unreadable(text, at, problem, why, fix)
    return unreadable(
        text,
        mark.index if mark else 0,
        f"the file is not YAML: {', '.join(filter(None, (error.context, error.problem)))}",
        "accelerate uses yaml.safe_load, which refuses it",
        "check the indentation, the colons and the quotes of this line and the one above",
    )


_UNCLOSED = ("a string or a bracket is not closed", "quotes and brackets come in pairs", "close it")
_SYNTAX_PROBLEMS = {
    "found character '\\t'": (
        "there is a tab where YAML expects spaces",
        "YAML is indented with spaces only",
        "replace the tab by spaces",
    ),
    "mapping values are not allowed here": (
        "there is a colon where no key can be",
        "a line has one key, and a value that contains a colon and a space needs quotes",
        "put the value in quotes, or check the indentation",
    ),
    "but found '<block mapping start>'": (
        "a line is indented more than the ones beside it",
        "keys of one mapping start in the same column",
        "indent it like the lines beside it",
    ),
    "found unexpected end of stream": _UNCLOSED,
    "but got '<stream end>'": _UNCLOSED,
}
"""Messages of yaml that don't say what to do, by a part of their text."""
