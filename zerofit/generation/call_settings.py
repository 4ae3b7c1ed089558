"""How one call generates: transformers' generation settings, checked, and what goes with each call."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from zerofit.core.errors import UserError, nearest

_OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of generate() that are not settings, and that a rank uses for its own prompts alone."""
_FURTHER = ("assistant_model", "assistant_tokenizer", "custom_generate", "trust_remote_code")
"""Further arguments of generate() that are not settings; in_step.py says where they are refused."""
_NOT_SERVED = {
    "streamer": ("it takes the tokens of one prompt, as one process makes them", "progress= or out="),
    "synced_gpus": ("it follows from the model: ZeRO-3 and more than one rank", "nothing: leave it out"),
    "return_dict_in_generate": ("the results hold tokens and text", "nothing: leave it out"),
    "output_scores": ("the results hold tokens and text", "model.generate() itself"),
    "output_logits": ("the results hold tokens and text", "model.generate() itself"),
    "output_attentions": ("the results hold tokens and text", "model.generate() itself"),
    "output_hidden_states": ("the results hold tokens and text", "model.generate() itself"),
    "max_length": (
        "it counts the prompt too, and so would say something else for each prompt",
        "max_new_tokens, one for all or a list",
    ),
}
"""Arguments of generate() that have no meaning here: why, and what to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """What every call of model.generate gets beside its prompts."""

    config: Any
    """GenerationConfig, whole: nothing is left to the model's own, nor to max_new_tokens, which differs."""
    objects: dict[str, Any]
    """Further arguments, such as logits_processor."""
    criteria: tuple[Any, ...]
    """What ends a completion beside its length, its time and the end-of-sequence tokens."""
    pad_token: int
    eos_tokens: frozenset[int]
    max_new_tokens: int | None
    """What the settings themselves say; None where they say nothing."""

    @property
    def num_sequences(self) -> int:
        """Sequences that a prompt takes in a batch."""
        return max(self.config.num_beams or 1, self.num_return_sequences)

    @property
    def num_return_sequences(self) -> int:
        """Completions of a prompt."""
        return int(self.config.num_return_sequences or 1)

    @property
    def has_fixed_cache(self) -> bool:
        """Whether the cache has its size from the beginning, so that no pass may follow the last token."""
        from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

        return self.config.cache_implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS


