"""What generation settings may be: the bounds of flags, and a JSON file read and held against the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zerofit.cli.parameters import Number
from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import NOTES_OF_GENERATION_CONFIG

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SETTINGS_PAGE = "https://huggingface.co/docs/transformers/main_classes/text_generation"
_ABOVE_0 = Number(float, least=0, without_least=True)
_PART = Number(float, least=0, most=1)
_PART_ABOVE_0 = Number(float, least=0, most=1, without_least=True)
_COUNT, _SOME = Number(int, least=0), Number(int, least=1)
NUMBERS = {
    "temperature": Number(float, least=0),  # 0 has an error of its own, where tokens are drawn
    "top_p": _PART,
    "top_k": _COUNT,
    "num_beams": _SOME,
    "num_return_sequences": _SOME,
    "repetition_penalty": _ABOVE_0,
    "max_new_tokens": _SOME,
    "encoder_repetition_penalty": _ABOVE_0,
    "encoder_no_repeat_ngram_size": _COUNT,
    "epsilon_cutoff": _PART,
    "eta_cutoff": _PART,
    "max_time": _ABOVE_0,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "min_p": _PART,
    "no_repeat_ngram_size": _COUNT,
    "num_beam_groups": _SOME,
    "prefill_chunk_size": _SOME,
    "prompt_lookup_num_tokens": _SOME,
    "top_h": _PART_ABOVE_0,
    "typical_p": _PART_ABOVE_0,
}
"""Numbers of transformers' GenerationConfig, and their bounds.
Source: transformers (5.23), generation/logits_process.py, which raises beyond them, token by token."""
_ANY_NUMBERS = frozenset({"diversity_penalty", "guidance_scale", "length_penalty", "penalty_alpha"})
_SWITCHES = frozenset(
    {
        "disable_compile",
        "do_sample",
        "remove_invalid_values",
        "renormalize_logits",
        "token_healing",
        "use_cache",
        "use_mtp",
    }
)
_TOKENS = frozenset(
    {"begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id"}
    | {"forced_eos_token_id", "pad_token_id", "suppress_tokens"}
)
_OBJECTS = frozenset({"cache_config", "compile_config", "continuous_batching_config", "watermarking_config"})
"""Settings that transformers takes as objects of its own alone (GenerationConfig.validate)."""


def read_generation_config(file: Path) -> dict[str, Any]:
    """Return the settings of a JSON file, whose values can stand as they are.

    Raises:
        UserError: it can't be read, is no JSON object, or one of its values can't be.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"), parse_constant=_no_number)
    except OSError as error:
        raise _broken(file, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _broken(file, "it is no text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise _broken(file, f"line {error.lineno}: invalid JSON: {error.msg}") from None
    except RecursionError:
        raise _broken(file, "invalid JSON: brackets in brackets without end") from None
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise _broken(file, f"invalid JSON: {error}") from None
    if not isinstance(document, dict):
        raise _broken(file, "it holds no JSON object")
    values = {
        name: value
        for name, value in document.items()
        if name not in NOTES_OF_GENERATION_CONFIG and value is not None
    }
    for name, value in values.items():
        wanted = _wanted(name, value)
        if wanted is not None:
            raise bad_setting(name, value, wanted=wanted, where=str(file))
    return {name: _as_float(name, value) for name, value in values.items()}


def check_own_numbers(values: Mapping[str, Any], *, where: str) -> None:
    """Check the numbers that a model says of itself; of its other settings transformers' own word is taken.

    Args:
        values: by the names of GenerationConfig's fields.
        where: they stand, in words.

    Raises:
        UserError: one can't be.
    """
    for name, value in values.items():
        wanted = _wanted(name, value) if name in NUMBERS and value is not None else None
        if wanted is not None:
            raise bad_setting(name, value, wanted=wanted, where=where)


def check_tokens_exist(values: Mapping[str, Any], *, num_tokens: int, where: str) -> None:
    """Check that the model has the tokens that settings name.

    Args:
        values: as read_generation_config() returns them.
        num_tokens: that the model knows.
        where: they stand, in words.

    Raises:
        UserError: it does not have one.
    """
    for name in sorted(_TOKENS & values.keys()):
        tokens = values[name] if isinstance(values[name], list) else [values[name]]
        if max(tokens, default=0) >= num_tokens:
            wanted = f"a token of the model, which has {num_tokens}, from 0 to {num_tokens - 1}"
            raise bad_setting(name, values[name], wanted=wanted, where=where)


def bad_setting(name: str, value: Any, *, wanted: str, where: str) -> UserError:
    """Return what is said of a setting that can't have its value.

    Args:
        name: of GenerationConfig's field.
        value: what it has.
        wanted: what it is to be, in words.
        where: it stands, in words.
    """
    return UserError(
        "generate-bad-setting",
        f"{name} can't have this value",
        found=f'"{name}": {json.dumps(value)}   ({where})',
        why=f"it is {wanted}",
        fix="mend it, or leave it out",
        see=SETTINGS_PAGE,
    )


def _wanted(name: str, value: Any) -> str | None:
    """Return what a value is to be, in words; None where it is that."""
    if name in NUMBERS:
        number = NUMBERS[name]
        is_number = isinstance(value, int if number.is_whole else int | float) and not isinstance(value, bool)
        return None if is_number and number.takes(value) else number.meaning
    if name in _ANY_NUMBERS:
        return None if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if name in _SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if name in _TOKENS:
        tokens = value if isinstance(value, list) else [value]
        are_tokens = all(type(token) is int and token >= 0 for token in tokens)
        return None if are_tokens else "the number of a token, or a list of such"
    return "an object of transformers, which no file can hold" if name in _OBJECTS else None


def _as_float(name: str, value: Any) -> Any:
    # transformers refuses a temperature of 2: it wants 2.0.
    return float(value) if name in NUMBERS and not NUMBERS[name].is_whole else value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _broken(file: Path, found: str) -> UserError:
    return UserError(
        "generation-config-broken",
        "the file with generation settings can't be read",
        found=f"--generation-config {file}: {found}",
        why="it is a JSON object with settings of transformers' GenerationConfig, as it saves itself",
        fix="name such a file, or give the settings as flags",
        see=SETTINGS_PAGE,
    )
