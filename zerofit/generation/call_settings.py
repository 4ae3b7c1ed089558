"""The settings of generate() calls: transformers' generation settings, validated, and other arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

from zerofit.core.errors import UserError, nearest

_OBJECTS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "assistant_tokenizer",
    "custom_generate",
    "trust_remote_code",
)
"""Arguments of generate() that are not settings; lockstep.py refuses some of them."""
_TOKENS_ONLY = ("the results contain only tokens and text", "call model.generate() itself")
_UNSUPPORTED = {
    "streamer": ("it streams the tokens of one prompt in one process", "use progress= or out="),
    "synced_gpus": ("it follows from the model: ZeRO-3 and more than one rank", "leave it out"),
    "return_dict_in_generate": _TOKENS_ONLY,
    "output_scores": _TOKENS_ONLY,
    "output_logits": _TOKENS_ONLY,
    "output_attentions": _TOKENS_ONLY,
    "output_hidden_states": _TOKENS_ONLY,
    "max_length": (
        "it includes the prompt, so it means something else for each prompt",
        "use max_new_tokens, one for all or a list",
    ),
    "min_length": (
        "it includes the prompt and its padding, so it means something else for each prompt",
        "pass min_length=0, and min_new_tokens for a minimum length of completions",
    ),
}
"""Unsupported arguments of generate(): why, and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Arguments of every model.generate() call beside its prompts."""

    config: Any
    """The complete GenerationConfig: nothing is left to the model's own, except max_new_tokens, which
    differs."""
    objects: dict[str, Any]
    """Further arguments, such as logits_processor."""
    criteria: tuple[Any, ...]
    """Stopping criteria beside length, time and end-of-sequence tokens."""
    pad_token: int
    eos_tokens: frozenset[int]
    max_new_tokens: int | None
    """From the settings; None if they don't set it."""

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt in a batch."""
        return max(self.config.num_beams or 1, self.num_return_sequences)

    @property
    def num_return_sequences(self) -> int:
        """Completions of each prompt."""
        return int(self.config.num_return_sequences or 1)

    @property
    def has_fixed_cache(self) -> bool:
        """True if the cache has a fixed size, so that no forward pass may follow the last token."""
        from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

        return self.config.cache_implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS


def read_settings(model: Any, tokenizer: Any, *, given: Any, settings: Mapping[str, Any]) -> CallSettings:
    """Return the settings of all calls; `settings` override `given`, which overrides the model's own.

    Args:
        given: a GenerationConfig, a mapping, or the path of a file or folder with one; None without.

    Raises:
        UserError: a setting is unknown, unsupported, or refused by transformers.
    """
    for name in _UNSUPPORTED.keys() - {"min_length"}:
        if settings.get(name) is not None:
            raise _unsupported_setting(name, f"{name}={settings[name]!r}")
    try:
        config = _whole_config(model, given)
        _update(config, {name: value for name, value in settings.items() if name not in _OBJECTS})
        _check_counts(config)
        eos = _as_tuple(config.eos_token_id)
    except (TypeError, ValueError, AttributeError, OSError) as error:
        raise settings_disagree({"generation_config": given, **settings}, error) from error
    if config.min_length and not model.config.is_encoder_decoder:
        where = "given or in the model's generation settings"
        raise _unsupported_setting("min_length", f"min_length={config.min_length}, {where}")
    objects = {name: settings[name] for name in _OBJECTS if settings.get(name) is not None}
    pads = (config.pad_token_id, getattr(tokenizer, "pad_token_id", None), *eos, 0)
    config.pad_token_id = int(next(token for token in pads if token is not None))
    max_new_tokens = config.max_new_tokens
    if max_new_tokens is None and model.config.is_encoder_decoder and config.max_length is not None:
        max_new_tokens = config.max_length - 1  # it includes the decoder's start token
    config.max_new_tokens = config.max_length = None
    config.return_dict_in_generate = False
    config.output_scores = config.output_logits = False
    config.output_attentions = config.output_hidden_states = False
    criteria = (*_stop_strings(config, tokenizer), *objects.pop("stopping_criteria", ()))
    return CallSettings(
        config=config,
        objects=objects,
        pad_token=config.pad_token_id,
        eos_tokens=frozenset(eos),
        criteria=criteria,
        max_new_tokens=max_new_tokens,
    )


def settings_disagree(settings: Mapping[str, Any], error: Exception) -> UserError:
    """Return the error for settings that transformers refuses."""
    said = (f"{name}={value!r}" for name, value in settings.items() if value is not None)
    return UserError(
        "generate-settings-disagree",
        "transformers refuses these generation settings",
        found=", ".join(said) or "the model's own",
        why=" ".join(str(error).split()),
        fix="change the settings that it names",
    )


def _unsupported_setting(name: str, found: str) -> UserError:
    why, fix = _UNSUPPORTED[name]
    return UserError(
        "generate-setting-without-meaning",
        f"zerofit.generate does not support {name}",
        found=found,
        why=why,
        fix=fix,
    )


def _whole_config(model: Any, given: Any) -> Any:
    """Return a copy of the given settings, completed by the model's own."""
    from transformers import GenerationConfig

    if isinstance(given, str | PathLike):
        path = Path(given)
        folder, name = (path, None) if path.is_dir() else (path.parent, path.name)
        config = GenerationConfig.from_pretrained(folder, config_file_name=name)
    elif given is None or isinstance(given, Mapping):
        config = GenerationConfig()
        _update(config, given or {})
    else:
        config = copy.deepcopy(given)
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    return config


def _update(config: Any, settings: Mapping[str, Any]) -> None:
    """Set fields of a GenerationConfig."""
    from transformers import GenerationConfig

    for name, value in config.update(**settings).items():
        near = nearest(name, (known for known in vars(GenerationConfig()) if not known.startswith("_")))
        raise UserError(
            "generate-unknown-setting",
            "transformers has no such generation setting",
            found=f"{name}={value!r}",
            why="it would have no effect",
            fix=f"use {near}" if near else "see the settings of transformers.GenerationConfig",
            see="https://huggingface.co/docs/transformers/main_classes/text_generation",
        )


def _check_counts(config: Any) -> None:
    for name in ("num_beams", "num_return_sequences", "max_new_tokens"):
        count = getattr(config, name)
        if count is not None and (not isinstance(count, Integral) or count < 1):
            raise ValueError(f"{name} must be an integer of at least 1, not {count!r}")


def _stop_strings(config: Any, tokenizer: Any) -> tuple[Any, ...]:
    """Remove stop_strings from the settings, and return the stopping criteria for them."""
    if config.stop_strings is None:
        return ()
    if tokenizer is None:
        raise UserError(
            "generate-needs-tokenizer",
            "stop_strings needs the tokenizer",
            found=f"stop_strings={config.stop_strings!r} and no tokenizer",
            why="they are searched in the decoded text",
            fix="pass tokenizer=, the model's own",
        )
    from transformers import StopStringCriteria

    criterion = StopStringCriteria(tokenizer, config.stop_strings)
    config.stop_strings = None
    return (criterion,)


def _as_tuple(tokens: Any) -> tuple[int, ...]:
    if tokens is None:
        return ()
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return tuple(values) if isinstance(values, (list, tuple)) else (int(values),)
