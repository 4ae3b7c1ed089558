"""Prompts as texts, chats, token ids or batches, converted to tokens that fit the model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from zerofit.core.errors import UserError
from zerofit.generation.model_kind import Positions

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
"""Fields of a batch that change the model's input, and that some models accept unnamed.
https://huggingface.co/docs/transformers/main_classes/text_generation"""
_MAY_BE_LEFT_OUT = frozenset(("attention_mask", "input_ids", "labels", "position_ids", "token_type_ids"))
"""Fields of a batch that follow from the tokens and their mask."""


def read_prompts(prompts: Any, tokenizer: Any, *, taken: Collection[str] = ()) -> tuple[Tokens, ...]:
    """Return the tokens of each prompt, in order; the tokenizer is not changed.

    Args:
        prompts: texts, chats, token ids, or batches with "input_ids" and "attention_mask", whose rows are
            prompts.
        taken: names of the model's inputs; other fields of a batch, such as a row number, are ignored.
    """
    if isinstance(prompts, str):
        raise _not_prompts(f"one text, {_short(prompts)}", "pass a list: [prompt]")
    needed = frozenset((*_OTHER_INPUTS, *taken)) - _MAY_BE_LEFT_OUT
    found: list[Tokens] = []
    for place, prompt in enumerate((prompts,) if isinstance(prompts, Mapping) else prompts):
        for tokens in _tokens_of(prompt, tokenizer, place, needed):
            if not tokens:
                raise UserError(
                    "generate-empty-prompt",
                    "a prompt is empty",
                    found=f"prompt {len(found)} has no tokens",
                    why="the model needs at least one token to continue",
                    fix="leave it out, or start it with the model's beginning-of-text token",
                )
            found.append(tokens)
    return tuple(found)


def check_tokens(prompts: Iterable[Tokens], *, num_known: int | None) -> None:
    """Check that a model has embeddings for every token of its prompts.

    Args:
        num_known: number of the model's token embeddings; None if unknown.
    """
    for index, tokens in enumerate(prompts):
        least, largest = min(tokens), max(tokens)
        if least < 0 or (num_known is not None and largest >= num_known):
            known = "" if num_known is None else f"; the model's vocabulary is 0 to {num_known - 1}"
            raise UserError(
                "generate-unknown-token",
                "a prompt has a token outside the model's vocabulary",
                found=f"token {least if least < 0 else largest} in prompt {index}{known}",
                why="on a GPU it would end the process with a message that names neither",
                fix="use the model's own tokenizer; labels, which contain -100, are not prompts",
            )


def lengths_of(
    given: int | Sequence[int] | None, of_settings: int | None, *, num_prompts: int
) -> tuple[int, ...]:
    """Return the maximum of new tokens for each prompt's completion.

    Args:
        given: for all prompts, or one for each; None uses the settings.
        of_settings: for all prompts; None if not set.
    """
    wanted: Any = of_settings if given is None else given
    if wanted is None:
        raise UserError(
            "generate-needs-max-new-tokens",
            "the length of completions is not set",
            found="no max_new_tokens, neither given nor in the generation settings",
            why="transformers would stop each one after 20 tokens",
            fix="pass max_new_tokens=",
        )
    is_for_all = not isinstance(wanted, Iterable) or getattr(wanted, "ndim", 1) == 0
    try:
        numbers = tuple(map(operator.index, [wanted] if is_for_all else wanted))
    except TypeError:
        numbers = (0,)
    lengths = numbers * num_prompts if is_for_all else numbers
    if min(numbers, default=1) < 1 or len(lengths) != num_prompts:
        raise UserError(
            "generate-max-new-tokens",
            "max_new_tokens must be an integer of at least 1, or one per prompt",
            found=f"{len(lengths)} of them for {num_prompts} prompts"
            if len(lengths) != num_prompts
            else f"max_new_tokens={wanted!r}",
            why="it limits the new tokens of each completion",
            fix="pass one number for all prompts, or a list with one per prompt",
        )
    return lengths


