"""The prompts of `zerofit generate`: read, as tokens, and short enough for the model."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.generation.lengths import most_prompt_tokens, room_for_new
from zerofit.generation.prompt_lines import PromptFormat, read_prompt_lines, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.generation.model_kind import Positions
    from zerofit.generation.prompt_lines import Chat, PromptLine, PromptLines

STDIN = "-"
_AT_A_TIME = 1000
"""Texts that are encoded in one call. ASSUMPTION: enough for all cores, and megabytes of what it returns."""
_FORMATS = {
    ".txt": PromptFormat.TEXT,
    ".jsonl": PromptFormat.JSONL,
    ".ndjson": PromptFormat.JSONL,
    ".json": PromptFormat.JSONL,
    "": PromptFormat.JSONL,  # standard input, and what a shell gives as /dev/fd/63
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as the model gets it."""

    line: PromptLine
    tokens: array[int]
    """Four bytes each: of long prompts there may be many."""


def read_prompts_file(name: str) -> PromptLines:
    """Return the prompts of a file, or of standard input for "-".

    Raises:
        UserError: it can't be read, or has lines that are no prompts.
    """
    if name == STDIN:
        return read_prompt_lines(_bytes_of_stdin(), name="standard input", form=PromptFormat.JSONL)
    path = Path(name)
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        raise UserError(
            "prompts-kind-unknown",
            "the file's name does not say how it holds prompts",
            found=f"--prompts {name}",
            why="prompts are read from .jsonl (a JSON string or object a line) and .txt (a prompt a line)",
            fix="write them as one of these",
        )
    return read_prompt_lines(_bytes_of(path), name=name, form=form)


def _bytes_of_stdin() -> bytes:
    if sys.stdin is None:  # closed by the shell: <&-
        raise UserError(
            "prompts-unreadable",
            "the prompts can't be read",
            found="--prompts -: standard input is closed",
            why="they are read before anything starts",
            fix="give them with | or <, or name a file",
        )
    if sys.stdin.isatty():
        print("zerofit: --prompts -: write prompts as JSONL, and end with Ctrl-D", file=sys.stderr)
    return sys.stdin.buffer.read()


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, others) if isinstance(error, FileNotFoundError) else None
        raise UserError(
            "prompts-unreadable",
            "the file of prompts can't be read",
            found=f"--prompts {path}: {error.strerror}",
            why="it is read before anything starts",
            fix=f"did you mean --prompts {path.parent / near}?"
            if near
            else "name a file with one prompt a line",
        ) from None


def tokenized(lines: Sequence[PromptLine], tokenizer: Any, *, as_chat: bool) -> tuple[Prompt, ...]:
    """Return the prompts as tokens.

    Args:
        lines: the prompts.
        tokenizer: of transformers.
        as_chat: whether a plain prompt is what a user says in a chat.

    Raises:
        UserError: there is no chat template, or it refuses a chat, or a prompt has no tokens.
    """
    prompts = [_prompt_of(line, as_chat=as_chat) for line in lines]
    chats = [line for line, prompt in zip(lines, prompts, strict=True) if not isinstance(prompt, str)]
    if chats and tokenizer.chat_template is None:
        raise _no_template(chats[0], tokenizer, as_chat=as_chat)
    texts, findings = [], []
    for line, prompt in zip(lines, prompts, strict=True):
        try:
            texts.append(prompt if isinstance(prompt, str) else _templated(prompt, tokenizer))
        except Exception as error:  # whatever a template raises
            findings.append(f"line {line.number}: {(str(error).splitlines() or [type(error).__name__])[0]}")
    if findings:
        raise UserError(
            "chat-refused",
            "the chat template does not take some of the chats",
            found=shorten(findings),
            why="templates may ask for certain roles in a certain order",
            fix="write the messages as the model's page says",
        )
    tokens: list[Any] = [None] * len(lines)
    for is_text in (True, False):
        places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str) is is_text]
        encoded = _encoded([texts[place] for place in places], tokenizer, add_special_tokens=is_text)
        for place, ids in zip(places, encoded, strict=True):
            tokens[place] = ids
    _check_none_empty(lines, tokens)
    return tuple(Prompt(line=line, tokens=ids) for line, ids in zip(lines, tokens, strict=True))


def check_lengths(
    prompts: Sequence[Prompt], *, max_new_tokens: int, positions: Positions, has_encoder: bool
) -> None:
    """Check that the model has positions for each prompt and its completion, as the ranks will.

    Args:
        prompts: all of them.
        max_new_tokens: tokens that a completion may have.
        positions: of the model.
        has_encoder: whether an encoder reads the prompt, so that the decoder sees the completion alone.

    Raises:
        UserError: it has not.
    """
    most = most_prompt_tokens(positions, is_encoder_decoder=has_encoder)
    has = positions.num_prompt_tokens if has_encoder else positions.num_tokens
    long = [prompt for prompt in prompts if most is not None and len(prompt.tokens) > most]
    if long:
        raise UserError(
            "prompt-too-long",
            "prompts are longer than the model's positions",
            found=shorten(f"line {prompt.line.number}: {len(prompt.tokens)} tokens" for prompt in long),
            why=f"the model has {has} positions, and fails or writes nonsense beyond them"
            + ("" if has_encoder else "; one at least is for the completion"),
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
            why=f"the model has {positions.num_tokens} positions, and fails or writes nonsense beyond them",
            fix=f"give --max-new-tokens {room} or less"
            + ("" if has_encoder else ", or shorten the longest prompts"),
        )


def _prompt_of(line: PromptLine, *, as_chat: bool) -> str | Chat:
    if as_chat and isinstance(line.prompt, str):
        return [{"role": "user", "content": line.prompt}]
    return line.prompt


def _templated(chat: Chat, tokenizer: Any) -> str:
    text: str = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return text


def _encoded(texts: Sequence[str], tokenizer: Any, *, add_special_tokens: bool) -> Iterator[array[int]]:
    """Yield the tokens of texts; chats have the special ones from their template."""
    for begin in range(0, len(texts), _AT_A_TIME):
        some = texts[begin : begin + _AT_A_TIME]
        # Not verbose: the tokenizer's own maximum, of which it warns, is not the model's.
        encoded = tokenizer(some, add_special_tokens=add_special_tokens, verbose=False)
        yield from (array("i", ids) for ids in encoded["input_ids"])


def _no_template(line: PromptLine, tokenizer: Any, *, as_chat: bool) -> UserError:
    found = "--chat" if as_chat and isinstance(line.prompt, str) else f'"messages" on line {line.number}'
    return UserError(
        "no-chat-template",
        "the tokenizer has no chat template",
        found=f"{found}; {type(tokenizer).__name__} of {tokenizer.name_or_path}",
        why="the template says how messages become the text that the model was trained on",
        fix="give one with --chat-template FILE, or write the whole text as prompt",
        see="https://huggingface.co/docs/transformers/chat_templating",
    )


def _check_none_empty(lines: Sequence[PromptLine], tokens: Sequence[array[int]]) -> None:
    empty = [f"line {line.number}" for line, ids in zip(lines, tokens, strict=True) if not ids]
    if empty:
        raise UserError(
            "prompt-without-tokens",
            "prompts have no tokens",
            found=shorten(empty),
            why="the tokenizer leaves nothing of them that the model could go on from",
            fix="leave those lines out",
        )