def read_settings(model: Any, tokenizer: Any, *, given: Any, settings: Mapping[str, Any]) -> CallSettings:
    """Return how a model generates, by the order of transformers: settings, those given, the model's own.

    Args:
        model: of transformers; its own settings are not changed.
        tokenizer: None without.
        given: a GenerationConfig, a mapping, or the path of a file or a folder with one; None without.
        settings: single ones, and further arguments of generate().

    Raises:
        UserError: there is no such setting, it has no meaning here, or is of another kind.
    """
    _check_names(settings)
    try:
        return _read_settings(model, tokenizer, given, settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise _disagree({"generation_config": given, **settings}, error) from error


def _read_settings(model: Any, tokenizer: Any, given: Any, settings: Mapping[str, Any]) -> CallSettings:
    config = _whole_config(model, given)
    objects = {name: settings[name] for name in (*_OBJECTS, *_FURTHER) if settings.get(name) is not None}
    plain = {name: value for name, value in settings.items() if name not in (*_OBJECTS, *_FURTHER)}
    config.update(**plain)
    _check_counts(config)
    _check_min_length(config, model)
    max_new_tokens, config.max_new_tokens = _max_new_tokens(config, model), None
    config.max_length = None
    config.return_dict_in_generate = False
    config.output_scores = config.output_logits = False
    config.output_attentions = config.output_hidden_states = False
    eos = _as_tuple(config.eos_token_id)
    pads = (config.pad_token_id, getattr(tokenizer, "pad_token_id", None), *eos)
    pad = next((token for token in pads if token is not None), 0)
    config.pad_token_id = int(pad)
    criteria = (*_stop_strings(config, tokenizer), *objects.pop("stopping_criteria", ()))
    return CallSettings(
        config=config,
        objects=objects,
        pad_token=int(pad),
        eos_tokens=frozenset(eos),
        criteria=criteria,
        max_new_tokens=max_new_tokens,
    )


def _check_names(settings: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    for name, value in settings.items():
        if name in _NOT_SERVED and value is not None:
            why, fix = _NOT_SERVED[name]
            raise UserError(
                "generate-setting-without-meaning",
                f"zerofit.generate takes no {name}",
                found=f"{name}={value!r}",
                why=why,
                fix=f"use {fix}" if not fix.startswith("nothing") else fix.removeprefix("nothing: "),
            )
        if name == "cache_implementation" and value == "paged":
            raise UserError(
                "generate-setting-without-meaning",
                "zerofit.generate makes its batches itself",
                found="cache_implementation='paged', which is continuous batching",
                why="it would put other prompts together than those of a call",
                fix="leave it out; model.generate_batch() has it, on whole models",
            )
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    _check_known(settings, known | set(_OBJECTS) | set(_FURTHER) | set(_NOT_SERVED))


def _check_known(names: Mapping[str, Any], known: set[str]) -> None:
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                "generate-unknown-setting",
                "transformers has no such generation setting",
                found=f"{name}={names[name]!r}",
                why="it would change nothing",
                fix=f"use {near}" if near else "see the settings of transformers.GenerationConfig",
                see="https://huggingface.co/docs/transformers/main_classes/text_generation",
            )


def _whole_config(model: Any, given: Any) -> Any:
    """Return a copy of the settings that are given, filled with the model's own."""
    import copy

    from transformers import GenerationConfig

    if isinstance(given, Mapping):
        known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
        _check_known(given, known)
        config = GenerationConfig(**given)
    elif isinstance(given, str | PathLike):
        config = _from_file(Path(given))
    else:
        config = GenerationConfig() if given is None else copy.deepcopy(given)
    own = model.generation_config.to_dict()
    config.update(**own, defaults_only=True, allow_custom_entries=True)
    return config


def _from_file(path: Path) -> Any:
    from transformers import GenerationConfig

    try:
        if path.is_dir():
            return GenerationConfig.from_pretrained(path)
        return GenerationConfig.from_pretrained(path.parent, config_file_name=path.name)
    except (OSError, ValueError) as error:
        raise UserError(
            "generate-no-generation-config",
            "the generation settings can't be read",
            found=f"{path}: {str(error).splitlines()[0]}",
            why="it is to be a JSON file as save_pretrained() writes it, or a folder that has one",
            fix="name such a file, or pass the settings themselves",
        ) from None


def _disagree(settings: Mapping[str, Any], error: Exception) -> UserError:
    said = (f"{name}={value!r}" for name, value in settings.items() if value is not None)
    return UserError(
        "generate-settings-disagree",
        "transformers does not take these generation settings",
        found=", ".join(said) or "the model's own",
        why=" ".join(str(error).split()),
        fix="change what it names",
    )


def _check_counts(config: Any) -> None:
    for name in ("num_beams", "num_return_sequences"):
        count = getattr(config, name)
        if count is not None and operator.index(count) < 1:
            raise ValueError(f"{name}={count} is less than 1")


def _max_new_tokens(config: Any, model: Any) -> int | None:
    """Return what the settings say of a completion's length, where they say it alike for all prompts."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if model.config.is_encoder_decoder and config.max_length is not None:
        return int(config.max_length) - 1  # it counts the decoder's start token
    return None


def _check_min_length(config: Any, model: Any) -> None:
    if config.min_length and not model.config.is_encoder_decoder:
        raise UserError(
            "generate-setting-without-meaning",
            "zerofit.generate takes no min_length",
            found=f"min_length={config.min_length}, given or in the model's generation settings",
            why="it counts the prompt and its padding too, and so would say something else for each prompt",
            fix="pass min_length=0, and min_new_tokens where a completion is to have so many",
        )


def _stop_strings(config: Any, tokenizer: Any) -> tuple[Any, ...]:
    """Take stop_strings out of the settings, and return what looks for them."""
    if config.stop_strings is None:
        return ()
    if tokenizer is None:
        raise UserError(
            "generate-needs-tokenizer",
            "stop_strings needs the tokenizer",
            found=f"stop_strings={config.stop_strings!r} and no tokenizer",
            why="they are looked for in the text of the tokens",
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
