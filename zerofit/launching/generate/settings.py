"""How `zerofit generate` samples or searches: its flags over a JSON file over the model's own settings."""

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
"""ASSUMPTION: a paragraph or two; transformers' own 20 cuts most answers off."""
_SAMPLING = ("temperature", "top_p", "top_k")
"""Settings that say nothing unless tokens are drawn."""
_FLOATS = ("temperature", "top_p", "repetition_penalty")
"""Settings that transformers refuses as whole numbers, which JSON writes without a point."""
_SEE = "https://huggingface.co/docs/transformers/main_classes/text_generation"
_FIXES = {
    "max_length": 'write "max_new_tokens" in its place, or leave it out and give --max-new-tokens',
    "min_length": 'write "min_length": 0 into a file for --generation-config, and "min_new_tokens" there',
}
"""Fixes for settings that have no meaning here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSettings:
    """Settings of flags and file, by the names of GenerationConfig's fields; flags win."""

    values: dict[str, Any]
    places: dict[str, str]
    """The flag or the file that says each."""

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
    """How completions are made."""

    call: CallSettings
    """As the ranks will read them."""
    given: dict[str, Any]
    """Settings of flags and file, and do_sample; without max_new_tokens."""
    whole: dict[str, Any]
    """With what the model's own settings fill in."""
    max_new_tokens: int
    max_new_tokens_by: str
    """The flag or file that sets it, in words."""

    @property
    def samples(self) -> bool:
        """Tokens are drawn, so that a seed and the batches decide about them."""
        return bool(self.whole["do_sample"])

    def line(self, *, seed: int) -> str:
        """Return in a line how completions are made."""
        num_beams, num_completions = self.call.config.num_beams or 1, self.call.num_return_sequences
        words = [f"sampling with seed {seed}"] if self.samples else []
        words += [f"{num_beams} beams"] if num_beams > 1 else []
        words = words or ["greedy"]
        if self.samples:
            words += [f"{name} {self.whole[name]}" for name in _SAMPLING if self.whole.get(name) is not None]
        if num_completions > 1:
            words.append(f"{num_completions} completions a prompt")
        return ", ".join([*words, f"at most {self.max_new_tokens} new tokens ({self.max_new_tokens_by})"])


def given_settings(flags: Mapping[str, Any], *, file: Path | None) -> GivenSettings:
    """Return the settings of flags and file; flags win.

    Args:
        flags: by the names of GenerationConfig's fields; None where nothing was said.
    """
    by_flag = {name: value for name, value in flags.items() if value is not None}
    drawing = [name for name in _SAMPLING if name in by_flag]
    if drawing and by_flag.get("do_sample") is False:
        named = ", ".join(f"{_flag(name)} {by_flag[name]}" for name in drawing)
        raise UserError(
            "greedy-with-sampling",
            "a greedy completion draws nothing",
            found=f"--greedy with {named}",
            why="these say how tokens are drawn at random",
            fix="leave out --greedy, or the others",
        )
    if drawing:
        by_flag["do_sample"] = True  # who gives a temperature wants it to count
    by_file = _read_file(file) if file else {}
    places = {name: str(file) for name in by_file} | {name: _flag(name) for name in by_flag}
    return GivenSettings(values={**by_file, **by_flag}, places=places)


def whole_settings(given: GivenSettings, *, folder: Path, config: Any, tokenizer: Any) -> GenerationSettings:
    """Return the given settings, filled with the model's own.

    Raises:
        UserError: transformers does not take them, or they have no meaning here.
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
            "tokens can't be drawn at temperature 0",
            found=f'"temperature": 0   ({own_place})' if is_own else given.named("temperature"),
            why="logits are divided by it; as it goes to 0, the likeliest token is taken each time",
            fix="say --greedy, which takes the likeliest token",
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
            raise ValueError("it holds no JSON object")
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
    """Return the settings that come with a model, and where they stand, in words."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationConfig.from_model_config(config), "the model's config.json"
    place = f"the model's {file.name}"
    try:
        return GenerationConfig.from_pretrained(folder), place
    except Exception as error:  # whatever transformers comes upon
        raise _broken(f"{file}: {first_line(error)}", place) from None


def _call_settings(
    given: GivenSettings, own: Any, own_place: str, *, config: Any, tokenizer: Any
) -> CallSettings:
    """Return the settings as the ranks will read them, checked by transformers."""
    from zerofit.generation.call_settings import read_settings

    # All that is read of a model: it is not there yet.
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
        why="it is a JSON object with settings of transformers' GenerationConfig, as it saves itself",
        fix="name or save such a file, or give the settings as flags",
        see=_SEE,
    )
