"""What is said of YAML that can't be read."""

from __future__ import annotations

import pytest

from zerofit.configs.text.read import read_document
from zerofit.core.errors import Unreadable

_UNREADABLE = {
    (
        "the file holds nothing but comments where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [("# x", 1, 1)],
    (
        "the file holds nothing where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [("---", 1, 4), ("~", 1, 1)],
    (
        "the file holds a list where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [("- a", 1, 1)],
    (
        "the file holds a single value where a mapping should be",
        "a configuration is a mapping of keys to values",
        "write the settings as keys and values",
    ): [("3", 1, 1)],
    (
        "the file holds several documents",
        "yaml.safe_load, with which accelerate reads the file, refuses a second document",
        "keep one document, and remove the lines --- between them",
    ): [("a: 1\n--- \nb: 2", 2, 1)],
    (
        "a tab stands where YAML expects spaces",
        "YAML is indented with spaces only",
        "replace the tab by spaces",
    ): [("a:\n\tb: 1", 2, 1)],
    (
        "a colon stands where no key can be",
        "a line holds one key, and a value with a colon and a space in it needs quotes",
        "put the value in quotes, or check the indentation",
    ): [("a: b: c", 1, 5), ("a: 1\n  b: 2", 2, 4), ("a\nb: 1", 2, 2), ("a: 1\n b: 2", 2, 3)],
    ("a string or a bracket is not closed", "quotes and brackets stand in pairs", "close it"): [
        ('a: "x', 1, 4),
        ("a: [1", 1, 4),
        ("a: {b", 1, 4),
        ("{a: 1, b: 2", 1, 1),
    ],
    (
        "a string holds an escape that YAML does not have",
        "in double quotes a backslash begins an escape such as \\n",
        "use single quotes, or write the backslash twice",
    ): [('a: "\\q"', 1, 6)],
    (
        "a date stands where a setting's value should be",
        "a setting is a string, a number, true, false, null, a list or a mapping",
        "put it in quotes",
    ): [("a: 2024-01-01", 1, 4)],
    (
        "binary data stands where a setting's value should be",
        "a setting is a string, a number, true, false, null, a list or a mapping",
        "put it in quotes",
    ): [("a: !!binary eA==", 1, 4)],
    (
        "the merge sign << stands where a setting's value should be",
        "a setting is a string, a number, true, false, null, a list or a mapping",
        "put it in quotes",
    ): [("a: <<", 1, 4)],
    (
        "the sign = stands where a setting's value should be",
        "a setting is a string, a number, true, false, null, a list or a mapping",
        "put it in quotes",
    ): [("a: =", 1, 4)],
    (
        "the tag !!set is not for configurations",
        "yaml.safe_load, with which accelerate reads the file, makes plain values only",
        "remove the tag",
    ): [("a: !!set {x}", 1, 4)],
    (
        "the tag !!python/object:os.system is not for configurations",
        "yaml.safe_load, with which accelerate reads the file, makes plain values only",
        "remove the tag",
    ): [("a: !!python/object:os.system x", 1, 4)],
    (
        "the tag !x is not for configurations",
        "yaml.safe_load, with which accelerate reads the file, makes plain values only",
        "remove the tag",
    ): [("a: !x y", 1, 4)],
    (
        "the tag !!python/dict is not for configurations",
        "yaml.safe_load, with which accelerate reads the file, makes plain values only",
        "remove the tag",
    ): [("!!python/dict {a: 1}", 1, 1)],
    (
        "'x' is no int",
        "yaml.safe_load, with which accelerate reads the file, takes it for type int",
        "put it in quotes if it is a string",
    ): [("a: !!int x", 1, 4)],
    (
        "'0x_' is no int",
        "yaml.safe_load, with which accelerate reads the file, takes it for type int",
        "put it in quotes if it is a string",
    ): [("a: 0x_", 1, 4)],
    (
        "a list or a mapping stands where a key should be",
        "keys of a configuration are strings",
        "write a string for the key",
    ): [("? [a]\n: 1", 1, 3)],
    ("*x stands within &x", "a configuration that holds itself has no end", "write the value out"): [
        ("a: &x [*x]", 1, 8)
    ],
    (
        "*x has no anchor before it",
        "an alias repeats a value that an anchor has named",
        "put &x before the value, or the alias in quotes if it is a string",
    ): [("a: *x", 1, 4)],
    (
        "the anchor &x stands twice",
        "yaml.safe_load, with which accelerate reads the file, refuses a second one",
        "give each anchor a name of its own",
    ): [("a: &x 1\nb: &x 2", 2, 4)],
    (
        "<< has a value that is no mapping",
        "<< takes the entries of another mapping, or of a list of mappings",
        "give << an alias of a mapping",
    ): [("<<: 1", 1, 1)],
    (
        "the file holds the character U+007F",
        "YAML has no such character",
        "write it as an escape in double quotes, or remove it",
    ): [("a: \x7f", 1, 4)],
    (
        "a number has more than 1000 characters",
        "no setting is so large or so exact",
        "write a number of at most 20 digits",
    ): [("a: 1" + "0" * 1000, 1, 4)],
    (
        "a string holds half of a character",
        "escapes from \\ud800 to \\udfff stand for a character only in pairs",
        "write the character itself",
    ): [('a: "\\ud800"', 1, 4)],
    (
        "a value begins with a character that YAML keeps for itself",
        "@, ` and % begin no value",
        "put the value in quotes",
    ): [("a: @x", 1, 4), ("a: `x`", 1, 4), ("a: %x", 1, 4)],
    (
        "mappings and lists are nested more than 64 levels deep",
        "no configuration is nested so deep",
        "give the configuration's file",
    ): [("a: " + "[" * 64, 1, 67)],
    (
        "a colon is missing behind a key",
        "a mapping is written key: value",
        "put a colon and a space behind the key",
    ): [("a: 1\nb", 2, 2)],
    (
        "the file is not YAML",
        "here its lines can be read neither as keys and values nor as a list",
        "check the indentation, the colons and the quotes of this line and the one above",
    ): [("%YAML 3.0\n---\na: 1", 1, 1), ("- a\nb: 1", 2, 1), ("a: 1\n- b", 2, 1), ('a: "x" y', 1, 8)],
    (
        "a line is indented more than the ones beside it",
        "keys of one mapping begin in the same column",
        "indent it like the lines beside it",
    ): [("a:\n  b: 1\n c: 2", 3, 2)],
}


@pytest.mark.parametrize(
    ("text", "words", "line", "column"),
    [(text, words, line, column) for words, cases in _UNREADABLE.items() for text, line, column in cases],
)
def test_what_is_wrong_is_said_in_words_of_our_own(
    text: str, words: tuple[str, str, str], line: int, column: int
) -> None:
    with pytest.raises(Unreadable) as caught:
        read_document(text, name="accelerate.yaml")
    error = caught.value
    assert (error.problem, error.why, error.fix, error.line, error.column) == (*words, line, column)
