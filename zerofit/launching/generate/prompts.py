"""The prompts of `zerofit generate`: read, tokenized, and checked against the model's maximum length."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, first_line, nearest
from zerofit.generation.prompt_lines import PromptFormat, read_prompt_lines, shorten
from zerofit.generation.prompts import room_for_new

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.generation.model_kind import Positions
    from zerofit.generation.prompt_lines import Chat, PromptLine, PromptLines

STDIN = "-"
_TEXTS_PER_CALL = 1000
"""Texts encoded in one call. ASSUMPTION: enough for all cores, with an output of megabytes."""
_FORMATS = {
    ".txt": PromptFormat.TEXT,
    ".jsonl": PromptFormat.JSONL,
    ".ndjson": PromptFormat.JSONL,
    ".json": PromptFormat.JSONL,
    "": PromptFormat.JSONL,  # standard input, and /dev/fd/63 from a shell
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized prompt."""

    line: PromptLine
    tokens: array[int]
    """Four bytes each, since there may be many long prompts."""


def read_prompts_file(name: str) -> PromptLines:
    """Return the prompts of a file, or of standard input for "-"."""
    if name == STDIN:
        if sys.stdin is None:  # closed by the shell: <&-
            raise _unreadable(
                "--prompts -: standard input is closed", "give them with | or <, or name a file"
            )
        if sys.stdin.isatty():
            print("zerofit: --prompts -: write prompts as JSONL, and end with Ctrl-D", file=sys.stderr)
        return read_prompt_lines(sys.stdin.buffer.read(), name="standard input", form=PromptFormat.JSONL)
    path = Path(name)
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        raise UserError(
            "prompts-kind-unknown",
            "the extension of the prompts file is not supported",
            found=f"--prompts {name}",
            why="supported are .jsonl (a JSON string or object per line) and .txt (a prompt per line)",
            fix="use one of these formats",
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, others) if isinstance(error, FileNotFoundError) else None
        fix = (
            f"did you mean --prompts {path.parent / near}?"
            if near
            else "name a file with one prompt per line"
        )
        raise _unreadable(f"--prompts {path}: {error.strerror}", fix) from None
    return read_prompt_lines(data, name=name, form=form)


def _unreadable(found: str, fix: str) -> UserError:
    return UserError(
        "prompts-unreadable",
        "the file of prompts can't be read",
        found=found,
        why="prompts are read before the start",
        fix=fix,
    )


def tokenized(lines: Sequence[PromptLine], tokenizer: Any, *, as_chat: bool) -> tuple[Prompt, ...]:
    """Return the tokenized prompts.

    Args:
        as_chat: whether a plain prompt is a user message of a chat.

    Raises:
        UserError: there is no chat template, or it refuses a chat, or a prompt has no tokens.
    """
    texts: list[str] = []
    are_chats = [as_chat or not isinstance(line.prompt, str) for line in lines]
    refused = []
    for line, is_chat in zip(lines, are_chats, strict=True):
        if is_chat and tokenizer.chat_template is None:
            raise _no_template(line, tokenizer)
        try:
            texts.append(_templated(line.prompt, tokenizer) if is_chat else str(line.prompt))
        except Exception as error:  # whatever a template raises
            refused.append(f"line {line.number}: {first_line(error)}")
    if refused:
        raise UserError(
            "chat-refused",
            "the chat template refuses some of the chats",
            found=shorten(refused),
            why="templates may require certain roles in a certain order",
            fix="write the messages as documented for the model",
        )
    tokens = _encoded(texts, are_chats, tokenizer)
    empty = [f"line {line.number}" for line, ids in zip(lines, tokens, strict=True) if not ids]
    if empty:
        raise UserError(
            "prompt-without-tokens",
            "prompts have no tokens",
            found=shorten(empty),
            why="after tokenization nothing is left to continue",
            fix="leave those lines out",
        )
    return tuple(Prompt(line=line, tokens=ids) for line, ids in zip(lines, tokens, strict=True))


def check_lengths(
    prompts: Sequence[Prompt], *, max_new_tokens: int, positions: Positions, has_encoder: bool
) -> None:
    """Check that the model has positions for each prompt and its completion, as the ranks will."""
    has = positions.num_prompt_tokens if has_encoder else positions.num_tokens
    most = has if has_encoder or has is None else has - 1
    long = [prompt for prompt in prompts if most is not None and len(prompt.tokens) > most]
    if long:
        raise UserError(
            "prompt-too-long",
            "prompts are longer than the model's positions",
            found=shorten(f"line {prompt.line.number}: {len(prompt.tokens)} tokens" for prompt in long),
            why=f"the model has {has} positions; beyond them it fails or generates nonsense"
            + ("" if has_encoder else "; at least one is for the completion"),
            fix=f"shorten them to {most} tokens, or leave them out",
        )
    longest = max(len(prompt.tokens) for prompt in prompts)
    room = room_for_new(longest, positions, is_encoder_decoder=has_encoder)
    if room is not None and max_new_tokens > room:
        before = "the decoder's start token" if has_encoder else f"a prompt of {longest} tokens"
        raise UserError(
            "completion-too-long",
            "the model has no positions for completions of this length",
            found=f"at most {max_new_tokens} new tokens, and {before}",
            why=f"the model has {positions.num_tokens} positions; beyond them it fails or generates nonsense",
            fix=f"set --max-new-tokens to {room} or less"
            + ("" if has_encoder else ", or shorten the longest prompts"),
        )


def _templated(prompt: str | Chat, tokenizer: Any) -> str:
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def _encoded(texts: Sequence[str], are_chats: Sequence[bool], tokenizer: Any) -> list[array[int]]:
    """Return the tokens of texts; chats have special tokens from their template."""
    found: list[array[int]] = []
    for is_chat, group in groupby(zip(are_chats, texts, strict=True), key=itemgetter(0)):
        group_texts = [text for _, text in group]
        for begin in range(0, len(group_texts), _TEXTS_PER_CALL):
            chunk = group_texts[begin : begin + _TEXTS_PER_CALL]
            # Not verbose: the tokenizer warns about its own maximum, which is not the model's.
            encoded = tokenizer(chunk, add_special_tokens=not is_chat, verbose=False)
            found += (array("i", ids) for ids in encoded["input_ids"])
    return found


def _no_template(line: PromptLine, tokenizer: Any) -> UserError:
    found = "--chat" if isinstance(line.prompt, str) else f'"messages" on line {line.number}'
    return UserError(
        "no-chat-template",
        "the tokenizer has no chat template",
        found=f"{found}; {type(tokenizer).__name__} of {tokenizer.name_or_path}",
        why="the template converts messages to the format that the model was trained on",
        fix="pass one with --chat-template FILE, or write the whole text as prompt",
        see="https://huggingface.co/docs/transformers/chat_templating",
    )
