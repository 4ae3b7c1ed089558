"""Files of prompts: what is read from each format, and what is said of lines that are no prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.launching.generate.prompts import read_prompts_file

_TEXT, _JSONL = "prompts.txt", "prompts.jsonl"
_CHAT = '[{"role": "user", "content": "hi"}]'
_NO_CHAT = 'line 1: "messages" is not a list of objects with "role" and "content"'
_FIX = "fix the lines, or rename a plain text file with one prompt per line to .txt"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _read(text: str | bytes, name: str) -> list[tuple[Any, dict[str, Any]]]:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return [(line.prompt, line.fields) for line in read_prompts_file(name)]


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        ("one\ntwo\n", _TEXT, [("one", {"prompt": "one"}), ("two", {"prompt": "two"})]),
        ("last line without an end", _TEXT, [("last line without an end", None)]),
        ("  spaces stay  \n", _TEXT, [("  spaces stay  ", None)]),
        ("as on Windows\r\n", _TEXT, [("as on Windows", None)]),
        ("one\n\n \t\ntwo\n", _TEXT, [("one", None), ("two", None)]),
        ("\ufeffmarked\n", _TEXT, [("marked", None)]),
        ('"not JSON here"\n', _TEXT, [('"not JSON here"', None)]),
        ('"a string"\n', _JSONL, [("a string", {"prompt": "a string"})]),
        ('{"prompt": "p", "id": 7}\n', _JSONL, [("p", {"prompt": "p", "id": 7})]),
        (f'{{"messages": {_CHAT}}}', _JSONL, [([{"role": "user", "content": "hi"}], None)]),
        (f'{{"messages": {_CHAT}, "tools": []}}', _JSONL, [([{"role": "user", "content": "hi"}], None)]),
        ('{"prompt": "p", "tools": [1]}', _JSONL, [("p", None)]),
        ('\ufeff"marked"\r\n\n"next"', _JSONL, [("marked", None), ("next", None)]),
        ('"line\\nend"\n', _JSONL, [("line\nend", None)]),
        # JSON allows these within a string, though str.splitlines() would cut there.
        ('"one\u2028\u2029\x85two"\n', _JSONL, [("one\u2028\u2029\x85two", None)]),
        ('{"prompt": "p", "index": 1, "text": "", "\\ud83d": 0}', _JSONL, [("p", None)]),
    ],
)
def test_lines_are_prompts(text: str, form: str, expected: list[tuple[Any, Any]]) -> None:
    found = _read(text, form)
    assert [line[0] for line in found] == [line[0] for line in expected]
    assert all(line[1] in (fields, None) for (_, fields), line in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("hello", "line 1: invalid JSON: Expecting value at column 1"),
        ('"a" "b"', "line 1: invalid JSON: Extra data at column 5"),
        ('{"prompt": "cut', "line 1: invalid JSON: Unterminated string starting at at column 12"),
        ('{"prompt": "p", "x": NaN}', "line 1: invalid JSON: NaN is not a JSON number"),
        (
            f'{{"messages": {_CHAT}, "tools": [{{}}]}}',
            'line 1: "tools" beside "messages": what a template gets is "messages" alone',
        ),
        ('{"messages": [{"role": "user", "content": null}]}', _NO_CHAT),
        ("7", "line 1: neither a string nor an object"),
        ("null", "line 1: neither a string nor an object"),
        ('["p"]', "line 1: neither a string nor an object"),
        ("{}", "line 1: an empty object"),
        ('{"id": 7}', 'line 1: no "prompt" and no "messages" among id'),
        (
            '{"promt": "p", "id": 7}',
            'line 1: no "prompt" and no "messages" among promt, id: is "promt" meant to be "prompt"?',
        ),
        (
            '{"message": []}',
            'line 1: no "prompt" and no "messages" among message: is "message" meant to be "messages"?',
        ),
        (f'{{"prompt": "p", "messages": {_CHAT}}}', 'line 1: both "prompt" and "messages"'),
        ('{"prompt": 7}', 'line 1: "prompt" is not a string'),
        ('{"prompt": ""}', "line 1: an empty prompt"),
        ('""', "line 1: an empty prompt"),
        (
            '{"prompt": "p", "completions": []}',
            'line 1: a field "completions", which is reserved for the result',
        ),
        ("[" * 100_000, "line 1: invalid JSON: lists and objects are nested too deep"),
        (r'"\ud83d"', "line 1: a lone surrogate (such as \\ud83d without its other half)"),
        ('{"messages": []}', _NO_CHAT),
        ('{"messages": "hi"}', _NO_CHAT),
        ('{"messages": ["hi"]}', _NO_CHAT),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', _NO_CHAT),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, finding: str) -> None:
    with pytest.raises(UserError) as caught:
        _read(line, _JSONL)
    assert (caught.value.rule, caught.value.found) == ("prompts-broken", f"{_JSONL}: {finding}")


def test_messages_of_tool_calls_may_have_no_content() -> None:
    chat = '[{"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]}]'
    assert len(_read(f'{{"messages": {chat}}}', _JSONL)) == 1


def test_the_first_lines_that_are_none_are_all_named() -> None:
    lines = ['"good"'] * 6 + ["bad", '"good"', "{}", *"3456789"]
    with pytest.raises(UserError) as caught:
        _read("\n".join(lines), _JSONL)
    assert str(caught.value) == (
        "error[prompts-broken]: the file of prompts has invalid lines\n"
        f"  found: {_JSONL}: line 7: invalid JSON: Expecting value at column 1; "
        "line 9: an empty object; lines 10, 11, 12, 13, 14 and 2 more: neither a string nor an object\n"
        '  why:   a line of JSONL is a string, or an object with "prompt" or "messages"\n'
        f"  fix:   {_FIX}"
    )


@pytest.mark.parametrize(
    ("data", "rule", "found", "fix"),
    [
        (b"", "prompts-empty", "prompts.jsonl: it is empty", "name a file with one prompt per line"),
        (
            b"\xef\xbb\xbf",
            "prompts-empty",
            "prompts.jsonl: it is empty",
            "name a file with one prompt per line",
        ),
        (
            b"\n \r\n\n",
            "prompts-empty",
            "prompts.jsonl: only blank lines",
            "name a file with one prompt per line",
        ),
        (b'"a"\n"\xff"\n', "prompts-no-text", "prompts.jsonl: line 2", "save it as UTF-8"),
        ('"a"'.encode("utf-16"), "prompts-no-text", "prompts.jsonl: line 1", "save it as UTF-8"),
        (
            b'["a",\n "b"]\n',
            "prompts-broken",
            None,
            "write one element of the list a line: jq -c '.[]' prompts.jsonl",
        ),
    ],
)
def test_a_file_without_prompts(data: bytes, rule: str, found: str | None, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        _read(data, _JSONL)
    assert (caught.value.rule, caught.value.fix) == (rule, fix)
    assert found in (None, caught.value.found)
