"""Prompts as lines of a file: text or JSONL to prompts, naming lines that are none; results back to JSONL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

COMPLETIONS = "completions"
"""The field of a result that no prompt may have."""
_PROMPT, _MESSAGES = "prompt", "messages"
_OF_TEMPLATES = ("tools", "documents", "chat_template_kwargs")
"""What chat templates may be given beside messages (transformers, apply_chat_template), and these are not."""
_BOM = "\ufeff"
_NAMED = 8
"""Fields of an object that a finding names at most."""
_SHOWN_FINDINGS = 5
"""Things, and lines of each, that an error names; how many more there are, it says."""
_SHOWN_DIGITS = 20
"""Of a number that a finding names."""
_TOO_DEEP = "brackets in brackets without end"

Chat = list[dict[str, Any]]
"""What a conversation says so far, as chat templates take it: {"role", "content"} each."""


class PromptFormat(Enum):
    """How a file holds its prompts."""

    TEXT = "text"
    """One prompt a line."""
    JSONL = "jsonl"
    """A JSON string a line, or an object with "prompt" or "messages"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A prompt and the line that it came from."""

    number: int
    """Of the line in its file, from 1."""
    prompt: str | Chat
    fields: dict[str, Any]
    """What the line says in all, the prompt with it: it stands in the result too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLines:
    """The prompts of a file."""

    lines: tuple[PromptLine, ...]
    num_blank: int
    """Lines without anything on them, left out."""


class _NoPromptError(Exception):
    """A line that is no prompt; its text says why."""


def read_prompt_lines(data: bytes, *, name: str, form: PromptFormat) -> PromptLines:
    """Return the prompts of a file, a line each; blank lines hold none.

    Args:
        data: the file's content; a byte order mark of UTF-8 is left out.
        name: the file's name, for the message.
        form: how it holds its prompts.

    Raises:
        UserError: it holds no prompt, is no text, or has lines that are no prompts: the first of them are
            all named.
    """
    text = _decoded(data, name)
    read = _READERS[form]
    lines: list[PromptLine] = []
    findings: dict[str, list[int]] = {}
    rows = text.removeprefix(_BOM).split("\n")  # and no other line end: JSON allows U+2028 within a string
    num_lines = len(rows) - (not rows[-1])
    for number, row in enumerate(rows[:num_lines], 1):
        line = row.removesuffix("\r")
        if not line.strip():
            continue
        try:
            fields = read(line)
            lines.append(PromptLine(number=number, prompt=_prompt_of(fields), fields=fields))
        except _NoPromptError as finding:
            findings.setdefault(str(finding), []).append(number)
    if findings:
        raise _not_prompts(findings, name, form, is_one_list=text.removeprefix(_BOM).lstrip()[:1] == "[")
    if not lines:
        raise _no_prompt_in(name, is_empty=not data)
    return PromptLines(lines=tuple(lines), num_blank=num_lines - len(lines))


