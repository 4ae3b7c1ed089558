"""Laws over random documents: the tree is what the stack reads, an edit changes what it says and no more."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import hjson
import mutations
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofit.configs.document import Edit, Entries, Format, RemoveKey, RenameKey, SetValue, plain
from zerofit.configs.text.edits import Uneditable, apply_edits
from zerofit.configs.text.read import read_document
from zerofit.core.errors import Unreadable

settings.register_profile("zerofit", derandomize=True, deadline=None, max_examples=300, database=None)
settings.load_profile("zerofit")

_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), max_size=8)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT
    | st.sampled_from(["no", "auto", "1e-5", "0x10", "2024-01-01", "a: b", "# x", "'", "~", "-", "bf16"])
)
_KEYS = st.text("abc_é .#'", min_size=1, max_size=4) | st.sampled_from(
    ["on", "1", "<<", "stage", "~", "null"]
)
_MAPPINGS = st.recursive(
    st.dictionaries(_KEYS, _SCALARS | st.lists(_SCALARS, max_size=3), max_size=4),
    lambda inner: st.dictionaries(_KEYS, _SCALARS | inner | st.lists(inner, max_size=2), max_size=4),
    max_leaves=12,
)
_LAYOUTS = st.sampled_from([None, 0, 2, 4, "\t"])


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _has_only_strings_for_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_only_strings_for_keys(one) for key, one in value.items())
    return not isinstance(value, list) or all(map(_has_only_strings_for_keys, value))


def _paths(node: Entries, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for entry in node.entries:
        found.append((*path, entry.key))
        if isinstance(entry.node, Entries):
            found += _paths(entry.node, (*path, entry.key))
    return found


def _any_edit(draw: Any, root: Entries) -> Edit:
    paths = _paths(root)
    mappings = [(), *(path for path in paths if isinstance(_node(root, path), Entries))]
    kinds = ["add", "set", "rename", "remove"] if paths else ["add"]
    kind = draw(st.sampled_from(kinds))
    if kind == "add":
        parent = draw(st.sampled_from(mappings))
        return SetValue(document="x", path=(*parent, draw(_KEYS)), value=draw(_SCALARS))
    path = draw(st.sampled_from(paths))
    if kind == "set":
        return SetValue(document="x", path=path, value=draw(_SCALARS))
    if kind == "rename":
        return RenameKey(document="x", path=path, key=draw(_KEYS))
    return RemoveKey(document="x", path=path)


def _node(root: Entries, path: tuple[str, ...]) -> Any:
    node: Any = root
    for key in path:
        node = node.find(key).node
    return node


def _intended(root: Entries, edit: Edit) -> Any:
    value = plain(root)
    holder = value
    for key in edit.path[:-1]:
        holder = holder[key]
    match edit:
        case SetValue():
            holder[edit.path[-1]] = edit.value
        case RenameKey():
            holder[edit.key] = holder.pop(edit.path[-1])
        case RemoveKey():
            del holder[edit.path[-1]]
    return value


def _has_a_taken_name(root: Entries, edit: Edit) -> bool:
    return isinstance(edit, RenameKey) and _node(root, edit.path[:-1]).find(edit.key) is not None


@given(_MAPPINGS, _LAYOUTS, st.booleans())
def test_json_is_read_as_python_reads_it(value: Any, indent: Any, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    document = read_document(text, name="ds_config.json")
    assert document.format is Format.JSON
    assert _same(plain(document.root), json.loads(text))


@given(_MAPPINGS, _LAYOUTS, st.data())
def test_an_edit_of_json_gives_the_intended_value(value: Any, indent: Any, data: st.DataObject) -> None:
    text = json.dumps(value, indent=indent)
    document = read_document(text, name="x")
    edit = _any_edit(data.draw, document.root)
    if _has_a_taken_name(document.root, edit):
        with pytest.raises(Uneditable):
            apply_edits(document, [edit])
        return
    changed = apply_edits(document, [edit])
    assert _same(json.loads(changed), _intended(document.root, edit))
    if isinstance(edit, SetValue) and document.at(*edit.path):
        span = document.at(*edit.path).node.span
        assert changed.startswith(text[: span.start])
        assert changed.endswith(text[span.end :])


@settings(max_examples=150)
@given(_MAPPINGS, st.sampled_from([None, True, False]), st.booleans(), st.data())
def test_an_edit_of_yaml_gives_the_intended_value(
    value: Any, flow: Any, is_crlf: bool, data: st.DataObject
) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    if is_crlf:
        text = text.replace("\n", "\r\n")
    document = read_document(text, name="x.yaml")
    assert _same(plain(document.root), value)
    edit = _any_edit(data.draw, document.root)
    if _has_a_taken_name(document.root, edit):
        return
    changed = apply_edits(document, [edit])
    assert _same(yaml.safe_load(changed), _intended(document.root, edit))
    assert is_crlf == ("\r\n" in changed) or "\n" not in changed


@settings(max_examples=500)
@given(st.integers(0, 2**32), st.sampled_from(["a.json", "a.hjson", "a.yaml"]))
def test_a_damaged_document_is_read_as_the_stack_reads_it_or_refused(seed: int, name: str) -> None:
    random = Random(seed)
    samples = {"a.json": [mutations.JSON, mutations.HJSON], "a.hjson": [mutations.HJSON]}
    text = mutations.mutate(random.choice(samples.get(name, [mutations.YAML])), random)
    try:
        document = read_document(text, name=name)
    except Unreadable as refused:
        error: Unreadable | None = refused
    else:
        error = None
    if error:
        assert "\n" not in error.problem + error.why + error.fix
        assert 1 <= error.line <= len(text.splitlines()) + 1
        return
    loads = {Format.JSON: json.loads, Format.HJSON: hjson.loads, Format.YAML: yaml.safe_load}
    value = loads[document.format](text)
    if _has_only_strings_for_keys(
        value
    ):  # a key such as 1.5e+3 stays as it is written, and json writes 1500.0
        assert _same(plain(document.root), json.loads(json.dumps(value)))


@given(st.integers(0, 2**32), st.data())
def test_an_edit_of_a_damaged_document_is_right_or_refused(seed: int, data: st.DataObject) -> None:
    random = Random(seed)
    name, sample = random.choice(
        [
            ("x.json", mutations.JSON),
            ("x.json", mutations.HJSON),
            ("x.yaml", mutations.YAML.replace("*", "").replace("&", "").replace("<<", "x")),
        ]
    )
    try:
        document = read_document(mutations.mutate(sample, random, most=1), name=name)
        edit = _any_edit(data.draw, document.root)
        changed = apply_edits(document, [edit])
    except (Unreadable, Uneditable):
        return
    again = read_document(changed, name=name)
    assert again.format is document.format
    assert again.at(
        *edit.path[:-1], edit.key if isinstance(edit, RenameKey) else edit.path[-1]
    ) or isinstance(edit, RemoveKey)
