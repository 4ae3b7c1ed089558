"""YAML text to a tree with exact spans, by the parser and types of yaml.safe_load, which accelerate uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.configs.document import Entries, Items, KeyValue, Node, Scalar, Span
from zerofit.configs.text.unreadable import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NODES,
    cut,
    half_character,
    has_half_character,
    not_a_mapping,
    too_deep,
    too_many_digits,
    unreadable,
)

if TYPE_CHECKING:
    from zerofit.core.errors import Unreadable

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}
_KINDS = {"timestamp": "a date", "binary": "binary data", "merge": "the merge sign <<", "value": "the sign ="}
"""YAML 1.1's scalars beside the five of a configuration."""


def tree_of_yaml(text: str) -> Entries:
    """Return the mapping that a YAML text is.

    Raises:
        Unreadable: the text is no YAML, or no mapping, or holds what a configuration does not.
    """
    import yaml

    try:
        loader: Any = _loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax(text, error) from None
    except yaml.reader.ReaderError as error:
        raise unreadable(
            text,
            error.position,
            f"the file holds the character U+{ord(text[error.position]):04X}",
            why="YAML has no such character",
            fix="write it as an escape in double quotes, or remove it",
        ) from None
    if root is None:
        raise not_a_mapping(text, 0, "nothing but comments")
    tree = _Tree(text, loader).node(root, 1)
    if isinstance(tree, Entries):
        return tree
    kind = "a list" if isinstance(tree, Items) else "nothing" if tree.value is None else "a single value"
    raise not_a_mapping(text, root.start_mark.index, kind)


def shares_nodes(text: str) -> bool:
    """Return True if a readable YAML text has anchors, aliases or merges: one place then counts at many."""
    import yaml

    return any(
        getattr(event, "anchor", None) is not None
        or (isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<")
        for event in yaml.parse(text, yaml.SafeLoader)
    )


def _loader(text: str) -> Any:
    """Return yaml.SafeLoader, which also refuses depths and anchors that no configuration has."""
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0
        open_anchors: tuple[str | None, ...] = ()

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            at = event.start_mark.index
            self._check_anchor(event)
            if self.depth == MAX_DEPTH and isinstance(event, yaml.CollectionStartEvent):
                raise too_deep(text, at)
            before, self.depth, self.open_anchors = (
                self.open_anchors,
                self.depth + 1,
                (*self.open_anchors, event.anchor),
            )
            node = super().compose_node(parent, index)
            self.depth, self.open_anchors = self.depth - 1, before
            return node

        def _check_anchor(self, event: Any) -> None:
            name = cut(event.anchor or "")
            if not isinstance(event, yaml.AliasEvent):
                if event.anchor not in self.anchors:
                    return
                problem = f"the anchor &{name} stands twice"
                why = "yaml.safe_load, with which accelerate reads the file, refuses a second one"
                fix = "give each anchor a name of its own"
            elif event.anchor in self.open_anchors:
                problem, why = (
                    f"*{name} stands within &{name}",
                    "a configuration that holds itself has no end",
                )
                fix = "write the value out"
            elif event.anchor not in self.anchors:
                problem, why = (
                    f"*{name} has no anchor before it",
                    "an alias repeats a value that an anchor has named",
                )
                fix = f"put &{name} before the value, or the alias in quotes if it is a string"
            else:
                return
            raise unreadable(text, event.start_mark.index, problem, why=why, fix=fix)

    return Loader(text)


class _Tree:
    """The nodes of one text on their way to a tree, aliases written out."""

    def __init__(self, text: str, loader: Any) -> None:
        self.text = text
        self.loader = loader
        self.count = 0

    def node(self, node: Any, depth: int) -> Node:
        import yaml

        at = node.start_mark.index
        self._count(1, at)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, at)
        if depth > MAX_DEPTH:
            raise too_deep(self.text, at)
        is_list = isinstance(node, yaml.SequenceNode)
        if node.tag != f"{_TAG}{'seq' if is_list else 'map'}":
            raise self._strange(node.tag, at)
        if not is_list:
            return self._entries(node, depth)
        nodes = tuple(self.node(item, depth + 1) for item in node.value)
        has_end = node.flow_style or not nodes
        return Items(
            nodes=nodes, span=Span(at, node.end_mark.index if has_end else max(at, nodes[-1].span.end))
        )

    def _count(self, count: int, at: int) -> None:
        self.count += count
        if self.count > MAX_NODES:
            raise unreadable(
                self.text,
                at,
                f"the file comes to more than {MAX_NODES} values",
                why="no configuration has so many, nor aliases that repeat its values so often",
                fix="give the configuration's file, without aliases",
            )

    def _scalar(self, node: Any, at: int) -> Scalar:
        if node.tag not in _SCALARS:
            raise self._strange(node.tag, at)
        if node.tag in (f"{_TAG}int", f"{_TAG}float") and len(node.value) > MAX_DIGITS:
            raise too_many_digits(self.text, at)
        if has_half_character(node.value):
            raise half_character(self.text, at)
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError):  # yaml/constructor.py lets them through
            name = node.tag.removeprefix(_TAG)
            raise unreadable(
                self.text,
                at,
                f"{cut(node.value)!r} is no {name}",
                why=f"yaml.safe_load, with which accelerate reads the file, takes it for type {name}",
                fix="put it in quotes if it is a string",
            ) from None
        end = node.end_mark.index
        if node.style in ("|", ">"):  # the marks of a block scalar reach into the lines behind it
            end = at + len(self.text[at:end].rstrip())
        return Scalar(value=value, span=Span(at, end))

    def _strange(self, tag: str, at: int) -> Unreadable:
        name = tag.removeprefix(_TAG)
        if name in _KINDS:
            return unreadable(
                self.text,
                at,
                f"{_KINDS[name]} stands where a setting's value should be",
                why="a setting is a string, a number, true, false, null, a list or a mapping",
                fix="put it in quotes",
            )
        shown = cut(f"!!{name}" if tag.startswith(_TAG) else tag)
        return unreadable(
            self.text,
            at,
            f"the tag {shown} is not for configurations",
            why="yaml.safe_load, with which accelerate reads the file, makes plain values only",
            fix="remove the tag",
        )

    def _entries(self, mapping: Any, depth: int) -> Entries:
        own: list[KeyValue] = []
        merged: list[Entries] = []
        end = mapping.start_mark.index
        for key, value in mapping.value:
            at, key_end = key.start_mark.index, key.end_mark.index
            if key.tag != f"{_TAG}merge" and not isinstance(self.node(key, MAX_DEPTH), Scalar):
                raise unreadable(
                    self.text,
                    at,
                    "a list or a mapping stands where a key should be",
                    why="keys of a configuration are strings",
                    fix="write a string for the key",
                )
            node = self.node(value, depth + 1)
            end = max(key_end, node.span.end)
            if key.tag == f"{_TAG}merge":
                merged += self._merged(node, at)
            else:
                own.append(KeyValue(key=key.value, key_span=Span(at, key_end), node=node))
        # The first mapping of several counts most, and what stands here itself more than all of them.
        inherited = {entry.key: entry for each in reversed(merged) for entry in each.entries}
        names = {entry.key for entry in own}
        return Entries(
            entries=(*(entry for key, entry in inherited.items() if key not in names), *own),
            span=Span(mapping.start_mark.index, mapping.end_mark.index if mapping.flow_style else end),
        )

    def _merged(self, node: Node, at: int) -> list[Entries]:
        """Return the mappings that << takes entries from, the one that counts most first."""
        nodes = list(node.nodes) if isinstance(node, Items) else [node]
        mappings = [each for each in nodes if isinstance(each, Entries)]
        if len(mappings) < len(nodes):
            raise unreadable(
                self.text,
                at,
                "<< has a value that is no mapping",
                why="<< takes the entries of another mapping, or of a list of mappings",
                fix="give << an alias of a mapping",
            )
        return mappings