def check_lengths(
    prompts: Sequence[Tokens], lengths: Sequence[int], positions: Positions, *, is_encoder_decoder: bool
) -> None:
    """Check that a model has positions for each prompt and its completion.

    Beyond a position table, models raise an index error, which on a GPU ends the process; beyond trained
    rotary positions, they generate nonsense. Both are refused.

    Args:
        is_encoder_decoder: whether prompt and completion are counted separately.
    """
    for index, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
        most = positions.num_prompt_tokens
        if is_encoder_decoder and most is not None and len(tokens) > most:
            raise _too_long(f"prompt {index} has {len(tokens)} tokens, the encoder {most} positions", 0)
        room = room_for_new(len(tokens), positions, is_encoder_decoder=is_encoder_decoder)
        if room is not None and length > room:
            what = "the decoder's start" if is_encoder_decoder else f"prompt {index}"
            before = 1 if is_encoder_decoder else len(tokens)
            found = (
                f"{what} has {before} {'tokens' if before > 1 else 'token'}, and max_new_tokens={length}: "
                f"{before + length} together, the model has {positions.num_tokens} positions"
            )
            raise _too_long(found, room)


def room_for_new(num_prompt_tokens: int, positions: Positions, *, is_encoder_decoder: bool) -> int | None:
    """Return how many new tokens a model has positions for; None if unlimited."""
    before = 1 if is_encoder_decoder else num_prompt_tokens  # the decoder's start token
    return None if positions.num_tokens is None else positions.num_tokens - before


def _too_long(found: str, most_new: int) -> UserError:
    shorter = f", or pass max_new_tokens={most_new} or less" if most_new > 0 else ""
    return UserError(
        "generate-prompt-too-long",
        "a prompt and its completion are longer than the model's positions",
        found=found,
        why="the model has no positions beyond those it was trained for (max_position_embeddings)",
        fix=f"shorten the prompt{shorter}, or use a model with a longer context",
    )


def _tokens_of(prompt: Any, tokenizer: Any, place: int, needed: frozenset[str]) -> Iterator[Tokens]:
    """Yield the tokens of one prompt, or of each row of a batch."""
    is_chat = _is_chat(prompt)
    if (isinstance(prompt, str) or is_chat) and tokenizer is None:
        raise UserError(
            "generate-needs-tokenizer",
            "texts and chats need a tokenizer",
            found=f"prompt {place} is "
            + (f"a chat of {len(prompt)} messages" if is_chat else f"text, {_short(prompt)}"),
            why="the model needs tokens",
            fix="pass tokenizer=, the model's own",
        )
    if isinstance(prompt, Mapping):
        yield from _from_batch(prompt, place, needed)
    elif isinstance(prompt, str):
        # verbose: a warning on the tokenizer's own maximum, which is not the model's
        yield tuple(tokenizer(prompt, verbose=False)["input_ids"])
    elif is_chat:
        text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
        # The template contains the special tokens.
        yield tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    else:
        yield _from_ids(prompt, place)


def _from_batch(batch: Mapping[str, Any], place: int, needed: frozenset[str]) -> Iterator[Tokens]:
    if "input_ids" not in batch:
        names = ", ".join(map(str, batch)) or "nothing"
        fix = 'a batch has "input_ids"; a chat is a list of messages'
        raise _not_prompts(f"item {place} has {names}", fix)
    others = [name for name, value in batch.items() if name in needed and value is not None]
    if others:
        raise UserError(
            "generate-from-tokens-alone",
            "zerofit.generate supports tokens, and no other inputs",
            found=f"batch {place} has {others[0]}",
            why="it would be ignored, and the model's input would differ",
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


def _not_prompts(found: str, fix: str) -> UserError:
    return UserError(
        "generate-not-prompts",
        "these are not prompts",
        found=found,
        why="each is a text, a chat, token ids, or a batch of those",
        fix=fix,
    )
