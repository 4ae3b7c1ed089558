"""Where a tokenizer is: a file, a folder or the hub's cache; to a counter of its tokens."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.data.counting import FastTokens, SlowTokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.data.counting import TextCounter

_FAST = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SLOW = (_CONFIG, "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Files by which transformers knows a tokenizer."""
_NO_LIMIT = 10**6
"""transformers writes 10^30 where a tokenizer has no maximum. ASSUMPTION: no model takes a million tokens
and has a tokenizer that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer that is ready to count."""

    name: str
    """As the user named it."""
    counter: TextCounter
    is_fast: bool
    """Whether it runs outside of Python, on several cores."""
    model_max_length: int | None
    """Most tokens that it says its model takes; None where it does not say."""
    warning: str = ""
    """A message for the user, such as that it is slow."""


def load_tokenizer(name: str, *, texts: Sequence[str]) -> LoadedTokenizer:
    """Return a tokenizer; nothing is downloaded.

    transformers is imported for one without tokenizer.json only.

    Args:
        name: a tokenizer.json, a folder, or a hub id that is in the cache.
        texts: some of the data, by which the speed of a slow tokenizer is measured.

    Raises:
        UserError: there is none, or it can't be loaded.
    """
    path = Path(name)
    if path.is_file():
        return _fast(name, path)
    folder = tokenizer_folder(name)
    if folder is None:
        raise UserError(
            "tokenizer-missing",
            "there is no such tokenizer",
            found=f"--tokenizer {name}",
            why=f"the folder holds no {_FAST}, {_CONFIG} or vocabulary"
            if path.is_dir()
            else "it is no file, no folder, and not in the hub's cache; zerofit data downloads nothing",
            fix="name the folder of the model" if path.is_dir() else f"download it: hf download {name}",
        )
    if (folder / _FAST).is_file():
        return _fast(name, folder / _FAST)
    return _of_transformers(name, folder, texts)


def tokenizer_folder(name: str) -> Path | None:
    """Return the folder of a tokenizer that is here or in the hub's cache; None where there is none."""
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    has_files = folder is not None and any((folder / file).is_file() for file in (_FAST, *_SLOW))
    return folder if has_files else None


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in (_FAST, *_SLOW):
        try:
            found = try_to_load_from_cache(name, file)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _fast(name: str, file: Path) -> LoadedTokenizer:
    from tokenizers import Tokenizer

    with _readable(name, str(file)):
        tokenizer = Tokenizer.from_file(str(file))
    return LoadedTokenizer(
        name=name,
        counter=FastTokens(tokenizer.to_str()),
        is_fast=True,
        model_max_length=_max_length(file.parent / _CONFIG),
    )


def _of_transformers(name: str, folder: Path, texts: Sequence[str]) -> LoadedTokenizer:
    from transformers import AutoTokenizer

    from zerofit.data.tokenizers import warn_if_slow

    with _readable(name, str(folder)):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    warning, fast = "", tokenizer
    if not tokenizer.is_fast:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is told in the report
            found = warn_if_slow(tokenizer, [text for text in texts if text][:64] or ("a",))
        assert found is not None
        warning, fast = found.message(), found.fast
    counter: TextCounter = SlowTokens(str(folder))
    if fast is not None:
        counter = FastTokens(fast.backend_tokenizer.to_str())
    return LoadedTokenizer(
        name=name,
        counter=counter,
        is_fast=fast is not None,
        model_max_length=_max_length(folder / _CONFIG),
        warning=warning,
    )


def _max_length(config: Path) -> int | None:
    try:
        most: Any = json.loads(config.read_text(encoding="utf-8"))["model_max_length"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(most) if isinstance(most, int | float) and 0 < most < _NO_LIMIT else None


@contextmanager
def _readable(name: str, found: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries raise bare Exception
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            "tokenizer-broken",
            "the tokenizer can't be loaded",
            found=f"--tokenizer {name}: {found}: {first}",
            why="its files are damaged, of another version, or need a package that is not there",
            fix="save it anew with tokenizer.save_pretrained(FOLDER), or name another",
        ) from None
