"""Lines of prompts: what each form reads, what is said of lines that are none."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.generation.prompt_lines import PromptFormat, read_prompt_lines

_TEXT, _JSONL = PromptFormat.TEXT, PromptFormat.JSONL
_CHAT = '[{"role": "user", "content": "hi"}]'
_FIX = "fix the lines, or rename a plain text file with one prompt per line to .txt"


def _read(text: str | bytes, form: PromptFormat) -> list[tuple[int, Any, dict[str, Any]]]:
    data = text.encode() if isinstance(text, str) else text
    found = read_prompt_lines(data, name="FILE", form=form)
    return [(line.number, line.prompt, line.fields) for line in found.lines]


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        ("one\ntwo\n", _TEXT, [(1, "one", {"prompt": "one"}), (2, "two", {"prompt": "two"})]),
        ("last line without an end", _TEXT, [(1, "last line without an end", None)]),
        ("  spaces stay  \n", _TEXT, [(1, "  spaces stay  ", None)]),
        ("as on Windows\r\n", _TEXT, [(1, "as on Windows", None)]),
        ("one\n\n \t\ntwo\n", _TEXT, [(1, "one", None), (4, "two", None)]),
        ("\ufeffmarked\n", _TEXT, [(1, "marked", None)]),
        ('"not JSON here"\n', _TEXT, [(1, '"not JSON here"', None)]),
        ('"a string"\n', _JSONL, [(1, "a string", {"prompt": "a string"})]),
        ('{"prompt": "p", "id": 7}\n', _JSONL, [(1, "p", {"prompt": "p", "id": 7})]),
        (f'{{"messages": {_CHAT}}}', _JSONL, [(1, [{"role": "user", "content": "hi"}], None)]),
        (f'{{"messages": {_CHAT}, "tools": []}}', _JSONL, [(1, [{"role": "user", "content": "hi"}], None)]),
        ('{"prompt": "p", "tools": [1]}', _JSONL, [(1, "p", None)]),
        ('\ufeff"marked"\r\n\n"next"', _JSONL, [(1, "marked", None), (3, "next", None)]),
        ('"line\\nend"\n', _JSONL, [(1, "line\nend", None)]),
        # JSON allows these within a string, though str.splitlines() would cut there.
        ('"one\u2028\u2029\x85two"\n', _JSONL, [(1, "one\u2028\u2029\x85two", None)]),
        ('{"prompt": "p", "index": 1, "text": "", "\\ud83d": 0}', _JSONL, [(1, "p", None)]),
    ],
)
def test_lines_are_prompts(text: str, form: PromptFormat, expected: list[tuple[int, Any, Any]]) -> None:
    found = _read(text, form)
    assert [line[:2] for line in found] == [line[:2] for line in expected]
    assert all(line[2] in (fields, None) for (_, _, fields), line in zip(found, expected, strict=True))


def test_blank_lines_are_counted_and_the_end_of_the_last_line_is_none() -> None:
    assert read_prompt_lines(b"one\n\n\ntwo\n", name="FILE", form=_TEXT).num_blank == 2


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
        ('{"messages": [{"role": "user", "content": null}]}', 'line 1: message 1 has null as "content"'),
        ("7", "line 1: a number, not a string or an object"),
        ("null", "line 1: null, not a string or an object"),
        ('["p"]', "line 1: a list, not a string or an object"),
        ("{}", "line 1: an empty object"),
        ('{"id": 7}', 'line 1: no "prompt" and no "messages" among id'),
        (
            '{"promt": "p", "id": 7}',
            'line 1: no "prompt" and no "messages" among promt, id: is "promt" meant to be "prompt"?',
        ),
        ('{"message": []}', None),
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
        ('{"messages": []}', 'line 1: "messages" is not a list of messages'),
        ('{"messages": "hi"}', 'line 1: "messages" is not a list of messages'),
        ('{"messages": ["hi"]}', 'line 1: message 1 is not an object with "role" and "content"'),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}',
            'line 1: message 2 is not an object with "role" and "content"',
        ),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, finding: str | None) -> None:
    with pytest.raises(UserError) as caught:
        _read(line, _JSONL)
    assert caught.value.rule == "prompts-broken"
    if finding is not None:
        assert caught.value.found == f"FILE: {finding}"


def test_the_first_lines_that_are_none_are_all_named() -> None:
    lines = ['"good"'] * 6 + ["bad", '"good"', "{}", *"3456789"]
    with pytest.raises(UserError) as caught:
        _read("\n".join(lines), _JSONL)
    assert str(caught.value) == (
        "error[prompts-broken]: the file of prompts has invalid lines\n"
        "  found: FILE: line 7: invalid JSON: Expecting value at column 1; "
        "line 9: an empty object; "
        "lines 10, 11, 12, 13, 14 and 2 more: a number, not a string or an object\n"
        '  why:   a line of JSONL is a string, or an object with "prompt" or "messages"\n'
        f"  fix:   {_FIX}"
    )


@pytest.mark.parametrize(
    ("data", "rule", "found", "fix"),
    [
        (b"", "prompts-empty", "FILE: it is empty", "name a file with one prompt per line"),
        (b"\xef\xbb\xbf", "prompts-empty", "FILE: only blank lines", "name a file with one prompt per line"),
        (b"\n \r\n\n", "prompts-empty", "FILE: only blank lines", "name a file with one prompt per line"),
        (b'"a"\n"\xff"\n', "prompts-no-text", "FILE: line 2", "save it as UTF-8"),
        ('"a"'.encode("utf-16"), "prompts-no-text", "FILE: line 1", "save it as UTF-8"),
        (b'["a",\n "b"]\n', "prompts-broken", None, "write one element of the list a line: jq -c '.[]' FILE"),
    ],
)
def test_a_file_without_prompts(data: bytes, rule: str, found: str | None, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        _read(data, _JSONL)
    assert (caught.value.rule, caught.value.fix) == (rule, fix)
    assert found in (None, caught.value.found)
