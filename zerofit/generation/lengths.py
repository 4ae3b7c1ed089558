"""How many tokens each completion may have, and whether the model has positions for them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from zerofit.core.errors import UserError
from zerofit.generation.model_kind import Positions
from zerofit.generation.prompts import Tokens


def lengths_of(
    given: int | Sequence[int] | None, of_settings: int | None, *, num_prompts: int
) -> tuple[int, ...]:
    """Return the new tokens that each prompt's completion may have.

    Args:
        given: for all prompts, or one for each; None for what the settings say.
        of_settings: for all prompts; None where they say nothing.
        num_prompts: on this rank.

    Raises:
        UserError: nothing says it, it is less than 1, or there is not one for each prompt.
    """
    wanted = of_settings if given is None else given
    if wanted is None:
        raise UserError(
            "generate-needs-max-new-tokens",
            "nothing says how long a completion may be",
            found="no max_new_tokens, neither given nor in the generation settings",
            why="transformers would end each after 20 tokens, whatever the model had to say",
            fix="pass max_new_tokens=",
        )
    if isinstance(wanted, Iterable) and getattr(wanted, "ndim", 1) > 0:
        lengths = numbers = tuple(map(_whole_number, wanted))
    else:
        numbers = (_whole_number(wanted),)
        lengths = numbers * num_prompts
    if len(lengths) != num_prompts:
        raise UserError(
            "generate-max-new-tokens",
            "there must be one max_new_tokens for each prompt",
            found=f"{len(lengths)} of them for {num_prompts} prompts",
            why="they go together by their places",
            fix="pass one number for all prompts, or a list as long as theirs",
        )
    shortest = min(numbers, default=1)
    if shortest < 1:
        raise UserError(
            "generate-max-new-tokens",
            "a completion has at least one token",
            found=f"max_new_tokens={shortest}",
            why="there would be nothing to generate",
            fix="pass 1 or more",
        )
    return lengths


def _whole_number(value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UserError(
        "generate-max-new-tokens",
        "a number of tokens is a whole number",
        found=f"max_new_tokens={value!r}",
        why="it counts the new tokens of each completion",
        fix="pass one number for all prompts, or a list as long as theirs",
    )


def check_lengths(
    prompts: Sequence[Tokens], lengths: Sequence[int], positions: Positions, *, is_encoder_decoder: bool
) -> None:
    """Check that a model has positions for each prompt and its completion.

    A table of positions ends with an index error, on a GPU with one that ends the process; rotary positions
    go on, and the model, which has never seen them, writes nonsense. So both are errors.

    Args:
        prompts: the tokens of each.
        lengths: new tokens of each.
        positions: what the model has.
        is_encoder_decoder: whether prompt and completion are counted apart.

    Raises:
        UserError: it does not.
    """
    for index, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
        most = positions.num_prompt_tokens
        if is_encoder_decoder and most is not None and len(tokens) > most:
            raise _too_long(f"prompt {index} has {len(tokens)} tokens, the encoder {most} positions", None)
        before = _tokens_before(len(tokens), is_encoder_decoder=is_encoder_decoder)
        room = room_for_new(len(tokens), positions, is_encoder_decoder=is_encoder_decoder)
        if room is not None and length > room:
            what = "the decoder's start" if is_encoder_decoder else f"prompt {index}"
            found = (
                f"{what} has {before} {'tokens' if before > 1 else 'token'}, and max_new_tokens={length}: "
                f"{before + length} together, the model has {positions.num_tokens} positions"
            )
            raise _too_long(found, room)


def room_for_new(num_prompt_tokens: int, positions: Positions, *, is_encoder_decoder: bool) -> int | None:
    """Return the most new tokens for which a model has positions; None where nothing limits them.

    Args:
        num_prompt_tokens: of the prompt.
        positions: what the model has.
        is_encoder_decoder: whether prompt and completion are counted apart.
    """
    if positions.num_tokens is None:
        return None
    return positions.num_tokens - _tokens_before(num_prompt_tokens, is_encoder_decoder=is_encoder_decoder)


def most_prompt_tokens(positions: Positions, *, is_encoder_decoder: bool) -> int | None:
    """Return the tokens of the longest prompt that can have a completion; None where nothing limits them."""
    if is_encoder_decoder:
        return positions.num_prompt_tokens
    return None if positions.num_tokens is None else positions.num_tokens - 1


def _tokens_before(num_prompt_tokens: int, *, is_encoder_decoder: bool) -> int:
    return 1 if is_encoder_decoder else num_prompt_tokens  # the decoder's start token


def _too_long(found: str, most_new: int | None) -> UserError:
    shorter = "shorten the prompt"
    if most_new is not None and most_new > 0:
        shorter += f", or pass max_new_tokens={most_new} or less"
    return UserError(
        "generate-prompt-too-long",
        "a prompt and its completion are longer than the model's positions",
        found=found,
        why="the model was made for so many (max_position_embeddings), and can't tell the places behind them",
        fix=f"{shorter}, or use a model with a longer context",
    )
