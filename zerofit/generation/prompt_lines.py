"""Prompts as lines of a file: text or JSONL to prompts, naming lines that are none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPLETIONS = "completions"
"""The field of a result that no prompt may have."""
_PROMPT, _MESSAGES = "prompt", "messages"
_OF_TEMPLATES = ("tools", "documents", "chat_template_kwargs")
"""Further arguments of chat templates (transformers, apply_chat_template), which are refused."""
_BOM = "\ufeff"
_NAMED = 8
"""Fields of an object that a finding names at most."""
_SHOWN_FINDINGS = 5
"""Things, and lines of each, that an error names; how many more there are, it says."""

Chat = list[dict[str, Any]]
"""Messages of a conversation, as chat templates take them: {"role", "content"} each."""


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
    """All fields of the line, the prompt included: the result has them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLines:
    """The prompts of a file."""

    lines: tuple[PromptLine, ...]
    num_blank: int
    """Lines without anything on them, left out."""


def read_prompt_lines(data: bytes, *, name: str, form: PromptFormat) -> PromptLines:
    """Return the prompts of a file, a line each; blank lines hold none."""
    try:
        text = data.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            "prompts-no-text",
            "the file of prompts is no text in UTF-8",
            found=f"{name}: line {number}",
            why="prompts are read as UTF-8, and this file is binary or in another encoding",
            fix="save it as UTF-8",
        ) from None
    lines: list[PromptLine] = []
    findings: dict[str, list[int]] = {}
    rows = text.split("\n")  # and no other line end: JSON allows U+2028 within a string
    num_lines = len(rows) - (not rows[-1])
    for number, row in enumerate(rows[:num_lines], 1):
        line = row.removesuffix("\r")
        if not line.strip():
            continue
        try:
            fields = {_PROMPT: line} if form is PromptFormat.TEXT else _of_json(line)
            lines.append(PromptLine(number=number, prompt=_prompt_of(fields), fields=fields))
        except ValueError as finding:
            findings.setdefault(str(finding), []).append(number)
    if findings:
        raise _not_prompts(findings, name, is_one_list=text.lstrip()[:1] == "[")
    if not lines:
        raise UserError(
            "prompts-empty",
            "there is no prompt",
            found=f"{name}: {'only blank lines' if data else 'it is empty'}",
            why="there is nothing to generate from",
            fix="name a file with one prompt a line",
        )
    return PromptLines(lines=tuple(lines), num_blank=num_lines - len(lines))


def shorten(findings: Iterable[str]) -> str:
    """Return the first few things that were found in a line, and how many more there are."""
    found = list(findings)
    num_more = len(found) - _SHOWN_FINDINGS
    more = [f"and {num_more} more"] if num_more > 0 else []
    return "; ".join([*found[:_SHOWN_FINDINGS], *more])


def _of_json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("invalid JSON: lists and objects are nested too deep") from None
    if isinstance(value, str):
        return {_PROMPT: value}
    if isinstance(value, dict):
        return value
    kinds = {list: "a list", bool: "true or false", int: "a number", float: "a number"}
    raise ValueError(f"{kinds.get(type(value), 'null')}, not a string or an object")


def _no_number(word: str) -> Any:
    raise ValueError(f"invalid JSON: {word} is no number of JSON")


def _prompt_of(fields: dict[str, Any]) -> str | Chat:
    """Return the prompt of an object."""
    given = [name for name in (_PROMPT, _MESSAGES) if name in fields]
    if not given:
        raise ValueError(_without_prompt(fields))
    if len(given) > 1:
        raise ValueError('both "prompt" and "messages"')
    if COMPLETIONS in fields:
        raise ValueError(f'a field "{COMPLETIONS}", which is where the result puts its own')
    try:
        json.dumps(fields[given[0]], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(r"half of a character (such as \ud83d without its other half)") from None
    if given == [_MESSAGES]:
        beside = [name for name in _OF_TEMPLATES if fields.get(name)]
        if beside:
            raise ValueError(f'"{beside[0]}" beside "messages": what a template gets is "messages" alone')
        return _chat_of(fields[_MESSAGES])
    prompt = fields[_PROMPT]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError('"prompt" is no string' if not isinstance(prompt, str) else "an empty prompt")
    return prompt


def _chat_of(value: Any) -> Chat:
    if not isinstance(value, list) or not value:
        raise ValueError('"messages" is no list of messages')
    for number, message in enumerate(value, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or "content" not in message:
            raise ValueError(f'message {number} is no object with "role" and "content"')
        # A template may take a call of tools in its place; without one it writes "None".
        if message["content"] is None and not message.get("tool_calls"):
            raise ValueError(f'message {number} has null as "content"')
    return value


def _without_prompt(fields: dict[str, Any]) -> str:
    names = ", ".join(list(fields)[:_NAMED]) + (", ..." if len(fields) > _NAMED else "")
    said = f'no "prompt" and no "messages" among {names}' if fields else "an object without anything in it"
    meant = {near: name for name in (_MESSAGES, _PROMPT) if (near := nearest(name, fields))}
    return said + "".join(f': is "{near}" meant to be "{name}"?' for near, name in list(meant.items())[-1:])


def _numbered(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    num_more = len(numbers) - _SHOWN_FINDINGS
    named = ", ".join(map(str, numbers[:_SHOWN_FINDINGS]))
    return f"lines {named}" + (f" and {num_more} more" if num_more > 0 else "")


def _not_prompts(findings: dict[str, list[int]], name: str, *, is_one_list: bool) -> UserError:
    fix = "mend the lines, or give a file of plain text, one prompt a line, the ending .txt"
    if is_one_list:
        fix = f"write one element of the list a line: jq -c '.[]' {name}"
    return UserError(
        "prompts-broken",
        "the file of prompts has lines that are no prompts",
        found=f"{name}: {shorten(f'{_numbered(found)}: {finding}' for finding, found in findings.items())}",
        why='a line of JSONL is a string, or an object with "prompt" or "messages"',
        fix=fix,
    )
