"""What is said of HJSON that can't be read."""

from __future__ import annotations

import pytest

from zerofit.configs.text.read import read_document
from zerofit.core.errors import Unreadable

_UNREADABLE = {
    (
        "the file holds nothing but comments",
        "a configuration is a mapping of keys to values",
        "write the configuration, or leave the file out",
    ): [("# x", 1, 1)],
    (
        "the file holds a list where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [("[1]", 1, 1)],
    ("{ is not closed", "each { needs its }", "close it with }"): [("{a: 1", 1, 1)],
    (
        "a key and its colon are missing: found a",
        "a mapping is written key: value, and a key with spaces or brackets stands in quotes",
        "write a key, a colon and a value",
    ): [("{a", 1, 2), ("{a b: 1}", 1, 2)],
    ("[ is not closed", "each [ needs its ]", "close it with ]"): [("{a: [1", 1, 5)],
    (
        "a key and its colon are missing: found :",
        "a mapping is written key: value, and a key with spaces or brackets stands in quotes",
        "write a key, a colon and a value",
    ): [("{: 1}", 1, 2)],
    (
        "a value is missing: found }",
        "a value is a string, a number, true, false, null, a list or a mapping",
        "write the value",
    ): [("{a: }", 1, 5)],
    (
        "a value is missing: found ,",
        "a value is a string, a number, true, false, null, a list or a mapping",
        "write the value",
    ): [("{a: ,}", 1, 5)],
    (
        "a colon is missing behind the key 'a': found 1",
        "a mapping is written key: value",
        "put a colon and the value behind the key",
    ): [('{"a" 1}', 1, 6)],
    (
        "a string is not closed, or holds an escape that HJSON does not have",
        "a string ends at its closing quote; a backslash begins an escape such as \\n or \\u00e9",
        "close the string, and write a backslash that is meant twice",
    ): [('{a: "x', 1, 5), ('{a: "\\x"}', 1, 5), ("a: '''x", 1, 4)],
    (
        "text stands behind the end of the configuration: x",
        "an HJSON file holds one value",
        "remove what stands behind the last closing bracket, or the bracket that closes too early",
    ): [("{a: 1}\nx", 2, 1)],
    (
        "the number 1e999 is too large",
        "the hjson library, with which DeepSpeed reads the file, fails on it",
        "write a number below 1e308",
    ): [("{a: 1e999}", 1, 5)],
    ("a comment is not closed", "a comment that begins with /* ends with */", "close the comment with */"): [
        ("/* x", 1, 1)
    ],
    (
        "a string holds half of a character",
        "escapes from \\ud800 to \\udfff stand for a character only in pairs",
        "write the character itself",
    ): [('{a: "\\ud800"}', 1, 5)],
    (
        "a number has more than 1000 characters",
        "no setting is so large or so exact",
        "write a number of at most 20 digits",
    ): [("{a: 1" + "0" * 1000 + "}", 1, 5)],
    (
        "a string in ''' begins behind column 500",
        "such a string has lines of its own, indented like its first line",
        "begin the string on a line of its own",
    ): [("{" + " " * 500 + "a: '''x'''}", 1, 505)],
    (
        "a key and its colon are missing: found h",
        "a mapping is written key: value, and a key with spaces or brackets stands in quotes",
        "write a key, a colon and a value",
    ): [("hello", 1, 1)],
    (
        "mappings and lists are nested more than 64 levels deep",
        "no configuration is nested so deep",
        "give the configuration's file",
    ): [("{a:" * 65, 1, 193)],
}


@pytest.mark.parametrize(
    ("text", "words", "line", "column"),
    [(text, words, line, column) for words, cases in _UNREADABLE.items() for text, line, column in cases],
)
def test_what_is_wrong_is_said_in_words_of_our_own(
    text: str, words: tuple[str, str, str], line: int, column: int
) -> None:
    with pytest.raises(Unreadable) as caught:
        read_document(text, name="ds_config.hjson")
    error = caught.value
    assert (error.problem, error.why, error.fix, error.line, error.column) == (*words, line, column)
