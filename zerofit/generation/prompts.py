"""Prompts as a script gives them, text, chats, token ids or batches, as tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, TypeAlias

from zerofit.core.errors import UserError

Tokens: TypeAlias = tuple[int, ...]

_OTHER_INPUTS = (
    "decoder_input_ids",
    "encoder_outputs",
    "image_grid_thw",
    "input_features",
    "input_values",
    "inputs_embeds",
    "past_key_values",
    "pixel_values",
)
"""Fields of a batch without which the model would be asked something else; some models take them unnamed.
https://huggingface.co/docs/transformers/main_classes/text_generation"""


_MAY_BE_LEFT_OUT = frozenset(("attention_mask", "input_ids", "labels", "position_ids", "token_type_ids"))
"""Fields of a batch that a model takes, and that its tokens and their mask make up for."""


def read_prompts(prompts: Any, tokenizer: Any, *, taken: Collection[str] = ()) -> tuple[Tokens, ...]:
    """Return the tokens of each prompt, in order; the tokenizer stays as it is.

    Args:
        prompts: texts, chats, token ids, or batches with "input_ids" and "attention_mask", whose rows are
            prompts.
        tokenizer: of transformers; None where all prompts are tokens already.
        taken: names of what the model takes; others in a batch, such as a row's number, mean nothing to it.

    Raises:
        UserError: a prompt is none of these, or has no tokens; there is no tokenizer, or no chat template.
    """
    needed = frozenset((*_OTHER_INPUTS, *taken)) - _MAY_BE_LEFT_OUT
    found: list[Tokens] = []
    for place, prompt in enumerate(_each(prompts)):
        for tokens in _tokens_of(prompt, tokenizer, place, needed):
            if not tokens:
                raise _empty(len(found))
            found.append(tokens)
    return tuple(found)


def check_tokens(prompts: Iterable[Tokens], *, num_known: int | None) -> None:
    """Check that a model knows every token of its prompts.

    Args:
        prompts: the tokens of each.
        num_known: tokens that the model has embeddings for; None where that can't be told.

    Raises:
        UserError: it does not.
    """
    for index, tokens in enumerate(prompts):
        least, largest = min(tokens), max(tokens)
        if least < 0 or (num_known is not None and largest >= num_known):
            known = "" if num_known is None else f", and the model knows 0 to {num_known - 1}"
            raise UserError(
                "generate-unknown-token",
                "a prompt has a token that the model doesn't know",
                found=f"token {least if least < 0 else largest} in prompt {index}{known}",
                why="on a GPU it would end the process with a message that names neither",
                fix="use the model's own tokenizer; labels, which have -100, are no prompts",
            )


def _each(prompts: Any) -> Iterator[Any]:
    if isinstance(prompts, str):
        raise _not_prompts(f"one text, {_short(prompts)}", "pass a list: [prompt]")
    if isinstance(prompts, Mapping):
        return iter((prompts,))
    try:
        each: Iterator[Any] = iter(prompts)
    except TypeError:
        raise _not_prompts(f"a {type(prompts).__name__}", "pass a list of prompts") from None
    return each


def _tokens_of(prompt: Any, tokenizer: Any, place: int, needed: frozenset[str]) -> Iterator[Tokens]:
    """Yield the tokens of one prompt, or of each row of a batch."""
    if isinstance(prompt, str):
        yield _from_text(prompt, tokenizer, place)
    elif isinstance(prompt, Mapping):
        yield from _from_batch(prompt, place, needed)
    elif _is_chat(prompt):
        yield _from_chat(prompt, tokenizer, place)
    else:
        yield _from_ids(prompt, place)


def _from_text(text: str, tokenizer: Any, place: int) -> Tokens:
    if tokenizer is None:
        raise UserError(
            "generate-needs-tokenizer",
            "text can't be generated from without the tokenizer",
            found=f"prompt {place} is text, {_short(text)}",
            why="the model takes tokens",
            fix="pass tokenizer=, the model's own",
        )
    # verbose: a warning of the tokenizer's own maximum, which is not the model's
    return tuple(tokenizer(text, verbose=False)["input_ids"])


def _from_chat(chat: Any, tokenizer: Any, place: int) -> Tokens:
    from jinja2 import TemplateError

    if tokenizer is None:
        raise UserError(
            "generate-needs-tokenizer",
            "a chat can't be generated from without the tokenizer",
            found=f"prompt {place} is a chat of {len(chat)} messages",
            why="its template says what the model is given",
            fix="pass tokenizer=, the model's own",
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            "generate-no-chat-template",
            "the tokenizer has no chat template",
            found=f"prompt {place} is a chat; {type(tokenizer).__name__} of {tokenizer.name_or_path!r}",
            why="the model was not made for chats, or its template was not saved with the tokenizer",
            fix="give the prompt as text, or set tokenizer.chat_template",
        )
    try:
        text = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise UserError(
            "generate-chat-refused",
            "the chat template does not take a chat",
            found=f"prompt {place}: {error}",
            why="a template may ask for certain roles in a certain order",
            fix="give the messages as the model's documentation has them",
        ) from None
    # The template holds the special tokens.
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _from_batch(batch: Mapping[str, Any], place: int, needed: frozenset[str]) -> Iterator[Tokens]:
    if "input_ids" not in batch:
        names = ", ".join(map(str, batch)) or "nothing"
        fix = 'a batch has "input_ids"; a chat is a list of messages'
        raise _not_prompts(f"item {place} has {names}", fix)
    others = [name for name, value in batch.items() if name in needed and value is not None]
    if others:
        raise UserError(
            "generate-from-tokens-alone",
            "zerofit.generate takes tokens, and no other inputs",
            found=f"batch {place} has {others[0]}",
            why="it would be left out, and the model asked something else",
            fix=f"call model.generate() itself, with synced_gpus=True under ZeRO-3, or leave {others[0]} out",
        )
    rows, masks = _plain(batch["input_ids"]), batch.get("attention_mask")
    masks = None if masks is None else _plain(masks)
    if len(rows) and isinstance(rows[0], Integral):
        rows, masks = [rows], None if masks is None else [masks]
    for number, row in enumerate(rows):
        if masks is None:
            yield _from_ids(row, place)
        else:
            yield tuple(token for token, is_there in zip(row, masks[number], strict=True) if is_there)


def _from_ids(ids: Any, place: int) -> Tokens:
    tokens = _plain(ids)
    if not isinstance(tokens, (list, tuple)) or not all(isinstance(token, Integral) for token in tokens):
        raise _not_prompts(
            f"item {place} is a {type(ids).__name__}: {_short(ids)}",
            "a prompt is a text, a chat (a list of messages), a list of token ids, or a row of a batch",
        )
    return tuple(map(int, tokens))


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, (list, tuple)) and len(prompt) > 0
    return is_list and all(isinstance(message, Mapping) and "role" in message for message in prompt)


def _plain(values: Any) -> Any:
    """Return a tensor's or an array's values as lists."""
    return values.tolist() if hasattr(values, "tolist") else values


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _empty(index: int) -> UserError:
    return UserError(
        "generate-empty-prompt",
        "a prompt is empty",
        found=f"prompt {index} has no tokens",
        why="there is nothing that the model could go on from",
        fix="leave it out, or start it with the model's beginning-of-text token",
    )


def _not_prompts(found: str, fix: str) -> UserError:
    return UserError(
        "generate-not-prompts",
        "these are no prompts",
        found=found,
        why="each is a text, a chat, token ids, or a batch of those",
        fix=fix,
    )
