"""The model and the tokenizer of `zerofit generate`: folders that are here, whole, and can generate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.json_text import parse_json
from zerofit.data.tokenizer_files import broken_tokenizer, tokenizer_folder
from zerofit.models.files import locate_config
from zerofit.models.find import probe_model
from zerofit.models.source import ModelOrigin
from zerofit.models.task import Task

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts
    from zerofit.generation.model_kind import Positions

_WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Weights in one file, in the order in which transformers looks for them
(transformers 5.23, modeling_utils.py, _get_resolved_checkpoint_files)."""
_INDEX = ".index.json"
"""Behind the name of a file with weights: names the shards that hold them."""
_MAX_LISTED = 6


def find_model(text: str) -> Path:
    """Return the folder of a model's config and weights.

    Args:
        text: the folder, or the id of a model in the hub's cache.
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
        text: what --tokenizer names; None takes the model's own.
    """
    folder = tokenizer_folder(text if text is not None else str(model))
    if folder is not None:
        return folder.absolute()
    raise UserError(
        "tokenizer-missing",
        "there is no tokenizer",
        found=f"--tokenizer {text}" if text is not None else f"--model {model_text}, without one beside it",
        why="it makes tokens of the prompts, and text of what the model makes",
        fix="--tokenizer DIR names a folder that tokenizer.save_pretrained() wrote, or a cached hub id",
    )


def load_tokenizer(folder: Path, *, chat_template: Path | None, trust_remote_code: bool) -> Any:
    """Return transformers' tokenizer.

    Args:
        chat_template: a file with the template to use in place of its own; None for that.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the libraries raise whatever they come upon
        raise broken_tokenizer(folder, error) from None
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                "chat-template-unreadable",
                "the chat template can't be read",
                found=f"--chat-template {chat_template}: {getattr(error, 'strerror', None) or error}",
                why="it is a Jinja template, as text",
                fix="name a file that holds one, or leave it out for the tokenizer's own",
                see="https://huggingface.co/docs/transformers/chat_templating",
            ) from None
    return tokenizer


def generating_facts(text: str, folder: Path, *, trust_remote_code: bool) -> tuple[ModelFacts, Any]:
    """Return a model's facts and transformers' config of it.

    Raises:
        UserError: it has no head that writes text.
    """
    source = probe_model(str(folder), trust_remote_code=trust_remote_code)
    if source.task not in (Task.CAUSAL_LM, Task.SEQ2SEQ_LM):
        raise UserError(
            "model-does-not-generate",
            "this model writes no text",
            found=f"--model {text}: {source.facts.architecture}, for {source.task.value}",
            why=f"{source.task_reason}; generating takes a model for causal-lm or seq2seq-lm",
            fix="name a model that was trained to write text",
        )
    from transformers import AutoConfig

    return dataclasses.replace(source.facts, name=text), AutoConfig.from_pretrained(
        folder, trust_remote_code=trust_remote_code
    )


def generating_positions(facts: ModelFacts, config: Any) -> Positions:
    """Return a model's numbers of positions, as the ranks will read them."""
    from zerofit.generation.model_kind import positions_of

    positions, most = positions_of(config), facts.max_sequence_length
    rows = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if config.is_encoder_decoder or most is None or rows is None:
        return positions
    return positions.less(max(rows - most, 0))  # RoBERTa's table has rows before that of the first token


def _cached(name: str, text: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    raise UserError(
        "model-not-here",
        "the model is not on this machine",
        found=f"--model {text}: no folder, and not in the hub's cache",
        why="zerofit generate reads the weights on every rank, and downloads nothing",
        fix=f"download it: hf download {name}",
    )


def _check_weights(folder: Path, text: str) -> None:
    """Check that files with weights are there and whole."""
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
        why=f"they stand in {' or '.join(_WHOLE)}, or in shards with an index beside them",
        fix="name the folder that save_pretrained wrote; of a ZeRO checkpoint make one with zero_to_fp32.py",
    )


def _check_shards(index: Path, text: str) -> None:
    try:
        shards = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _not_whole(f"{index}: {error or type(error).__name__}") from None
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise _not_whole(f"--model {text}: {', '.join(missing[:3])}{more} missing of {len(shards)} shards")
    for name in shards:
        _check_whole(index.parent / name)


def _check_whole(file: Path) -> None:
    """Check that a file of safetensors is as long as its header says; no weight is read."""
    if file.suffix != ".safetensors":
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise _not_whole(f"{file}: {error}") from None


def _not_whole(found: str) -> UserError:
    return UserError(
        "model-weights-not-whole",
        "the model's weights are not whole",
        found=found,
        why="a download or a copy was cut short",
        fix="fetch them again: hf download, git lfs pull, or copy the folder anew",
    )
