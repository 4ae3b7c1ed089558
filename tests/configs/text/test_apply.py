"""Edits: the text around them stays as it is, and what can't be changed safely is refused in plain words."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.configs.document import Edit, RemoveKey, RenameKey, SetValue
from zerofit.configs.text.edits import Uneditable, apply_edits
from zerofit.configs.text.read import read_document


def _set(path: str, value: Any) -> Edit:
    return SetValue(document="x", path=tuple(path.split(".")), value=value)


def _rename(path: str, key: str) -> Edit:
    return RenameKey(document="x", path=tuple(path.split(".")), key=key)


def _remove(path: str) -> Edit:
    return RemoveKey(document="x", path=tuple(path.split(".")))


_JSON = [
    ('{"a": 1, "b": 2, "c": 3}\n', [_remove("a")], '{"b": 2, "c": 3}\n'),
    ('{"a": 1, "b": 2, "c": 3}\n', [_remove("b")], '{"a": 1, "c": 3}\n'),
    ('{"a": 1, "b": 2, "c": 3}\n', [_remove("c")], '{"a": 1, "b": 2}\n'),
    ('{"a": 1, "b": 2, "c": 3}', [_remove("a"), _remove("c"), _remove("b")], "{}"),
    ('{ "a": 1 }', [_remove("a")], "{}"),
    ('{"a": 1, "b": 2, "a": 3}', [_remove("a")], '{"b": 2}'),
    ('{"a": 1, "a": 3}', [_set("a", 4)], '{"a": 1, "a": 4}'),
    ('{\r\n\t"a" : 1,\r\n\r\n\t"b" : 2\r\n}\r\n', [_set("c", "x")],
     '{\r\n\t"a" : 1,\r\n\r\n\t"b" : 2,\r\n\t"c" : "x"\r\n}\r\n'),
    ('{\n  "a": {}\n}', [_set("a.b", None)], '{\n  "a": {"b": null}\n}'),
    ('{"a":{}}', [_set("a.b", True)], '{"a":{"b": true}}'),
    ('{"a":1}', [_set("b", 1e-5)], '{"a":1,"b":1e-05}'),
    ('{"a":  {"b": 1} }', [_rename("a", "z"), _set("a.b", "x\n"), _set("a.c", 1)],
     '{"z":  {"b": "x\\n", "c": 1} }'),
    ('{"a": {"b": 1}, "c": 2}', [_remove("a"), _remove("a.b")], '{"c": 2}'),
    ('{"a": [1, 2], "b": 1}', [_set("a", "auto"), _set("a", "auto")], '{"a": "auto", "b": 1}'),
    ("{}", [], "{}"),
]  # fmt: skip
_YAML = [
    ("# top\na: 1  # one\nb: 2\n", [_remove("a")], "# top\nb: 2\n"),
    ("a: 1\nb: 2", [_remove("b")], "a: 1"),
    ("a: 1\n# last\n", [_remove("a")], "{}\n# last\n"),
    ("a:\n  b: 1\nc: 2\n", [_remove("a.b")], "a: {}\nc: 2\n"),
    ("a:\n- b: 1\n  c: 2\nd: 1\n", [_remove("d")], "a:\n- b: 1\n  c: 2\n"),
    ("a: {b: 1, c: 2}\n", [_remove("a.c"), _set("a.d", "no")], "a: {b: 1, d: 'no'}\n"),
    ("a:\n    b: x   # why\n\n# end\n", [_set("a.c", "cpu")], "a:\n    b: x   # why\n    c: cpu\n\n# end\n"),
    ("a:\r\n  b: |\r\n    t\r\nc: 1\r\n", [_set("a.d", 1)], "a:\r\n  b: |\r\n    t\r\n  d: 1\r\nc: 1\r\n"),
    ("a:\nb: 'x'\nc: \"x\"\n", [_set("a", 1), _set("b", "it's"), _set("c", "y")],
     "a: 1\nb: 'it''s'\nc: \"y\"\n"),
    ("a:   # none\n  b: 1\n", [_set("a", "auto")], "a:   # none\n  auto\n"),
    ("a:\n  b: 1\nc: 1\n", [_set("a", 1e16)], "a: 1.0e+16\nc: 1\n"),
    ("'a': true\n", [_rename("a", "b"), _set("a", float("inf"))], "'b': .inf\n"),
    ("{}\n", [_set("on", "1e-5")], "{'on': 1e-5}\n"),
    ("{}\n", [_set("a", "why?"), _set("b", ":0")], "{a: 'why?', b: ':0'}\n"),
]  # fmt: skip
_HJSON = [
    ("{\n  // x\n  a: cpu, gpu\n  b: 1, # y\n}\n", [_set("a", "none"), _remove("b")],
     '{\n  // x\n  a: "none"\n}\n'),
    ('{\n  "a": 1,\n  "b": 2, // y\n}', [_set("c", True), _rename("b", "z")],
     '{\n  "a": 1,\n  "z": 2, // y\n  "c": true\n}'),
    ("a: 1\nb: {c: 1, d: 2}\n", [_set("e", 3), _remove("b.c")], "a: 1\nb: {d: 2}\ne: 3\n"),
    ('\ufeff{"a": 1}', [_set("a", 2)], '\ufeff{"a": 2}'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "edits", "expected"),
    [
        *(("x", *case) for case in _JSON),
        *(("x.yaml", *case) for case in _YAML),
        *(("x.hjson", *case) for case in _HJSON),
    ],
)
def test_only_what_is_named_changes(name: str, text: str, edits: list[Edit], expected: str) -> None:
    assert apply_edits(read_document(text, name=name), edits) == expected


_REFUSED = [
    ("x", '{"a": 1}', [_set("b.c", 1)], "there is no mapping b to change c in"),
    ("x", '{"a": 1}', [_set("a.c", 1)], "there is no mapping a to change c in"),
    ("x", '{"a": 1}', [_set("a", [1])], "a list is not a single value"),
    ("x", '{"a": 1}', [_remove("b")], "there is no key b to remove"),
    ("x", '{"a": 1}', [_rename("b", "c")], "there is no key b to rename"),
    ("x", '{"a": 1, "b": 2}', [_rename("a", "b")], "a can't become b, which already exists"),
    ("x", '{"a": 1, "a": 2}', [_rename("a", "b")], "the key a is repeated"),
    ("x", '{"a": 1}', [_set("a", 1), _set("a", True)], "two different changes of a are requested"),
    ("x", '{"a": {"b": 1}}', [_remove("a"), _set("a.b", 2)], "a.b is to be both changed and removed"),
    ("x", '{"a": 1}', [_set("a", "\ud800")], "a can't be changed without changing the text around it"),
    ("x.hjson", "{a: 1, /* x */ b: 2}", [_remove("a")], "there is a comment beside a"),
    ("x.hjson", "{ /* x */ }", [_set("a", 1)], "there is a comment in the empty mapping"),
    ("x.hjson", "{a: 1}", [_set("a", float("nan"))],
     "a can't be changed without changing the text around it"),
    ("x.yaml", "a: &a {b: 1}\nc: *a\n", [_set("a.b", 2)],
     "with its YAML anchors, aliases or merges one change would affect several places"),
    ("x.yaml", "<<: {a: 1}\nb: 1\n", [_remove("a")],
     "with its YAML anchors, aliases or merges one change would affect several places"),
    ("x.yaml", "? a\n: 1\n", [_remove("a"), _set("b", 2)],
     "b can't be changed without changing the text around it"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "edits", "expected"), _REFUSED)
def test_what_has_no_safe_place_is_refused(name: str, text: str, edits: list[Edit], expected: str) -> None:
    with pytest.raises(Uneditable) as caught:
        apply_edits(read_document(text, name=name), edits)
    assert str(caught.value) == expected
