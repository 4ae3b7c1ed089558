"""Trees: every value as Python's own parsers give it, every key and value with its exact place."""

from __future__ import annotations

import pytest

from zerofit.configs.document import Entries, Format, Items, Node
from zerofit.configs.text.read import decode, read_document, repeated_keys
from zerofit.configs.text.unreadable import MAX_BYTES
from zerofit.core.errors import Unreadable
from zerofit.core.setting import Place


def _pieces(node: Node, text: str) -> object:
    """Return a tree as the pieces of the text that its spans mark."""
    if isinstance(node, Items):
        return [_pieces(item, text) for item in node.nodes]
    if isinstance(node, Entries):
        return {
            text[entry.key_span.start : entry.key_span.end]: _pieces(entry.node, text)
            for entry in node.entries
        }
    return text[node.span.start : node.span.end]


_TREES = [
    (
        "a.json",
        '{"a" : 1.50, "\\u0062": [true, null, NaN, "x\\n"],\r\n\t"c": {}}',
        {'"a"': "1.50", '"\\u0062"': ["true", "null", "NaN", '"x\\n"'], '"c"': {}},
    ),
    (
        "a.hjson",
        '# top\na: cpu # no comment\n"b": [1 , 0.50]\n'
        "c: {d: 'x', e: true /* y */}\nf:\n  '''\n  two\n  '''\n",
        {
            "a": "cpu # no comment",
            '"b"': ["1", "0.50"],
            "c": {"d": "'x'", "e": "true"},
            "f": "'''\n  two\n  '''",
        },
    ),
    (
        "a.yaml",
        "a: yes  # x\n'b':\n- c: 0x10\n  d: |\n    x\n\n- {e: , f: \"g\"}\nh:\n",
        {"a": "yes", "'b'": [{"c": "0x10", "d": "|\n    x"}, {"e": "", "f": '"g"'}], "h": ""},
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), _TREES)
def test_every_span_marks_exactly_its_piece_of_the_text(name: str, text: str, expected: object) -> None:
    assert _pieces(read_document(text, name=name).root, text) == expected


_VALUES = [
    ("a.json", '{"a": 1, "a": 2}', {"a": 2}, Format.JSON),
    ("a.json", '{"a": 1e400, "b": -0.0, "c": 10}', {"a": float("inf"), "b": 0.0, "c": 10}, Format.JSON),
    ("a.json", '{"a": 1,}', {"a": 1}, Format.HJSON),
    ("a.json", '\ufeff{"a": 1}', {"a": 1}, Format.HJSON),
    ("config", '{"a": 1}', {"a": 1}, Format.JSON),
    ("a.HJSON", '{"a": 2.0}', {"a": 2}, Format.HJSON),
    ("a.yml", "a: 'no'\nb: no\nc: 1e-5\nd: 1.e-5\n", {"a": "no", "b": False, "c": "1e-5", "d": 1e-5}, "yaml"),
    ("a.yaml", "1: a\non: b\n~: c\n", {"1": "a", "on": "b", "~": "c"}, "yaml"),
    ("a.yaml", "\ufeffa: 1\n", {"a": 1}, "yaml"),
    (
        "a.yaml",
        "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc:\n  <<: [*a, *b]\n  x: 5\nd: *a\n",
        {"a": {"x": 1, "y": 2}, "b": {"y": 3, "z": 4}, "c": {"x": 5, "y": 2, "z": 4}, "d": {"x": 1, "y": 2}},
        "yaml",
    ),
]


@pytest.mark.parametrize(("name", "text", "value", "language"), _VALUES)
def test_values_are_those_that_the_stack_reads(name: str, text: str, value: object, language: Format) -> None:
    document = read_document(text, name=name)
    assert ({entry.key: entry.plain for entry in document.root.entries}, document.format) == (value, language)


def test_a_given_format_wins_over_the_name() -> None:
    assert read_document("a: 1", name="x.json", format=Format.YAML).format is Format.YAML


def test_repeated_keys_are_found_in_lists_too_and_merges_repeat_nothing() -> None:
    text = '{"a": 1, "b": [{"c": 1, "c": 2}], "a": 3}'
    document = read_document(text, name="ds_config.json")
    assert [(path, entry.plain, entry.key_span.start) for path, entry, _ in repeated_keys(document.root)] == [
        (("b", "c"), 2, 24),
        (("a",), 3, 34),
    ]
    merged = read_document("a: &a {x: 1}\nb: {<<: *a, x: 2}\n", name="a.yaml")
    assert list(repeated_keys(merged.root)) == []


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_place_counts_lines_of_every_kind(line_end: str) -> None:
    document = read_document(f'{{{line_end}  "a": 1}}', name="ds_config.json")
    assert document.place(document.root.entries[0].key_span) == Place(file="ds_config.json", line=2, column=3)


_BYTES = [
    (b"x" * (MAX_BYTES + 1), f"the file is too large: {MAX_BYTES + 1} bytes", 1, 1),
    (b'{"a": 1,\n "\xe9"}', "the file contains the byte 0xe9, which is not UTF-8", 2, 3),
    (b"\xff\xfe{\x00}\x00", "the file contains the byte 0xff, which is not UTF-8", 1, 1),
]


@pytest.mark.parametrize(("data", "problem", "line", "column"), _BYTES)
def test_bytes_that_are_no_text_are_refused(data: bytes, problem: str, line: int, column: int) -> None:
    with pytest.raises(Unreadable) as caught:
        decode(data)
    assert (caught.value.problem, caught.value.line, caught.value.column) == (problem, line, column)


_RUBBISH = [
    ("\x00\x01", "the file contains the character U+0000", 1, 1),
    ('{"a":\n "\x1b"}', "the file contains the character U+001B", 2, 3),
    ('{"a": "\ud800"}', "the file contains the character U+D800", 1, 8),
    (" " * (MAX_BYTES + 1), f"the file is too large: {MAX_BYTES + 1} characters", 1, 1),
    ("\ufeff \n", "the file is empty", 1, 1),
]


@pytest.mark.parametrize("name", ["a.json", "a.hjson", "a.yaml"])
@pytest.mark.parametrize(("text", "problem", "line", "column"), _RUBBISH)
def test_what_is_no_configuration_is_refused(
    name: str, text: str, problem: str, line: int, column: int
) -> None:
    with pytest.raises(Unreadable) as caught:
        read_document(text, name=name)
    assert (caught.value.problem, caught.value.line, caught.value.column) == (problem, line, column)


_BOMBS = {
    "aliases of aliases": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "one alias often": f"a: &a [{'x,' * 200}]\nb: [{'*a,' * 200}]\n",
    "merges of merges": "a: &a {"
    + ",".join(f"k{number}: 1" for number in range(300))
    + "}\n"
    + "".join(f"b{number}: {{<<: *a}}\n" for number in range(100)),
}


@pytest.mark.parametrize("text", _BOMBS.values(), ids=_BOMBS.keys())
def test_a_yaml_bomb_is_refused(text: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_document(text, name="a.yaml")
    assert caught.value.problem == "the file has more than 20000 values"


def test_a_chain_of_aliases_is_as_deep_as_what_it_stands_for() -> None:
    chain = "a0: &a0 [x]\n" + "".join(f"a{number}: &a{number} [*a{number - 1}]\n" for number in range(1, 99))
    with pytest.raises(Unreadable) as caught:
        read_document(chain, name="a.yaml")
    assert caught.value.problem == "mappings and lists are nested more than 64 levels deep"
