"""How `zerofit generate` samples or searches: its flags over a JSON file over the model's own settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError, nearest

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
_NOTES = ("_commit_hash", "_from_model_config", "transformers_version")
"""What save_pretrained writes beside the settings: where they come from."""
_SETTINGS_PAGE = "https://huggingface.co/docs/transformers/main_classes/text_generation"


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
    """What flags and file say."""

    values: dict[str, Any]
    """By the names of GenerationConfig's fields."""
    max_new_tokens_by: str | None
    """The flag or file that says it; None where neither does."""
    file: Path | None
    """What --generation-config names."""


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
        raise UserError(
            "temperature-zero",
            "tokens can't be drawn at temperature 0",
            found="--temperature 0",
            why="logits are divided by it; as it goes to 0, the likeliest token is taken each time",
            fix="say --greedy, which takes the likeliest token",
        )
    by_file = _read(file) if file else {}
    by = SETTING_FLAGS["max_new_tokens"] if "max_new_tokens" in by_flag else str(file)
    values = {**by_file, **by_flag}
    return Said(values=values, max_new_tokens_by=by if "max_new_tokens" in values else None, file=file)


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
    from transformers import GenerationConfig

    from zerofit.generation.call_settings import read_settings

    _check_names(said)
    if (folder / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(folder)
    else:
        own = GenerationConfig.from_model_config(config)
    # All that is read of a model: it is not there yet.
    model = SimpleNamespace(config=config, generation_config=own)
    read = read_settings(model, tokenizer, given=None, settings=said.values)
    whole = {
        name: value
        for name, value in read.config.to_dict().items()
        if name not in _NOTES and value is not None
    }
    whole["do_sample"] = bool(whole.get("do_sample"))
    by = said.max_new_tokens_by or ("the model's generation_config.json" if read.max_new_tokens else None)
    others = {name: value for name, value in said.values.items() if name != "max_new_tokens"}
    return Settings(
        said={**others, "do_sample": whole["do_sample"]},
        whole=whole,
        max_new_tokens=read.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        max_new_tokens_by=f"{by} says so" if by else "unless --max-new-tokens says otherwise",
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _broken(file, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _broken(file, "it is no text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise _broken(file, f"line {error.lineno}: invalid JSON: {error.msg}") from None
    if not isinstance(document, dict):
        raise _broken(file, "it holds no JSON object")
    return {name: value for name, value in document.items() if name not in _NOTES and value is not None}


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
                see=_SETTINGS_PAGE,
            )
    if "max_length" in said.values:
        raise UserError(
            "generate-max-length",
            "a completion's length is given without its prompt's",
            found=f'"max_length": {said.values["max_length"]}   ({said.file})',
            why="it counts the prompt too, and so would say something else for each prompt",
            fix='write "max_new_tokens" there, or leave it out and give --max-new-tokens',
            see=_SETTINGS_PAGE,
        )


def _broken(file: Path, found: str) -> UserError:
    return UserError(
        "generation-config-broken",
        "the file with generation settings can't be read",
        found=f"--generation-config {file}: {found}",
        why="it is a JSON object with settings of transformers' GenerationConfig, as it saves itself",
        fix="name such a file, or give the settings as flags",
        see=_SETTINGS_PAGE,
    )
