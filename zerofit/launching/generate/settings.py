"""Generation settings of `zerofit generate`: flags override a JSON file, which overrides the model's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.errors import UserError, first_line
from zerofit.core.json_text import parse_json
from zerofit.core.upstream.transformers import NOTES_OF_GENERATION_CONFIG

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from zerofit.generation.call_settings import CallSettings

DEFAULT_MAX_NEW_TOKENS = 256
"""ASSUMPTION: a paragraph or two; transformers' default of 20 truncates most answers."""
_SAMPLING = ("temperature", "top_p", "top_k")
"""Settings without effect unless sampling is on."""
_FLOATS = ("temperature", "top_p", "repetition_penalty")
"""Settings that transformers refuses as integers, which JSON writes without a decimal point."""
_SEE = "https://huggingface.co/docs/transformers/main_classes/text_generation"
_FIXES = {
    "max_length": 'write "max_new_tokens" instead, or leave it out and set --max-new-tokens',
    "min_length": 'write "min_length": 0 into a file for --generation-config, and "min_new_tokens" there',
}
"""Fixes for unsupported settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """The generation settings of a run."""

    call: CallSettings
    """As the ranks will read them, completed by the model's own."""
    given: dict[str, Any]
    """Settings of flags and file, without max_new_tokens."""
    max_new_tokens: int

    @property
    def samples(self) -> bool:
        """True if tokens are sampled, so that they depend on a seed and the batches."""
        return bool(self.call.config.do_sample)

    def line(self, *, seed: int) -> str:
        """Return the settings in one line."""
        config, num_completions = self.call.config, self.call.num_return_sequences
        words = [f"sampling with seed {seed}"] if self.samples else []
        words += [f"{config.num_beams} beams"] if (config.num_beams or 1) > 1 else []
        words = words or ["greedy"]
        if self.samples:
            values = ((name, getattr(config, name)) for name in _SAMPLING)
            words += [f"{name} {value}" for name, value in values if value is not None]
        if num_completions > 1:
            words.append(f"{num_completions} completions per prompt")
        return ", ".join([*words, f"at most {self.max_new_tokens} new tokens"])


def given_settings(flags: Mapping[str, Any], *, file: Path | None) -> dict[str, Any]:
    """Return the settings of flags and file by GenerationConfig's field names; flags take precedence.

    Args:
        flags: by GenerationConfig's field names; None if not given.
    """
    by_flag = {name: value for name, value in flags.items() if value is not None}
    drawing = [name for name in _SAMPLING if name in by_flag]
    if drawing and by_flag.get("do_sample") is False:
        named = ", ".join(f"--{name.replace('_', '-')} {by_flag[name]}" for name in drawing)
        raise UserError(
            "greedy-with-sampling",
            "greedy generation does not sample",
            found=f"--greedy with {named}",
            why="these control sampling",
            fix="leave out --greedy, or the others",
        )
    if drawing:
        by_flag["do_sample"] = True  # a given temperature should take effect
    return {**(_read_file(file) if file else {}), **by_flag}


def whole_settings(
    given: Mapping[str, Any], *, folder: Path, config: Any, tokenizer: Any
) -> GenerationSettings:
    """Return the given settings, completed by the model's own.

    Raises:
        UserError: transformers refuses them, or they are unsupported.
    """
    from zerofit.generation.call_settings import read_settings

    # The attributes of a model that are read: it is not loaded yet.
    model: Any = SimpleNamespace(config=config, generation_config=_own_settings(folder, config))
    try:
        call = read_settings(model, tokenizer, given=None, settings=given)
    except UserError as error:
        error.summary = error.summary.replace("zerofit.generate", "zerofit generate")
        error.fix, error.see = _FIXES.get(error.found.partition("=")[0], error.fix), _SEE
        raise
    if call.config.do_sample and call.config.temperature == 0:
        raise UserError(
            "temperature-zero",
            "sampling at temperature 0 is impossible",
            found="temperature=0" if "temperature" in given else f"temperature=0 in {folder}",
            why="logits are divided by it; towards 0, the most likely token is chosen each time",
            fix="use --greedy, which chooses the most likely token",
        )
    return GenerationSettings(
        call=call,
        given={name: value for name, value in given.items() if name != "max_new_tokens"},
        max_new_tokens=call.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
    )


_LARGEST = 16 * 1024 * 1024
"""Bytes of a file with settings. ASSUMPTION."""


def _read_file(file: Path) -> dict[str, Any]:
    try:
        document = parse_json(read_bounded_text(file, most_bytes=_LARGEST, encoding="utf-8-sig"))
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        place = f"line {error.lineno}: invalid JSON: " if isinstance(error, json.JSONDecodeError) else ""
        found = getattr(error, "strerror", None) or getattr(error, "msg", None) or error
        raise _broken(f"--generation-config {file}: {place}{found}") from None
    return {
        name: float(value) if name in _FLOATS and type(value) is int else value
        for name, value in document.items()
        if name not in NOTES_OF_GENERATION_CONFIG and value is not None
    }


def _own_settings(folder: Path, config: Any) -> Any:
    """Return a model's own settings."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # transformers may raise anything
        raise _broken(f"{file}: {first_line(error)}") from None


def _broken(found: str) -> UserError:
    return UserError(
        "generation-config-broken",
        "the file with generation settings can't be read",
        found=found,
        why="it must be a JSON object with settings of transformers' GenerationConfig, as saved by it",
        fix="name such a file, or pass the settings as flags",
        see=_SEE,
    )
