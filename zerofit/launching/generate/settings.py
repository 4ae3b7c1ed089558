"""Generation settings of `zerofit generate`: flags override a JSON file, which overrides the model's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
class GivenSettings:
    """Settings of flags and file, by GenerationConfig's field names; flags take precedence."""

    values: dict[str, Any]
    places: dict[str, str]
    """The flag or file of each."""

    def named(self, name: str) -> str:
        """Return a setting as the user wrote it."""
        place, value = self.places[name], self.values[name]
        if not place.startswith("--"):
            return f'"{name}": {json.dumps(value)}   ({place})'
        return (
            "--greedy"
            if value is False
            else f"{place} {value:g}"
            if type(value) is float
            else f"{place} {value}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """The generation settings of a run."""

    call: CallSettings
    """As the ranks will read them."""
    given: dict[str, Any]
    """Settings of flags and file, and do_sample; without max_new_tokens."""
    whole: dict[str, Any]
    """Completed by the model's own settings."""
    max_new_tokens: int
    max_new_tokens_by: str
    """The flag or file that sets it, in words."""

    @property
    def samples(self) -> bool:
        """True if tokens are sampled, so that they depend on a seed and the batches."""
        return bool(self.whole["do_sample"])

    def line(self, *, seed: int) -> str:
        """Return the settings in one line."""
        num_beams, num_completions = self.call.config.num_beams or 1, self.call.num_return_sequences
        words = [f"sampling with seed {seed}"] if self.samples else []
        words += [f"{num_beams} beams"] if num_beams > 1 else []
        words = words or ["greedy"]
        if self.samples:
            words += [f"{name} {self.whole[name]}" for name in _SAMPLING if self.whole.get(name) is not None]
        if num_completions > 1:
            words.append(f"{num_completions} completions per prompt")
        return ", ".join([*words, f"at most {self.max_new_tokens} new tokens ({self.max_new_tokens_by})"])


def given_settings(flags: Mapping[str, Any], *, file: Path | None) -> GivenSettings:
    """Return the settings of flags and file; flags take precedence.

    Args:
        flags: by GenerationConfig's field names; None if not given.
    """
    by_flag = {name: value for name, value in flags.items() if value is not None}
    drawing = [name for name in _SAMPLING if name in by_flag]
    if drawing and by_flag.get("do_sample") is False:
        named = ", ".join(f"{_flag(name)} {by_flag[name]}" for name in drawing)
        raise UserError(
            "greedy-with-sampling",
            "greedy generation does not sample",
            found=f"--greedy with {named}",
            why="these control sampling",
            fix="leave out --greedy, or the others",
        )
    if drawing:
        by_flag["do_sample"] = True  # a given temperature should take effect
    by_file = _read_file(file) if file else {}
    places = {name: str(file) for name in by_file} | {name: _flag(name) for name in by_flag}
    return GivenSettings(values={**by_file, **by_flag}, places=places)


def whole_settings(given: GivenSettings, *, folder: Path, config: Any, tokenizer: Any) -> GenerationSettings:
    """Return the given settings, completed by the model's own.

    Raises:
        UserError: transformers refuses them, or they are unsupported.
    """
    own, own_place = _own_settings(folder, config)
    call = _call_settings(given, own, own_place, config=config, tokenizer=tokenizer)
    whole = {
        name: value
        for name, value in call.config.to_dict().items()
        if name not in NOTES_OF_GENERATION_CONFIG and value is not None
    }
    whole["do_sample"] = bool(whole.get("do_sample"))
    if whole["do_sample"] and whole.get("temperature") == 0:
        is_own = "temperature" not in given.values
        raise UserError(
            "temperature-zero",
            "sampling at temperature 0 is impossible",
            found=f'"temperature": 0   ({own_place})' if is_own else given.named("temperature"),
            why="logits are divided by it; towards 0, the most likely token is chosen each time",
            fix="use --greedy, which chooses the most likely token",
        )
    by = given.places.get("max_new_tokens") or (own_place if call.max_new_tokens else None)
    others = {name: value for name, value in given.values.items() if name != "max_new_tokens"}
    return GenerationSettings(
        call=call,
        given={**others, "do_sample": whole["do_sample"]},
        whole=whole,
        max_new_tokens=call.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        max_new_tokens_by=f"{by} says so" if by else "unless --max-new-tokens says otherwise",
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_file(file: Path) -> dict[str, Any]:
    try:
        document = parse_json(file.read_text(encoding="utf-8-sig"))
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        place = f"line {error.lineno}: invalid JSON: " if isinstance(error, json.JSONDecodeError) else ""
        found = getattr(error, "strerror", None) or getattr(error, "msg", None) or error
        raise _broken(
            f"--generation-config {file}: {place}{found}", "the file with generation settings"
        ) from None
    return {
        name: float(value) if name in _FLOATS and type(value) is int else value
        for name, value in document.items()
        if name not in NOTES_OF_GENERATION_CONFIG and value is not None
    }


def _own_settings(folder: Path, config: Any) -> tuple[Any, str]:
    """Return a model's own settings, and their place, in words."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationConfig.from_model_config(config), "the model's config.json"
    place = f"the model's {file.name}"
    try:
        return GenerationConfig.from_pretrained(folder), place
    except Exception as error:  # transformers may raise anything
        raise _broken(f"{file}: {first_line(error)}", place) from None


def _call_settings(
    given: GivenSettings, own: Any, own_place: str, *, config: Any, tokenizer: Any
) -> CallSettings:
    """Return the settings as the ranks will read them, validated by transformers."""
    from zerofit.generation.call_settings import read_settings

    # The attributes of a model that are read: it is not loaded yet.
    model: Any = SimpleNamespace(config=config, generation_config=own)
    try:
        return read_settings(model, tokenizer, given=None, settings=given.values)
    except UserError as error:
        name = error.found.partition("=")[0]
        if error.rule == "generate-settings-disagree":
            named = [given.named(each) for each in given.values if each in error.why]
            error.found = "; ".join(named) or own_place
        elif name in given.values:
            error.found = given.named(name)
        error.summary = error.summary.replace("zerofit.generate", "zerofit generate")
        error.fix, error.see = _FIXES.get(name, error.fix), _SEE
        raise


def _broken(found: str, what: str) -> UserError:
    return UserError(
        "generation-config-broken",
        f"{what} can't be read",
        found=found,
        why="it must be a JSON object with settings of transformers' GenerationConfig, as saved by it",
        fix="name such a file, or pass the settings as flags",
        see=_SEE,
    )
