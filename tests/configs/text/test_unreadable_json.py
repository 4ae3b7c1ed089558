"""What is said of JSON that can't be read, and of HJSON that accelerate can't read."""

from __future__ import annotations

import pytest

from zerofit.configs.document import Format
from zerofit.configs.text.read import read_document, why_not_json
from zerofit.core.errors import Unreadable

_UNREADABLE = {
    (
        "the file is empty",
        "a configuration is a mapping of keys to values",
        "write the configuration, or leave the file out",
    ): [("", 1, 1)],
    (
        "the file holds a list where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [("[1]", 1, 1)],
    (
        "the file holds a string where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [('"x"', 1, 1)],
    (
        "the file holds a single value where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [("3", 1, 1)],
    (
        "a colon is missing behind the key 'a': found 1",
        'a mapping is written {"key": value}',
        "put a colon and the value behind the key",
    ): [('{"a" 1}', 1, 6)],
    (
        "a value is missing: found }",
        "a value is a string, a number, true, false, null, a list or a mapping",
        "write the value",
    ): [('{"a": }', 1, 7)],
    ("True is no JSON value", "JSON spells it true", "write true"): [('{"a": True}', 1, 7)],
    ("yes is no JSON value", "JSON spells it true", "write true"): [('{"a": yes}', 1, 7)],
    (
        ".5 is no JSON value",
        "a JSON number has no plus sign and a digit on both sides of its point",
        "write such a number",
    ): [('{"a": .5}', 1, 7)],
    (
        "+1 is no JSON value",
        "a JSON number has no plus sign and a digit on both sides of its point",
        "write such a number",
    ): [('{"a": +1}', 1, 7)],
    (
        "a comma or } is missing: found 1",
        "members are separated by commas",
        "put a comma between the members, or } behind the last one",
    ): [('{"a": 01}', 1, 8)],
    ("bf16 is no JSON value", "a JSON string stands in double quotes", 'write "bf16"'): [
        ('{"a": bf16}', 1, 7)
    ],
    (
        "a string is not closed on its line",
        "a JSON string ends at its closing quote, on the same line",
        'close the string with "',
    ): [('{"a": "x\n"}', 1, 7)],
    (
        "a string holds the character U+0009",
        "a JSON string holds tabs and other control characters as escapes only",
        "write a space, or \\t for a tab",
    ): [('{"a": "\tx"}', 1, 8)],
    ("a string is not closed", "a JSON string ends at its closing quote", 'close the string with "'): [
        ('{"a": "x', 1, 7)
    ],
    (
        "a string holds the broken escape \\x",
        'behind a backslash JSON allows one of " \\ / b f n r t, or u and four hexadecimal digits',
        "write the backslash twice",
    ): [('{"a": "\\x"}', 1, 8)],
    (
        "a string holds the broken escape \\u",
        'behind a backslash JSON allows one of " \\ / b f n r t, or u and four hexadecimal digits',
        "write the backslash twice",
    ): [('{"a": "\\u12"}', 1, 8)],
    (
        "a string holds half of a character",
        "escapes from \\ud800 to \\udfff stand for a character only in pairs",
        "write the character itself",
    ): [('{"a": "\\ud800"}', 1, 7)],
    (
        'a comma or } is missing: found "',
        "members are separated by commas",
        "put a comma between the members, or } behind the last one",
    ): [('{"a": 1 "b": 2}', 1, 9)],
    (
        "a comma or ] is missing: found 2",
        "members are separated by commas",
        "put a comma between the members, or ] behind the last one",
    ): [('{"a": [1 2]}', 1, 10)],
    ("[ is not closed", "each [ needs its ]", "close it with ]"): [('{"a": [1', 1, 7)],
    ("{ is not closed", "each { needs its }", "close it with }"): [('{"a": 1', 1, 1)],
    (
        "text stands behind the end of the configuration: }",
        "a JSON file holds one value",
        "remove what stands behind the last closing bracket, or the bracket that closes too early",
    ): [('{"a": 1}}', 1, 9)],
    (
        "text stands behind the end of the configuration: {",
        "a JSON file holds one value",
        "remove what stands behind the last closing bracket, or the bracket that closes too early",
    ): [('{"a": 1}\n{"b": 2}', 2, 1)],
    (
        "a value is missing: found :",
        "a value is a string, a number, true, false, null, a list or a mapping",
        "write the value",
    ): [('{"a":: 1}', 1, 6)],
    (
        "a number has more than 1000 characters",
        "no setting is so large or so exact",
        "write a number of at most 20 digits",
    ): [('{"a": 1' + "0" * 1000 + "}", 1, 7)],
    (
        "mappings and lists are nested more than 64 levels deep",
        "no configuration is nested so deep",
        "give the configuration's file",
    ): [('{"a":' + "[" * 64, 1, 69)],
}
_ONLY_HJSON = {
    ("a comma stands before the closing }", "JSON has no trailing commas", "remove the comma"): [
        ('{"a": 1,}', 1, 8)
    ],
    ("a comma stands before the closing ]", "JSON has no trailing commas", "remove the comma"): [
        ('{"a": [1,]}', 1, 9)
    ],
    ("a comment stands in JSON", "JSON has no comments", "remove the comment"): [
        ('{"a": 1 // x\n}', 1, 9),
        ("{# x\n}", 1, 2),
        ('{"a": 1} // x', 1, 10),
    ],
    ("a key stands in single quotes", "a JSON key is a string in double quotes", 'write the key as "key"'): [
        ("{'a': 1}", 1, 2)
    ],
    ("the key a has no quotes", "a JSON key is a string in double quotes", 'write the key as "key"'): [
        ("{a: 1}", 1, 2)
    ],
    (
        "a string stands in single quotes",
        "a JSON string stands in double quotes",
        'write "..." in place of the single quotes',
    ): [("{\"a\": 'x'}", 1, 7)],
    ("the key 1 has no quotes", "a JSON key is a string in double quotes", 'write the key as "key"'): [
        ("{1: 2}", 1, 2)
    ],
    (
        "the file begins with a byte order mark",
        "Python's json, with which accelerate and Trainer read the file, refuses the mark",
        "save the file as UTF-8 without a byte order mark",
    ): [('\ufeff{"a": 1}', 1, 1)],
    (
        "1\u0661 is no JSON value",
        "a JSON number has no plus sign and a digit on both sides of its point",
        "write such a number",
    ): [('{"a": 1\u0661}', 1, 7)],
}


@pytest.mark.parametrize(
    ("text", "words", "line", "column"),
    [(text, words, line, column) for words, cases in _UNREADABLE.items() for text, line, column in cases],
)
def test_what_is_wrong_is_said_in_words_of_our_own(
    text: str, words: tuple[str, str, str], line: int, column: int
) -> None:
    with pytest.raises(Unreadable) as caught:
        read_document(text, name="ds_config.json")
    error = caught.value
    assert (error.problem, error.why, error.fix, error.line, error.column) == (*words, line, column)


@pytest.mark.parametrize(
    ("text", "words", "line", "column"),
    [(text, words, line, column) for words, cases in _ONLY_HJSON.items() for text, line, column in cases],
)
def test_what_only_hjson_allows_is_read_and_named(
    text: str, words: tuple[str, str, str], line: int, column: int
) -> None:
    document = read_document(text, name="ds_config.json")
    error = why_not_json(document)
    assert document.format is Format.HJSON
    assert error
    assert (error.problem, error.why, error.fix, error.line, error.column) == (*words, line, column)


def test_json_has_nothing_that_python_refuses() -> None:
    assert why_not_json(read_document('{"a": [NaN, -Infinity]}', name="ds_config.json")) is None
