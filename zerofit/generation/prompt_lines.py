"""Parses prompts from a text or JSONL file, and names invalid lines in errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPLETIONS = "completions"
"""The field of results, which no prompt may have."""
_PROMPT, _MESSAGES = "prompt", "messages"
_OF_TEMPLATES = ("tools", "documents", "chat_template_kwargs")
"""Further arguments of chat templates (transformers, apply_chat_template), which are refused."""
_BOM = "\ufeff"
_NAMED = 8
"""Maximum number of an object's fields named in a finding."""
_SHOWN_FINDINGS = 5
"""Maximum number of findings, and of lines for each, in an error."""

Chat = list[dict[str, Any]]
"""Messages of a conversation as for chat templates: {"role", "content"} each."""


class PromptFormat(Enum):
    """The format of a file of prompts."""

    TEXT = "text"
    """One prompt per line."""
    JSONL = "jsonl"
    """One JSON string per line, or an object with "prompt" or "messages"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A prompt and its line."""

    number: int
    """Line number, from 1."""
    prompt: str | Chat
    fields: dict[str, Any]
    """All fields of the line, including the prompt; they are copied to the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLines:
    """The prompts of a file."""

    lines: tuple[PromptLine, ...]
    num_blank: int
    """Skipped empty lines."""


def read_prompt_lines(data: bytes, *, name: str, form: PromptFormat) -> PromptLines:
    """Return the prompts of a file, one per line; empty lines are skipped."""
    try:
        text = data.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            "prompts-no-text",
            "the file of prompts is not UTF-8 text",
            found=f"{name}: line {number}",
            why="prompts must be UTF-8; this file is binary or in another encoding",
            fix="save it as UTF-8",
        ) from None
    lines: list[PromptLine] = []
    findings: dict[str, list[int]] = {}
    rows = text.split("\n")  # split at no other newlines: JSON allows U+2028 within a string
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
            fix="name a file with one prompt per line",
        )
    return PromptLines(lines=tuple(lines), num_blank=num_lines - len(lines))


def shorten(findings: Iterable[str]) -> str:
    """Return the first few findings, and the number of the others."""
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
    raise ValueError(f"invalid JSON: {word} is not a JSON number")


def _prompt_of(fields: dict[str, Any]) -> str | Chat:
    """Return the prompt in an object."""
    given = [name for name in (_PROMPT, _MESSAGES) if name in fields]
    if not given:
        raise ValueError(_without_prompt(fields))
    if len(given) > 1:
        raise ValueError('both "prompt" and "messages"')
    if COMPLETIONS in fields:
        raise ValueError(f'a field "{COMPLETIONS}", which is reserved for the result')
    try:
        json.dumps(fields[given[0]], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(r"a lone surrogate (such as \ud83d without its other half)") from None
    if given == [_MESSAGES]:
        beside = [name for name in _OF_TEMPLATES if fields.get(name)]
        if beside:
            raise ValueError(f'"{beside[0]}" beside "messages": what a template gets is "messages" alone')
        return _chat_of(fields[_MESSAGES])
    prompt = fields[_PROMPT]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError('"prompt" is not a string' if not isinstance(prompt, str) else "an empty prompt")
    return prompt


def _chat_of(value: Any) -> Chat:
    if not isinstance(value, list) or not value:
        raise ValueError('"messages" is not a list of messages')
    for number, message in enumerate(value, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or "content" not in message:
            raise ValueError(f'message {number} is not an object with "role" and "content"')
        # A template may use tool calls instead; otherwise it would write "None".
        if message["content"] is None and not message.get("tool_calls"):
            raise ValueError(f'message {number} has null as "content"')
    return value


def _without_prompt(fields: dict[str, Any]) -> str:
    names = ", ".join(list(fields)[:_NAMED]) + (", ..." if len(fields) > _NAMED else "")
    said = f'no "prompt" and no "messages" among {names}' if fields else "an empty object"
    meant = {near: name for name in (_MESSAGES, _PROMPT) if (near := nearest(name, fields))}
    return said + "".join(f': is "{near}" meant to be "{name}"?' for near, name in list(meant.items())[-1:])


def _numbered(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    num_more = len(numbers) - _SHOWN_FINDINGS
    named = ", ".join(map(str, numbers[:_SHOWN_FINDINGS]))
    return f"lines {named}" + (f" and {num_more} more" if num_more > 0 else "")


def _not_prompts(findings: dict[str, list[int]], name: str, *, is_one_list: bool) -> UserError:
    fix = "fix the lines, or rename a plain text file with one prompt per line to .txt"
    if is_one_list:
        fix = f"write one element of the list a line: jq -c '.[]' {name}"
    return UserError(
        "prompts-broken",
        "the file of prompts has invalid lines",
        found=f"{name}: {shorten(f'{_numbered(found)}: {finding}' for finding, found in findings.items())}",
        why='a line of JSONL is a string, or an object with "prompt" or "messages"',
        fix=fix,
    )
