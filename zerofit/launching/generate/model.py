"""The model and tokenizer of `zerofit generate`: local, complete, and able to generate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.bounded_read import read_bounded_text
from zerofit.core.errors import UserError
from zerofit.core.json_text import parse_json
from zerofit.core.upstream.checkpoint_pickles import damage_of
from zerofit.data.tokenizer_files import broken_tokenizer, tokenizer_folder
from zerofit.models.files import locate_config
from zerofit.models.find import probe_model
from zerofit.models.source import ModelOrigin
from zerofit.models.task import Task

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts
    from zerofit.generation.model_kind import Positions
    from zerofit.models.source import ModelSource

_WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Single weight files, in transformers' order of precedence (transformers 5.23, modeling_utils.py,
_get_resolved_checkpoint_files)."""
_INDEX = ".index.json"
"""Suffix of a weight file's name for the index of its shards."""
_MAX_LISTED = 6


def find_model(text: str) -> Path:
    """Return the folder of a model's config and weights.

    Args:
        text: the folder, or a hub id in the cache.
    """
    located = locate_config(text)
    if located.origin in (ModelOrigin.FOLDER, ModelOrigin.FILE):
        folder = Path(located.place).absolute()
    else:
        folder = _cached(located.place, text)
    _check_weights(folder, text)
    return folder


def find_tokenizer(text: str | None, *, model: Path, model_text: str) -> Path:
    """Return the folder of the tokenizer.

    Args:
        text: the value of --tokenizer; None uses the model's own.
    """
    folder = tokenizer_folder(text if text is not None else str(model))
    if folder is not None:
        return folder.absolute()
    raise UserError(
        "tokenizer-missing",
        "there is no tokenizer",
        found=f"--tokenizer {text}" if text is not None else f"--model {model_text}, without one beside it",
        why="it tokenizes prompts, and decodes completions",
        fix="set --tokenizer DIR to a folder written by tokenizer.save_pretrained(), or a cached hub id",
    )


_LARGEST_TEMPLATE = 16 * 1024 * 1024
"""Bytes of a chat template; long ones have 50,000. ASSUMPTION."""


def load_tokenizer(folder: Path, *, chat_template: Path | None, trust_remote_code: bool) -> Any:
    """Return transformers' tokenizer.

    Args:
        chat_template: a file with a template that replaces its own; None keeps it.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the libraries may raise anything
        raise broken_tokenizer(folder, error) from None
    if chat_template is not None:
        try:
            tokenizer.chat_template = read_bounded_text(chat_template, most_bytes=_LARGEST_TEMPLATE)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                "chat-template-unreadable",
                "the chat template can't be read",
                found=f"--chat-template {chat_template}: {getattr(error, 'strerror', None) or error}",
                why="it must be a Jinja template as text",
                fix="name a file with one, or leave it out for the tokenizer's own",
                see="https://huggingface.co/docs/transformers/chat_templating",
            ) from None
    return tokenizer


def source_for_generation(text: str, folder: Path, *, trust_remote_code: bool) -> tuple[ModelSource, Any]:
    """Return a model's facts with where they come from, and transformers' config of it.

    Raises:
        UserError: it has no head that generates text.
    """
    source = probe_model(str(folder), trust_remote_code=trust_remote_code)
    if source.task not in (Task.CAUSAL_LM, Task.SEQ2SEQ_LM):
        raise UserError(
            "model-does-not-generate",
            "this model does not generate text",
            found=f"--model {text}: {source.facts.architecture}, for {source.task.value}",
            why=f"{source.task_reason}; generation needs a model for causal-lm or seq2seq-lm",
            fix="name a model that generates text",
        )
    from transformers import AutoConfig

    named = dataclasses.replace(source, facts=dataclasses.replace(source.facts, name=text))
    return named, AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def positions_for_generation(facts: ModelFacts, config: Any) -> Positions:
    """Return a model's maximum numbers of tokens, as the ranks will read them."""
    from zerofit.generation.model_kind import positions_of

    positions, most = positions_of(config), facts.max_sequence_length
    rows = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if config.is_encoder_decoder or most is None or rows is None:
        return positions
    return positions.less(max(rows - most, 0))  # RoBERTa's table has extra rows before the first token's


def _cached(name: str, text: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    raise UserError(
        "model-not-here",
        "the model is not on this machine",
        found=f"--model {text}: no folder, and not in the hub's cache",
        why="zerofit generate loads the weights on every rank, and downloads nothing",
        fix=f"download it: hf download {name}",
    )


def _check_weights(folder: Path, text: str) -> None:
    """Check that weight files exist and are complete."""
    for name in _WHOLE:
        if (folder / name).is_file():
            return _check_whole(folder / name)
        index = folder / f"{name}{_INDEX}"
        if index.is_file():
            return _check_shards(index, text)
    names = sorted(entry.name for entry in folder.iterdir())
    num_more = len(names) - _MAX_LISTED
    listed = ", ".join(names[:_MAX_LISTED]) + (f" and {num_more} more" if num_more > 0 else "")
    raise UserError(
        "model-folder-without-weights",
        "the model's folder has no weights",
        found=f"--model {text}, with {listed} in it",
        why=f"it needs {' or '.join(_WHOLE)}, or shards with an index",
        fix="name a folder written by save_pretrained; convert a ZeRO checkpoint with zero_to_fp32.py",
    )


def _check_shards(index: Path, text: str) -> None:
    try:
        shards = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _incomplete_weights(f"{index}: {error or type(error).__name__}") from None
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise _incomplete_weights(
            f"--model {text}: {', '.join(missing[:3])}{more} missing of {len(shards)} shards"
        )
    for name in shards:
        _check_whole(index.parent / name)


def _check_whole(file: Path) -> None:
    """Check that a file is whole, by its header and its size; no weight is read."""
    if file.suffix != ".safetensors":
        try:
            damage = damage_of(file)
        except OSError as error:
            damage = f"can't be read: {error.strerror}"
        if damage is not None:
            raise _incomplete_weights(f"{file} {damage}")
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise _incomplete_weights(f"{file}: {error}") from None


def _incomplete_weights(found: str) -> UserError:
    return UserError(
        "model-weights-not-whole",
        "the model's weights are incomplete",
        found=found,
        why="a download or copy was interrupted",
        fix="download them again: hf download, git lfs pull, or copy the folder again",
    )