def result_of(fields: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return what the results say of a prompt: all that its own line says, then its completions.

    Args:
        fields: of the line that the prompt came from.
        document: what zerofit.generate keeps of its completions.
    """
    completions = [
        {name: completion[name] for name in ("text", "finish_reason", "num_new_tokens")}
        for completion in document["completions"]
    ]
    return {**fields, COMPLETIONS: completions}


def shorten(findings: Iterable[str]) -> str:
    """Return the first few things that were found in a line, and how many more there are."""
    found = list(findings)
    num_more = len(found) - _SHOWN_FINDINGS
    more = [f"and {num_more} more"] if num_more > 0 else []
    return "; ".join([*found[:_SHOWN_FINDINGS], *more])


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        text, place = "", error.start
    else:
        place = text.find("\0")  # text in UTF-16 is full of them
        place = place if place < 0 else len(text[:place].encode())
    if place < 0:
        return text
    number = data.count(b"\n", 0, place) + 1
    raise UserError(
        "prompts-no-text",
        "the file of prompts is no text in UTF-8",
        found=f"{name}: line {number}",
        why="prompts are read as UTF-8, and this file is binary or in another encoding",
        fix="save it as UTF-8",
    )


def _of_text(line: str) -> dict[str, Any]:
    return {_PROMPT: line}


def _of_json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise _NoPromptError(f"invalid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _NoPromptError(f"invalid JSON: {_TOO_DEEP}") from None
    except ValueError as error:  # a number of thousands of digits
        raise _NoPromptError(f"invalid JSON: {error}") from None
    if isinstance(value, str):
        return {_PROMPT: value}
    if isinstance(value, dict):
        return value
    raise _NoPromptError(f"{_kind_of(value)}, not a string or an object")


_READERS: dict[PromptFormat, Callable[[str], dict[str, Any]]] = {
    PromptFormat.TEXT: _of_text,
    PromptFormat.JSONL: _of_json,
}


def _no_number(word: str) -> Any:
    raise _NoPromptError(f"invalid JSON: {word} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise _NoPromptError(f"{digits[:_SHOWN_DIGITS]} is too large a number, which no result can hold")
    return number


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise _NoPromptError(f'"{twice}" stands twice in one object')


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "a list", bool: "true or false", int: "a number", float: "a number"}[type(value)]


def _prompt_of(fields: dict[str, Any]) -> str | Chat:
    """Return the prompt of an object.

    Raises:
        _NoPromptError: it has none, or more than one, or what can't be written into a result.
    """
    given = [name for name in (_PROMPT, _MESSAGES) if name in fields]
    if not given:
        raise _NoPromptError(_without_prompt(fields))
    if len(given) > 1:
        raise _NoPromptError('both "prompt" and "messages"')
    if COMPLETIONS in fields:
        raise _NoPromptError(f'a field "{COMPLETIONS}", which is where the result puts its own')
    try:
        json.dumps(fields[given[0]], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _NoPromptError(r"half of a character (such as \ud83d without its other half)") from None
    if given == [_PROMPT]:
        return _text_of(fields[_PROMPT])
    beside = [name for name in _OF_TEMPLATES if fields.get(name)]
    if beside:
        raise _NoPromptError(f'"{beside[0]}" beside "messages": what a template gets is "messages" alone')
    return _chat_of(fields[_MESSAGES])


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise _NoPromptError('"prompt" is no string')
    if not value:
        raise _NoPromptError("an empty prompt")
    return value


def _chat_of(value: Any) -> Chat:
    if not isinstance(value, list) or not value:
        raise _NoPromptError('"messages" is no list of messages')
    for number, message in enumerate(value, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or "content" not in message:
            raise _NoPromptError(f'message {number} is no object with "role" and "content"')
        # A template may take a call of tools in its place; without one it writes "None".
        if message["content"] is None and not message.get("tool_calls"):
            raise _NoPromptError(f'message {number} has null as "content"')
    return value


def _without_prompt(fields: dict[str, Any]) -> str:
    near = nearest(_PROMPT, fields) or nearest(_MESSAGES, fields)
    names = ", ".join(list(fields)[:_NAMED]) + (", ..." if len(fields) > _NAMED else "")
    said = f'no "prompt" and no "messages" among {names}' if fields else "an object without anything in it"
    meant = _PROMPT if nearest(_PROMPT, fields) else _MESSAGES
    return f'{said}: is "{near}" meant to be "{meant}"?' if near else said


def _numbered(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    num_more = len(numbers) - _SHOWN_FINDINGS
    named = ", ".join(map(str, numbers[:_SHOWN_FINDINGS]))
    return f"lines {named}" + (f" and {num_more} more" if num_more > 0 else "")


def _not_prompts(
    findings: dict[str, list[int]], name: str, form: PromptFormat, *, is_one_list: bool
) -> UserError:
    fix = "mend the lines, or give a file of plain text, one prompt a line, the ending .txt"
    if is_one_list:
        fix = f"write one element of the list a line: jq -c '.[]' {name}"
    return UserError(
        "prompts-broken",
        "the file of prompts has lines that are no prompts",
        found=f"{name}: {shorten(f'{_numbered(found)}: {finding}' for finding, found in findings.items())}",
        why='a line of JSONL is a string, or an object with "prompt" or "messages"'
        if form is PromptFormat.JSONL
        else "each line is a prompt",
        fix=fix,
    )


def _no_prompt_in(name: str, *, is_empty: bool) -> UserError:
    return UserError(
        "prompts-empty",
        "there is no prompt",
        found=f"{name}: {'it is empty' if is_empty else 'only blank lines'}",
        why="there is nothing to generate from",
        fix="name a file with one prompt a line",
    )
