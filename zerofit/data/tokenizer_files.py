"""Finds and loads a tokenizer from a file, a folder or the hub's cache, to count tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, first_line
from zerofit.core.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    Sample = tuple[str | list[str], ...]
    """A text, or the words of one that is split already; or two that make a pair."""

_FAST = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SLOW_FILES = (
    _CONFIG,
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""Files by which transformers recognizes a tokenizer."""
_UNLIMITED = 10**6
"""transformers writes 10^30 if a tokenizer has no maximum. ASSUMPTION: no model takes a million tokens and
has a tokenizer that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounter:
    """Counts tokens, including special ones, without truncation or padding."""

    tokenizer: Any
    """Of the tokenizers library if is_fast; else a Python tokenizer of transformers."""
    is_fast: bool
    """True if it runs outside Python, on several cores."""
    model_max_length: int | None
    """The tokenizer's model_max_length; None if it has none."""

    def __call__(self, samples: Sequence[Sample]) -> list[int]:
        """Return each sample's number of tokens."""
        if not self.is_fast:
            return [len(self._encoded(sample)["input_ids"]) for sample in samples]
        lengths = [0] * len(samples)
        for is_split in (False, True):
            places = [
                place for place, sample in enumerate(samples) if isinstance(sample[0], list) is is_split
            ]
            texts = [samples[place] if len(samples[place]) > 1 else samples[place][0] for place in places]
            encodings = self.tokenizer.encode_batch_fast(texts, is_pretokenized=is_split)
            for place, encoding in zip(places, encodings, strict=True):
                lengths[place] = len(encoding)
        return lengths

    def _encoded(self, sample: Sample) -> Any:
        return self.tokenizer(*sample, is_split_into_words=isinstance(sample[0], list), verbose=False)


def load_tokenizer(name: str) -> TokenCounter:
    """Return a counter of a tokenizer's tokens; nothing is downloaded.

    transformers is only imported if there is no tokenizer.json.

    Args:
        name: a tokenizer.json, a folder, or a hub id in the cache.

    Raises:
        UserError: there is none, or it can't be loaded.
    """
    path = Path(name)
    folder = path.parent if path.is_file() else tokenizer_folder(name)
    if folder is None:
        raise UserError(
            "tokenizer-missing",
            "there is no such tokenizer",
            found=f"--tokenizer {name}",
            why=f"the folder has no {_FAST}, {_CONFIG} or vocabulary"
            if path.is_dir()
            else "it is not a file, a folder, or in the hub's cache; zerofit data downloads nothing",
            fix="name the folder of the model" if path.is_dir() else f"download it: hf download {name}",
        )
    file = path if path.is_file() else folder / _FAST
    source = file if file.is_file() else folder
    try:
        tokenizer, is_fast = _loaded(source)
    except Exception as error:  # the libraries raise bare Exception
        raise broken_tokenizer(source, error) from None
    return TokenCounter(tokenizer=tokenizer, is_fast=is_fast, model_max_length=_max_length(folder / _CONFIG))


def broken_tokenizer(place: Path, error: Exception) -> UserError:
    """Return the error for a tokenizer that the libraries can't load."""
    return UserError(
        "tokenizer-broken",
        "the tokenizer can't be loaded",
        found=f"{place}: {first_line(error)}",
        why="its files are damaged, of another version, or need a missing package",
        fix="save it again with tokenizer.save_pretrained(DIR), or name another with --tokenizer DIR",
    )


def tokenizer_folder(name: str) -> Path | None:
    """Return the folder of a local or cached tokenizer; None if there is none."""
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    has_files = folder is not None and any((folder / file).is_file() for file in (_FAST, *_SLOW_FILES))
    return folder if has_files else None


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _loaded(source: Path) -> tuple[Any, bool]:
    """Return a tokenizer, and True if it is of the tokenizers library."""
    if source.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(source))
    else:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(source, local_files_only=True)
        if not loaded.is_fast:
            return loaded, False
        tokenizer = loaded.backend_tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, True


def _max_length(config: Path) -> int | None:
    try:
        most: Any = parse_json(config.read_text(encoding="utf-8"))["model_max_length"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(most) if isinstance(most, int | float) and 0 < most < _UNLIMITED else None
