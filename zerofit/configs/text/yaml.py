"""YAML text to a tree with exact spans, by the parser and types of yaml.safe_load, which accelerate uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
_KINDS = {
    "timestamp": "a date",
    "binary": "binary data",
    "merge": "the merge sign <<",
    "value": "the sign =",
}
"""What YAML 1.1 has beside the five scalars of a configuration."""
_MERGE = f"{_TAG}merge"


def tree_of_yaml(text: str) -> Entries:
    """Return the mapping that a YAML text is.

    Raises:
        Unreadable: the text is no YAML, or no mapping, or holds what a configuration does not.
    """
    import yaml

    try:
        return _Composer(text).document()
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


def shares_nodes(text: str) -> bool:
    """Return whether a readable YAML text has anchors, aliases or merges: one place then counts at many."""
    import yaml

    return any(
        getattr(event, "anchor", None) is not None
        or (isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<")
        for event in yaml.parse(text, yaml.SafeLoader)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """What an anchor stands for."""

    node: Node
    size: int
    """Nodes, this one included, aliases followed."""
    levels: int
    """Mappings and lists within each other, aliases followed."""


class _Composer:
    """The events of one text on their way to a tree."""

    def __init__(self, text: str) -> None:
        import yaml

        self.text = text
        self.yaml: Any = yaml
        self.loader: Any = yaml.SafeLoader(text)
        self.anchors: dict[str, _Named] = {}
        self.open_anchors: set[str] = set()
        self.count = 0
        """Nodes so far, those of aliases and merges counted each time."""
        self.deepest = 0
        """The deepest level so far, or so far within the innermost anchor."""

    def document(self) -> Entries:
        yaml = self.yaml
        self.loader.get_event()
        if isinstance(self.loader.get_event(), yaml.StreamEndEvent):
            raise not_a_mapping(self.text, 0, "nothing but comments")
        start = self.loader.peek_event().start_mark.index
        root = self.node(1)
        self.loader.get_event()
        following = self.loader.get_event()
        if not isinstance(following, yaml.StreamEndEvent):
            raise unreadable(
                self.text,
                following.start_mark.index,
                "the file holds several documents",
                why="yaml.safe_load, with which accelerate reads the file, refuses a second document",
                fix="keep one document, and remove the lines --- between them",
            )
        if isinstance(root, Entries):
            return root
        if isinstance(root, Items):
            raise not_a_mapping(self.text, start, "a list")
        raise not_a_mapping(self.text, start, "nothing" if root.value is None else "a single value")

    def node(self, depth: int) -> Node:
        """Return the node that begins at the next event."""
        yaml = self.yaml
        event = self.loader.get_event()
        at = event.start_mark.index
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, at, depth)
        if depth > MAX_DEPTH and not isinstance(event, yaml.ScalarEvent):
            raise too_deep(self.text, at)
        if event.anchor is not None:
            if event.anchor in self.anchors or event.anchor in self.open_anchors:
                raise unreadable(
                    self.text,
                    at,
                    f"the anchor &{cut(event.anchor)} stands twice",
                    why="yaml.safe_load, with which accelerate reads the file, refuses a second one",
                    fix="give each anchor a name of its own",
                )
            return self._named(event, depth)
        return self._unnamed(event, depth)

    def _unnamed(self, event: Any, depth: int) -> Node:
        yaml = self.yaml
        self._count(1, event.start_mark.index)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        self.deepest = max(self.deepest, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            self._refuse_tag(event, "seq")
            return self._items(event, depth)
        self._refuse_tag(event, "map")
        return self._entries(event, depth)

    def _named(self, event: Any, depth: int) -> Node:
        outside, count = self.deepest, self.count
        self.deepest = depth - 1
        self.open_anchors.add(event.anchor)
        node = self._unnamed(event, depth)
        self.open_anchors.discard(event.anchor)
        self.anchors[event.anchor] = _Named(
            node=node, size=self.count - count, levels=self.deepest - (depth - 1)
        )
        self.deepest = max(self.deepest, outside)
        return node

    def _alias(self, event: Any, at: int, depth: int) -> Node:
        if event.anchor in self.open_anchors:
            raise unreadable(
                self.text,
                at,
                f"*{cut(event.anchor)} stands within &{cut(event.anchor)}",
                why="a configuration that holds itself has no end",
                fix="write the value out",
            )
        if event.anchor not in self.anchors:
            raise unreadable(
                self.text,
                at,
                f"*{cut(event.anchor)} has no anchor before it",
                why="an alias repeats a value that an anchor has named",
                fix=f"put &{cut(event.anchor)} before the value, or the alias in quotes if it is a string",
            )
        named = self.anchors[event.anchor]
        self._count(named.size, at)
        self.deepest = max(self.deepest, depth - 1 + named.levels)
        if self.deepest > MAX_DEPTH:
            raise too_deep(self.text, at)
        return named.node

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

    def _scalar(self, event: Any) -> Scalar:
        yaml = self.yaml
        at = event.start_mark.index
        tag = self._tag(event)
        if tag not in _SCALARS:
            raise self._strange(tag, event, at)
        if tag in (f"{_TAG}int", f"{_TAG}float") and len(event.value) > MAX_DIGITS:
            raise too_many_digits(self.text, at)
        if has_half_character(event.value):
            raise half_character(self.text, at)
        try:
            value = self.loader.construct_object(yaml.ScalarNode(tag, event.value, event.start_mark))
        except (ValueError, KeyError, IndexError, OverflowError):  # yaml/constructor.py lets them through
            name = tag.removeprefix(_TAG)
            raise unreadable(
                self.text,
                at,
                f"{cut(event.value)!r} is no {name}",
                why=f"yaml.safe_load, with which accelerate reads the file, takes it for type {name}",
                fix="put it in quotes if it is a string",
            ) from None
        return Scalar(value=value, span=Span(at, self._end(event)))

    def _tag(self, event: Any) -> str:
        if event.tag is None or event.tag == "!":
            return str(self.loader.resolve(self.yaml.ScalarNode, event.value, event.implicit))
        return str(event.tag)

    def _end(self, event: Any) -> int:
        """Return where a scalar ends; the marks of a block scalar reach into the lines behind it."""
        end = int(event.end_mark.index)
        if event.style in ("|", ">"):
            start = int(event.start_mark.index)
            return start + len(self.text[start:end].rstrip())
        return end

    def _refuse_tag(self, event: Any, kind: str) -> None:
        if event.tag not in (None, "!", f"{_TAG}{kind}"):
            raise self._strange(event.tag, event, event.start_mark.index)

    def _strange(self, tag: str, event: Any, at: int) -> Unreadable:
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

    def _items(self, event: Any, depth: int) -> Items:
        nodes = []
        while not isinstance(self.loader.peek_event(), self.yaml.SequenceEndEvent):
            nodes.append(self.node(depth + 1))
        start, end = event.start_mark.index, self.loader.get_event().end_mark.index
        if not event.flow_style and nodes:
            end = max(start, nodes[-1].span.end)
        return Items(nodes=tuple(nodes), span=Span(start, end))

    def _entries(self, event: Any, depth: int) -> Entries:
        own: list[KeyValue] = []
        merged: list[Entries] = []
        last_end = event.start_mark.index
        while not isinstance(self.loader.peek_event(), self.yaml.MappingEndEvent):
            is_merge, key = self._key()
            node = self.node(depth + 1)
            last_end = max(key.key_span.end, node.span.end)
            if is_merge:
                merged += self._merged(node, key.key_span.start)
            else:
                own.append(replace(key, node=node))
        start, end = event.start_mark.index, self.loader.get_event().end_mark.index
        if not event.flow_style:
            end = last_end
        return Entries(entries=(*_inherited(own, merged), *own), span=Span(start, end))

    def _key(self) -> tuple[bool, KeyValue]:
        event = self.loader.peek_event()
        at = event.start_mark.index
        if isinstance(event, self.yaml.AliasEvent):
            node = self.node(MAX_DEPTH)
        elif isinstance(event, self.yaml.ScalarEvent):
            tag = self._tag(event)
            if tag == _MERGE:
                self.loader.get_event()
                return True, KeyValue(
                    key="<<", key_span=Span(at, self._end(event)), node=Scalar(value=None, span=Span(at, at))
                )
            node = self.node(MAX_DEPTH)
        else:
            node = Items(nodes=(), span=Span(at, at))
        if not isinstance(node, Scalar):
            raise unreadable(
                self.text,
                at,
                "a list or a mapping stands where a key should be",
                why="keys of a configuration are strings",
                fix="write a string for the key",
            )
        key = event.value if isinstance(event, self.yaml.ScalarEvent) else str(node.value)
        return False, KeyValue(key=key, key_span=Span(at, event.end_mark.index), node=node)

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
        self._count(sum(len(mapping.entries) for mapping in mappings), at)
        return mappings


def _inherited(own: list[KeyValue], merged: list[Entries]) -> list[KeyValue]:
    """Return the merged entries that no other one overrides."""
    seen = {entry.key for entry in own}
    inherited = []
    for mapping in merged:
        for entry in reversed(mapping.entries):
            if entry.key not in seen:
                seen.add(entry.key)
                inherited.append(entry)
    return inherited


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
