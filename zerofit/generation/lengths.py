"""How many tokens each completion may have, and whether the model has positions for them."""

from __future__ import annotations

from collections.abc import Sequence

from zerofit.errors import UserError
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
    lengths = (wanted,) * num_prompts if isinstance(wanted, int) else tuple(int(each) for each in wanted)
    if len(lengths) != num_prompts:
        raise UserError(
            "generate-max-new-tokens",
            "there must be one max_new_tokens for each prompt",
            found=f"{len(lengths)} of them for {num_prompts} prompts",
            why="they go together by their places",
            fix="pass one number for all prompts, or a list as long as theirs",
        )
    shortest = min((wanted,) if isinstance(wanted, int) else lengths, default=1)
    if shortest < 1:
        raise UserError(
            "generate-max-new-tokens",
            "a completion has at least one token",
            found=f"max_new_tokens={shortest}",
            why="there would be nothing to generate",
            fix="pass 1 or more",
        )
    return lengths


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
        before, most = (1, positions.num_prompt_tokens) if is_encoder_decoder else (len(tokens), None)
        if most is not None and len(tokens) > most:
            raise _too_long(f"prompt {index} has {len(tokens)} tokens, the encoder {most} positions", None)
        if positions.num_tokens is not None and before + length > positions.num_tokens:
            what = "the decoder's start" if is_encoder_decoder else f"prompt {index}"
            found = (
                f"{what} has {before} {'tokens' if before > 1 else 'token'}, and max_new_tokens={length}: "
                f"{before + length} together, the model has {positions.num_tokens} positions"
            )
            raise _too_long(found, positions.num_tokens - before)


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