def _syntax(text: str, error: Any) -> Unreadable:
    """Return an error of yaml's scanner or parser in our words."""
    mark = error.problem_mark or error.context_mark
    for words, (problem, why, fix) in _SYNTAX.items():
        if words in (error.problem or ""):
            if problem == _OPEN:
                mark = error.context_mark or mark
            return unreadable(text, mark.index, problem, why=why, fix=fix)
    return unreadable(
        text,
        mark.index if mark else 0,
        "the file is not YAML",
        why="here its lines can be read neither as keys and values nor as a list",
        fix="check the indentation, the colons and the quotes of this line and the one above",
    )


_OPEN = "a string or a bracket is not closed"
_SYNTAX = {
    "but found another document": (
        "the file holds several documents",
        "yaml.safe_load, with which accelerate reads the file, refuses a second document",
        "keep one document, and remove the lines --- between them",
    ),
    "found character '\\t'": (
        "a tab stands where YAML expects spaces",
        "YAML is indented with spaces only",
        "replace the tab by spaces",
    ),
    "mapping values are not allowed here": (
        "a colon stands where no key can be",
        "a line holds one key, and a value with a colon and a space in it needs quotes",
        "put the value in quotes, or check the indentation",
    ),
    "could not find expected ':'": (
        "a colon is missing behind a key",
        "a mapping is written key: value",
        "put a colon and a space behind the key",
    ),
    "but found '<block mapping start>'": (
        "a line is indented more than the ones beside it",
        "keys of one mapping begin in the same column",
        "indent it like the lines beside it",
    ),
    "found unexpected end of stream": (_OPEN, "quotes and brackets stand in pairs", "close it"),
    "but got '<stream end>'": (_OPEN, "quotes and brackets stand in pairs", "close it"),
    "expected ',' or": (
        "a comma or a closing bracket is missing",
        "members in brackets are separated by commas",
        "put a comma between the members, or close the bracket behind the last one",
    ),
    "that cannot start any token": (
        "a value begins with a character that YAML keeps for itself",
        "@, ` and % begin no value",
        "put the value in quotes",
    ),
    "found unknown escape character": (
        "a string holds an escape that YAML does not have",
        "in double quotes a backslash begins an escape such as \\n",
        "use single quotes, or write the backslash twice",
    ),
}
