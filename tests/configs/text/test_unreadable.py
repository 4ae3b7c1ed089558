"""Errors for files that can't be read, and for HJSON that accelerate can't read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zerofit.configs.document import Format
from zerofit.configs.text.json import why_not_json
from zerofit.configs.text.read import read_document
from zerofit.core.errors import Unreadable

_BROKEN = {
    "ds_config.json": (
        "",
        "[1]",
        '"x"',
        "3",
        '{"a" 1}',
        '{"a": }',
        '{"a": True}',
        '{"a": yes}',
        '{"a": .5}',
        '{"a": +1}',
        '{"a": 01}',
        '{"a": bf16}',
        '{"a": "x\n"}',
        '{"a": "\tx"}',
        '{"a": "x',
        '{"a": "\\x"}',
        '{"a": "\\u12"}',
        '{"a": "\\ud800"}',
        '{"a": 1 "b": 2}',
        '{"a": [1 2]}',
        '{"a": [1',
        '{"a": 1',
        '{"a": 1}}',
        '{"a": 1}\n{"b": 2}',
        '{"a":: 1}',
        '{"a": 1' + "0" * 1000 + "}",
        '{"a":' + "[" * 64,
    ),
    "ds_config.hjson": (
        "# x",
        "[1]",
        "{a: 1",
        "{a",
        "{a b: 1}",
        "{a: [1",
        "{: 1}",
        "{a: }",
        "{a: ,}",
        '{"a" 1}',
        '{a: "x',
        '{a: "\\x"}',
        '{a: "\\u-005"}',
        "a: '''x",
        "{a: 1}\nx",
        "{a: 1e999}",
        "/* x",
        '{a: "\\ud800"}',
        "{a: 1" + "0" * 1000 + "}",
        "{" + " " * 500 + "a: '''x'''}",
        "hello",
        "{a:" * 65,
    ),
    "accelerate.yaml": (
        "# x",
        "---",
        "~",
        "- a",
        "3",
        "a: 1\n--- \nb: 2",
        "a:\n\tb: 1",
        "a: b: c",
        "a: 1\n  b: 2",
        "a\nb: 1",
        "a: 1\n b: 2",
        'a: "x',
        "a: [1",
        "a: {b",
        "{a: 1, b: 2",
        'a: "\\q"',
        "a: 2024-01-01",
        "a: !!binary eA==",
        "a: <<",
        "a: =",
        "a: !!set {x}",
        "a: !!python/object:os.system x",
        "a: !x y",
        "!!python/dict {a: 1}",
        "a: !!int x",
        "a: 0x_",
        "? [a]\n: 1",
        "a: &x [*x]",
        "a: *x",
        "a: &x 1\nb: &x 2",
        "<<: 1",
        "a: \x7f",
        "a: 1" + "0" * 1000,
        'a: "\\ud800"',
        "a: @x",
        "a: `x`",
        "a: %x",
        "a: " + "[" * 64,
        "a: 1\nb",
        "%YAML 3.0\n---\na: 1",
        "- a\nb: 1",
        "a: 1\n- b",
        'a: "x" y',
        "a:\n  b: 1\n c: 2",
    ),
}
_ONLY_HJSON = (
    '{"a": 1,}',
    '{"a": [1,]}',
    '{"a": 1 // x\n}',
    "{# x\n}",
    '{"a": 1} // x',
    "{'a': 1}",
    "{a: 1}",
    "{\"a\": 'x'}",
    "{1: 2}",
    '\ufeff{"a": 1}',
    '{"a": 1\u0661}',
)


def _said(text: str, error: Unreadable) -> str:
    shown = repr(text) if len(text) < 100 else f"{text[:20]!r}... {len(text)} characters"
    where = f"{error.line}:{error.column}"
    return f"{shown}\n  {where}: {error.problem}\n  why: {error.why}\n  fix: {error.fix}\n"


@pytest.mark.parametrize("name", _BROKEN)
def test_what_is_wrong_is_said_in_words_of_our_own(name: str, golden: Callable[[str, str], None]) -> None:
    lines = []
    for text in _BROKEN[name]:
        with pytest.raises(Unreadable) as caught:
            read_document(text, name=name)
        lines.append(_said(text, caught.value))
    golden("".join(lines), f"unreadable/{name}.txt")


def test_what_only_hjson_allows_is_read_and_named(golden: Callable[[str, str], None]) -> None:
    lines = []
    for text in _ONLY_HJSON:
        document = read_document(text, name="ds_config.json")
        error = why_not_json(text)
        assert document.format is Format.HJSON
        assert error
        lines.append(_said(text, error))
    golden("".join(lines), "unreadable/only_hjson.txt")


def test_json_has_nothing_that_python_refuses() -> None:
    assert why_not_json('{"a": [NaN, -Infinity]}') is None
