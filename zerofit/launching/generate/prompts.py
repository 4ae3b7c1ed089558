"""The prompts of `zerofit generate`: read from a text or JSONL file, and tokenized."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.bounded_read import read_bounded
from zerofit.core.bounds import bounded_memory, bounded_time
from zerofit.core.errors import UserError, first_line, nearest
from zerofit.generation.prompts import read_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.generation.prompts import Tokens

STDIN = "-"
COMPLETIONS = "completions"
"""The field of results, which no prompt may have."""
_PROMPT, _MESSAGES = "prompt", "messages"
_OF_TEMPLATES = ("tools", "documents", "chat_template_kwargs")
"""Further arguments of chat templates (transformers, apply_chat_template), which are refused."""
_BOM = "\ufeff"
_MOST_NAMED = 5
"""Maximum number of findings in an error. ASSUMPTION: more would bury the fix."""
TEMPLATE_LIMIT_S = 30.0
"""Time that a chat template may take for one chat. ASSUMPTION: those of long chats take milliseconds."""
_TEMPLATE_BYTES = 4 << 30
"""Memory that it may take. ASSUMPTION: a chat of a million tokens is a text of 4 MB."""
_LARGEST_PROMPTS = 16 << 30
"""Bytes of a file of prompts. ASSUMPTION."""
_PIPE_LIMIT_S = 24 * 3600.0
"""How long a command that writes the prompts may be silent. ASSUMPTION."""
_TEXT, _JSONL = ".txt", (".jsonl", ".ndjson", ".json", "")
"""Extensions; standard input and /dev/fd/63 from a shell have none."""

Chat = list[dict[str, Any]]
"""Messages of a conversation as for chat templates: {"role", "content"} each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A prompt of a file."""

    prompt: str | Chat
    fields: dict[str, Any]
    """All fields of the line, including the prompt; they are copied to the result."""


def read_prompts_file(name: str) -> tuple[PromptLine, ...]:
    """Return the prompts of a file, or of standard input for "-", one per line; empty lines are skipped.

    Raises:
        UserError: the file can't be read, or has invalid lines, which the error names.
    """
    suffix = "" if name == STDIN else Path(name).suffix.lower()
    if suffix != _TEXT and suffix not in _JSONL:
        raise UserError(
            "prompts-kind-unknown",
            "the extension of the prompts file is not supported",
            found=f"--prompts {name}",
            why="supported are .jsonl (a JSON string or object per line) and .txt (a prompt per line)",
            fix="use one of these formats",
        )
    text = _decoded(_content(name), name)
    lines: list[PromptLine] = []
    findings: dict[str, list[int]] = {}
    for number, row in enumerate(text.split("\n"), 1):  # no other newlines: JSON allows U+2028 in a string
        line = row.removesuffix("\r")
        if not line.strip():
            continue
        try:
            fields = {_PROMPT: line} if suffix == _TEXT else _of_json(line)
            lines.append(PromptLine(prompt=_prompt_of(fields), fields=fields))
        except ValueError as finding:
            findings.setdefault(str(finding), []).append(number)
    if findings:
        raise _not_prompts(findings, name, is_one_list=text.lstrip()[:1] == "[")
    if not lines:
        raise UserError(
            "prompts-empty",
            "there is no prompt",
            found=f"{name}: {'only blank lines' if text else 'it is empty'}",
            why="there is nothing to generate from",
            fix="name a file with one prompt per line",
        )
    return tuple(lines)


def tokenized(lines: Sequence[PromptLine], tokenizer: Any, *, as_chat: bool) -> tuple[Tokens, ...]:
    """Return the tokens of the prompts.

    Args:
        as_chat: whether a plain prompt is a user message of a chat.

    Raises:
        UserError: there is no chat template, or it refuses a chat, or a prompt has no tokens.
    """
    found: list[Tokens] = []
    for line in lines:
        prompt = line.prompt
        if as_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            with _bounded_template(tokenizer):
                found += read_prompts([prompt], tokenizer)
        except UserError as error:
            error.found = error.found.replace("prompt 0", f"prompt {len(found)}")
            raise
        except Exception as error:  # whatever a template raises
            raise UserError(
                "chat-refused",
                "the chat template refuses a chat",
                found=f"prompt {len(found)}: {first_line(error)}",
                why="the tokenizer's template converts messages to the format that the model was trained on",
                fix="write the messages as documented for the model, or pass --chat-template FILE",
                see="https://huggingface.co/docs/transformers/chat_templating",
            ) from None
    return tuple(found)


@contextlib.contextmanager
def _bounded_template(tokenizer: Any) -> Iterator[None]:
    """Let a chat template, which is a program from anywhere, take bounded time and memory."""
    original = getattr(tokenizer, "apply_chat_template", None)
    if original is None:
        yield
        return

    def apply(*args: Any, **kwargs: Any) -> Any:
        with bounded_time(TEMPLATE_LIMIT_S), bounded_memory(_TEMPLATE_BYTES):
            return original(*args, **kwargs)

    tokenizer.apply_chat_template = apply
    try:
        yield
    finally:
        del tokenizer.apply_chat_template


def _content(name: str) -> bytes:
    if name == STDIN:
        if sys.stdin is None:  # closed by the shell: <&-
            fix = "give them with | or <, or name a file"
            raise _unreadable("--prompts -: standard input is closed", fix)
        if sys.stdin.isatty():
            print("zerofit: --prompts -: write prompts as JSONL, and end with Ctrl-D", file=sys.stderr)
        return sys.stdin.buffer.read()
    path = Path(name)
    try:
        return read_bounded(path, most_bytes=_LARGEST_PROMPTS, limit_s=_PIPE_LIMIT_S)
    except OSError as error:
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, others) if isinstance(error, FileNotFoundError) else None
        fix = (
            f"did you mean --prompts {path.parent / near}?"
            if near
            else "name a file with one prompt per line"
        )
        raise _unreadable(f"--prompts {path}: {error.strerror}", fix) from None


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            "prompts-no-text",
            "the file of prompts is not UTF-8 text",
            found=f"{name}: line {number}",
            why="prompts must be UTF-8; this file is binary or in another encoding",
            fix="save it as UTF-8",
        ) from None


def _of_json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("invalid JSON: lists and objects are nested too deep") from None
    if isinstance(value, str):
        return {_PROMPT: value}
    if not isinstance(value, dict):
        raise ValueError("neither a string nor an object")
    return value


def _no_number(word: str) -> Any:
    raise ValueError(f"invalid JSON: {word} is not a JSON number")


def _prompt_of(fields: dict[str, Any]) -> str | Chat:
    """Return the prompt in an object."""
    given = [name for name in (_PROMPT, _MESSAGES) if name in fields]
    if len(given) != 1:
        raise ValueError('both "prompt" and "messages"' if given else _without_prompt(fields))
    if COMPLETIONS in fields:
        raise ValueError(f'a field "{COMPLETIONS}", which is reserved for the result')
    prompt = fields[given[0]]
    try:
        json.dumps(prompt, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(r"a lone surrogate (such as \ud83d without its other half)") from None
    if given == [_PROMPT]:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError('"prompt" is not a string' if not isinstance(prompt, str) else "an empty prompt")
        return prompt
    if beside := [name for name in _OF_TEMPLATES if fields.get(name)]:
        raise ValueError(f'"{beside[0]}" beside "messages": what a template gets is "messages" alone')
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise ValueError('"messages" is not a list of objects with "role" and "content"')
    return prompt


def _without_prompt(fields: dict[str, Any]) -> str:
    names = ", ".join(list(fields)[:_MOST_NAMED]) + (", ..." if len(fields) > _MOST_NAMED else "")
    said = f'no "prompt" and no "messages" among {names}' if fields else "an empty object"
    meant = {near: name for name in (_MESSAGES, _PROMPT) if (near := nearest(name, fields))}
    return said + "".join(f': is "{near}" meant to be "{name}"?' for near, name in list(meant.items())[-1:])


def _is_message(message: Any) -> bool:
    """Return True if a template can read a message; one of tool calls alone may have null as content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return message.get("content") is not None or bool("content" in message and message.get("tool_calls"))


def _unreadable(found: str, fix: str) -> UserError:
    return UserError(
        "prompts-unreadable",
        "the file of prompts can't be read",
        found=found,
        why="prompts are read before the start",
        fix=fix,
    )


def _numbered(numbers: list[int]) -> str:
    """Return "line 3", or the first few of several lines and the number of the others."""
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    num_more = len(numbers) - _MOST_NAMED
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"lines {named}" + (f" and {num_more} more" if num_more > 0 else "")


def _not_prompts(findings: dict[str, list[int]], name: str, *, is_one_list: bool) -> UserError:
    said = [f"{_numbered(numbers)}: {finding}" for finding, numbers in findings.items()]
    num_more = len(said) - _MOST_NAMED
    more = [f"and {num_more} more"] if num_more > 0 else []
    return UserError(
        "prompts-broken",
        "the file of prompts has invalid lines",
        found=f"{name}: {'; '.join([*said[:_MOST_NAMED], *more])}",
        why='a line of JSONL is a string, or an object with "prompt" or "messages"',
        fix=f"write one element of the list a line: jq -c '.[]' {name}"
        if is_one_list
        else "fix the lines, or rename a plain text file with one prompt per line to .txt",
    )
