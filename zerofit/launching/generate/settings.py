"""How `zerofit generate` samples or searches: its flags over a JSON file over the model's own settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.cli.generation_values import (
    SETTINGS_PAGE,
    check_own_numbers,
    check_tokens_exist,
    read_generation_config,
)
from zerofit.core.errors import UserError, nearest
from zerofit.core.upstream.transformers import NOTES_OF_GENERATION_CONFIG

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_MAX_NEW_TOKENS = 256
"""ASSUMPTION: a paragraph or two; transformers' own 20 cuts most answers off."""
SETTING_FLAGS = {
    "do_sample": "--do-sample",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "num_beams": "--num-beams",
    "num_return_sequences": "--num-return-sequences",
    "repetition_penalty": "--repetition-penalty",
    "max_new_tokens": "--max-new-tokens",
}
"""The flag of each setting of transformers' GenerationConfig that has one."""
_SAMPLING = ("temperature", "top_p", "top_k")
"""Settings that say nothing unless tokens are drawn."""
_ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit")
"""Settings with which tokens are proposed before the model says its own."""
_SERVED_MODES = frozenset({"greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation"})
"""Values of transformers.generation.GenerationMode that transformers has code for."""
_INSTEAD = {
    "max_length": 'write "max_new_tokens" in its place, or leave it out and give --max-new-tokens',
    "min_length": 'write "min_length": 0 into a file for --generation-config, and "min_new_tokens" there',
}
"""What to do in place of settings that have no meaning here."""
_OTHER_MODES = ("penalty_alpha", "dola_layers", "num_beam_groups", "constraints", "force_words_ids")
"""Settings that ask for another mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How completions are made."""

    said: dict[str, Any]
    """What flags and file say, and whether tokens are drawn; without max_new_tokens."""
    whole: dict[str, Any]
    """With what the model's own settings fill in."""
    max_new_tokens: int
    max_new_tokens_by: str
    """What says so, in words."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, so that a seed and the batches decide about them."""
        return bool(self.whole["do_sample"])

    @property
    def num_beams(self) -> int:
        """Completions of one prompt that grow beside each other."""
        return int(self.whole.get("num_beams") or 1)

    @property
    def num_return_sequences(self) -> int:
        """Completions of one prompt that are returned."""
        return int(self.whole.get("num_return_sequences") or 1)

    @property
    def num_drafted(self) -> int:
        """Tokens that stand behind a completion's last one for a moment: prompt lookup proposes them."""
        return int(self.whole.get("prompt_lookup_num_tokens") or 0)

    def check_batch_size(self, batch_size: int | None, *, num_prompts: int) -> None:
        """Check that prompts can be in batches of this size.

        Args:
            batch_size: what --batch-size says; None where that is still to be planned.
            num_prompts: all of them.

        Raises:
            UserError: tokens are proposed, which goes with one prompt at a time.
        """
        assisted = [name for name in _ASSISTED if self.whole.get(name)]
        if not assisted or batch_size == 1 or (batch_size is None and num_prompts == 1):
            return
        raise UserError(
            "generate-assisted-one-by-one",
            "assisted generation takes one prompt at a time",
            found=f'"{assisted[0]}": {self.whole[assisted[0]]} '
            + (f"with --batch-size {batch_size}" if batch_size else "without --batch-size"),
            why="transformers checks the proposed tokens of one sequence",
            fix=f'add --batch-size 1, or leave "{assisted[0]}" out of the settings',
            see=SETTINGS_PAGE,
        )

    def check_in_step(self) -> None:
        """Check that ranks make the same forward passes, where ZeRO-3 brings the weights layer by layer.

        Raises:
            UserError: a setting makes passes of its own.
        """
        from zerofit.generation.in_step import OUT_OF_STEP, goes_out_of_step

        unlike = [name for name in OUT_OF_STEP if goes_out_of_step(name, self.whole.get(name))]
        if unlike:
            raise UserError(
                "generate-out-of-step",
                "ranks would make different numbers of forward passes, and wait for each other for ever",
                found=f'"{unlike[0]}": {self.whole[unlike[0]]} with --gather never, and ranks of ZeRO-3',
                why=OUT_OF_STEP[unlike[0]],
                fix=f'leave out --gather never, or "{unlike[0]}" of the settings',
                see=SETTINGS_PAGE,
            )

    def line(self, *, seed: int) -> str:
        """Return in a line how completions are made."""
        words = [f"sampling with seed {seed}"] if self.samples else []
        words += [f"{self.num_beams} beams"] if self.num_beams > 1 else []
        words = words or ["greedy"]
        if self.samples:
            words += [f"{name} {self.whole[name]}" for name in _SAMPLING if self.whole.get(name) is not None]
        if self.num_return_sequences > 1:
            words.append(f"{self.num_return_sequences} completions a prompt")
        return ", ".join([*words, f"at most {self.max_new_tokens} new tokens ({self.max_new_tokens_by})"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What flags and file say, by the names of GenerationConfig's fields."""

    by_flag: dict[str, Any]
    by_file: dict[str, Any]
    file: Path | None
    """What --generation-config names."""

    @property
    def values(self) -> dict[str, Any]:
        """What counts: the flags first."""
        return {**self.by_file, **self.by_flag}

    def by(self, name: str) -> str | None:
        """Return the flag or the file that says a setting; None where neither does."""
        if name in self.by_flag:
            return SETTING_FLAGS[name]
        return str(self.file) if name in self.by_file else None

    def named(self, name: str) -> str:
        """Return a setting that was said, as the user said it."""
        value = self.values[name]
        if name in self.by_flag:
            return "--greedy" if value is False else f"{SETTING_FLAGS[name]} {value}"
        return f'"{name}": {json.dumps(value)}   ({self.file})'


def settings_said(flags: dict[str, Any], *, file: Path | None) -> Said:
    """Return what the flags and the file say, the flags first.

    Args:
        flags: by the names of GenerationConfig's fields; None where nothing was said.
        file: what --generation-config names.

    Raises:
        UserError: the file is no JSON object, or two flags contradict each other.
    """
    by_flag = {name: value for name, value in flags.items() if value is not None}
    drawing = [name for name in _SAMPLING if name in by_flag]
    if drawing and by_flag.get("do_sample") is False:
        named = ", ".join(f"{SETTING_FLAGS[name]} {by_flag[name]}" for name in drawing)
        raise UserError(
            "greedy-with-sampling",
            "a greedy completion draws nothing",
            found=f"--greedy with {named}",
            why="these say how tokens are drawn at random",
            fix="leave out --greedy, or the others",
        )
    if drawing:
        by_flag["do_sample"] = True  # who gives a temperature wants it to count
    if by_flag.get("temperature") == 0:
        raise _temperature_zero("--temperature 0")
    by_file = read_generation_config(file) if file else {}
    return Said(by_flag=by_flag, by_file=by_file, file=file)


def whole_settings(said: Said, *, folder: Path, config: Any, tokenizer: Any) -> Settings:
    """Return how completions are made: what was said, filled with the model's own settings.

    Args:
        said: by flags and file.
        folder: the model's, which may hold a generation_config.json.
        config: transformers' config of the model.
        tokenizer: the one that goes with it.

    Raises:
        UserError: transformers has no such setting, or they contradict each other.
    """
    _check_names(said)
    own, own_place = _own_settings(folder, config)
    read = _read_all(said, own, config=config, tokenizer=tokenizer)
    whole = {
        name: value
        for name, value in read.config.to_dict().items()
        if name not in NOTES_OF_GENERATION_CONFIG and value is not None
    }
    whole["do_sample"] = bool(whole.get("do_sample"))
    num_tokens = config.get_text_config(decoder=True).vocab_size
    check_tokens_exist(said.by_file, num_tokens=num_tokens, where=str(said.file))
    if whole["do_sample"] and whole.get("temperature") == 0:
        raise _temperature_zero(f'"temperature": 0 with sampling   ({said.by("temperature") or own_place})')
    _check_mode(read.config, where=str(said.file) if said.by_file else own_place)
    by = said.by("max_new_tokens") or (own_place if read.max_new_tokens else None)
    others = {name: value for name, value in said.values.items() if name != "max_new_tokens"}
    return Settings(
        said={**others, "do_sample": whole["do_sample"]},
        whole=whole,
        max_new_tokens=read.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        max_new_tokens_by=f"{by} says so" if by else "unless --max-new-tokens says otherwise",
    )


def _own_settings(folder: Path, config: Any) -> tuple[Any, str]:
    """Return the settings that come with a model, and where they stand, in words.

    Raises:
        UserError: they can't be read.
    """
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.is_file():
        own, place = GenerationConfig.from_model_config(config), "the model's config.json"
    else:
        place = f"the model's {file.name}"
        try:
            own = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # whatever transformers comes upon
            raise UserError(
                "generation-config-broken",
                f"{place} can't be read",
                found=f"{file}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}",
                why="it is a JSON object with settings of transformers' GenerationConfig",
                fix="fetch it again, or remove it: settings can be given as flags too",
                see=SETTINGS_PAGE,
            ) from None
    check_own_numbers(own.to_dict(), where=place)
    return own, place


def _read_all(said: Said, own: Any, *, config: Any, tokenizer: Any) -> Any:
    """Return how the ranks will read the settings.

    Raises:
        UserError: they contradict each other, or can't be served.
    """
    from zerofit.generation.call_settings import read_settings

    # All that is read of a model: it is not there yet.
    model = SimpleNamespace(config=config, generation_config=own)
    named = "; ".join(map(said.named, said.values)) or "the model's own settings"
    try:
        return read_settings(model, tokenizer, given=None, settings=said.values)
    except UserError as error:
        if error.rule == "generate-settings-disagree":
            raise _disagree(named, error.why) from None
        if error.rule != "generate-setting-without-meaning":
            raise
        name = error.found.partition("=")[0]
        raise UserError(
            error.rule,
            f"zerofit generate takes no {name}",
            found=said.named(name) if name in said.values else error.found,
            why=error.why,
            fix=_INSTEAD.get(name, "leave it out"),
            see=SETTINGS_PAGE,
        ) from None
    except Exception as error:  # whatever transformers comes upon
        raise _disagree(named, f"{type(error).__name__}: {error}") from None


def _disagree(found: str, why: str) -> UserError:
    return UserError(
        "generate-settings-disagree",
        "transformers does not take these generation settings",
        found=found,
        why=why,
        fix="change what it names",
        see=SETTINGS_PAGE,
    )


def _check_mode(config: Any, *, where: str) -> None:
    mode = config.get_generation_mode().value
    if mode in _SERVED_MODES:
        return
    asked = [name for name in _OTHER_MODES if getattr(config, name) is not None]
    raise UserError(
        "generate-mode-not-served",
        f"zerofit generate has no {mode.replace('_', ' ')}",
        found=", ".join(f'"{name}": {json.dumps(getattr(config, name))}' for name in asked) + f"   ({where})",
        why="transformers has no code for it any more, and would run some from the hub",
        fix=f"leave out {', '.join(asked)}: there are greedy, sampling and beam search",
        see=SETTINGS_PAGE,
    )


def _check_names(said: Said) -> None:
    """Check that transformers has the settings that stand in the file; flags have no other."""
    from transformers import GenerationConfig

    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    for name in said.values:
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                "generate-unknown-setting",
                "transformers has no such generation setting",
                found=f'"{name}"   ({said.file})',
                why="it would change nothing",
                fix=f'did you mean "{near}"?' if near else "leave it out",
                see=SETTINGS_PAGE,
            )


def _temperature_zero(found: str) -> UserError:
    return UserError(
        "temperature-zero",
        "tokens can't be drawn at temperature 0",
        found=found,
        why="logits are divided by it; as it goes to 0, the likeliest token is taken each time",
        fix="say --greedy, which takes the likeliest token",
    )
