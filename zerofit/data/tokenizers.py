"""Slow tokenizers: how slow one is, measured, and the fast one that can stand in its place."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, format_message

if TYPE_CHECKING:
    from collections.abc import Sequence

_SAMPLE = (
    "The committee postponed its decision, because the measurements of last year's experiments could not be "
    "reproduced: neither the temperatures nor the concentrations matched.",
)
"""What is tokenized where the caller gives no texts: made up for the purpose."""
_MEASURED_S = 0.2
"""ASSUMPTION: enough repetitions for two digits; nobody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpeed:
    """What one process of this machine tokenizes in a second, in batches."""

    samples_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowTokenizer:
    """A tokenizer in Python, measured, and the one in Rust that makes the same tokens."""

    name: str
    """The slow one's class."""
    speed: TokenizerSpeed
    """The slow one's."""
    fast: Any = None
    """A tokenizer of transformers with `is_fast`; None where none can be made that makes the same tokens."""
    fast_speed: TokenizerSpeed | None = None
    """That one's."""

    def message(self) -> str:
        """Return the warning as it is printed."""
        found = f"{self.name}: {self.speed.tokens_per_s:,.0f} tokens/s, measured here"
        fix = (
            "save it in the tokenizers format (https://huggingface.co/docs/tokenizers), or tokenize once, in "
            "several processes: dataset.map(..., batched=True, num_proc=...)"
        )
        if self.fast_speed is not None:
            times = self.fast_speed.tokens_per_s / self.speed.tokens_per_s
            found += f"; a fast one: {self.fast_speed.tokens_per_s:,.0f} tokens/s, {times:.1f} times as many"
            fix = (
                f"take zerofit.data.fast_tokenizer(tokenizer), a {type(self.fast).__name__}; its "
                "save_pretrained(FOLDER) writes tokenizer.json, which AutoTokenizer loads from then on"
            )
        why = "it runs in Python, one text after the other, and knows neither words nor offsets of its tokens"
        return format_message("warning[slow-tokenizer]: the tokenizer is slow", found=found, why=why, fix=fix)


def check_knows_words(source: Any) -> None:
    """Return where it is known which word a token belongs to.

    Args:
        source: a tokenizer of transformers, or what one made.

    Raises:
        UserError: it is a slow one, or was made by one.
    """
    if not getattr(source, "is_fast", False):
        raise UserError(
            "tokens-without-words",
            "a slow tokenizer does not say which word a token belongs to",
            found=type(source).__name__,
            why="words are found by word_ids() and offsets, which fast tokenizers alone have",
            fix="load it by AutoTokenizer, or take zerofit.data.fast_tokenizer(tokenizer)",
            see="https://huggingface.co/docs/transformers/fast_tokenizers",
        )


def measure_tokenizer(tokenizer: Any, texts: Sequence[str] = _SAMPLE) -> TokenizerSpeed:
    """Tokenize texts over and over for a fifth of a second.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: some of the data; a sentence of our own in its place says little of other languages.
    """
    batch = list(texts) * max(1, 64 // len(texts))
    tokenizer(batch[:1])  # the first call also makes tables
    num_samples = num_tokens = 0
    begin = time.perf_counter()
    while (took_s := time.perf_counter() - begin) < _MEASURED_S:
        num_tokens += sum(map(len, tokenizer(batch)["input_ids"]))
        num_samples += len(batch)
    return TokenizerSpeed(samples_per_s=num_samples / took_s, tokens_per_s=num_tokens / took_s)


def fast_tokenizer(tokenizer: Any, texts: Sequence[str] = _SAMPLE) -> Any:
    """Return a fast tokenizer that makes the same tokens of some texts as a slow one, or None.

    It is looked for where the slow one was loaded from, then made by transformers' converter of its class.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: what both must make the same tokens of.
    """
    if tokenizer.is_fast:
        return tokenizer
    wanted = tokenizer(list(texts))["input_ids"]
    for make in (_beside, _converted):
        found = make(tokenizer)
        if found is not None and found.is_fast and found(list(texts))["input_ids"] == wanted:
            return found
    return None


def warn_if_slow(tokenizer: Any, texts: Sequence[str] = _SAMPLE) -> SlowTokenizer | None:
    """Warn where a tokenizer is slow, with its speed and that of the fast one in its place, both measured.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: some of the data.

    Returns:
        What was measured; None where the tokenizer is fast.
    """
    if tokenizer.is_fast:
        return None
    fast = fast_tokenizer(tokenizer, texts)
    found = SlowTokenizer(
        name=type(tokenizer).__name__,
        speed=measure_tokenizer(tokenizer, texts),
        fast=fast,
        fast_speed=None if fast is None else measure_tokenizer(fast, texts),
    )
    warnings.warn(found.message(), stacklevel=2)
    return found


def _beside(tokenizer: Any) -> Any:
    """Return what AutoTokenizer makes of the files that a tokenizer came from: a fast one, if it can."""
    from transformers import AutoTokenizer

    if not tokenizer.name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(tokenizer.name_or_path, local_files_only=True)
    except (OSError, ValueError, KeyError):  # no such files any more, or none of a fast one
        return None


def _converted(tokenizer: Any) -> Any:
    """Return what transformers' converter makes of a slow tokenizer, which it finds by the class's name."""
    from transformers import TokenizersBackend
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS

    # The slow classes that transformers 5 keeps beside fast ones are called Legacy.
    converter = SLOW_TO_FAST_CONVERTERS.get(type(tokenizer).__name__.removesuffix("Legacy"))
    if converter is None:
        return None
    return TokenizersBackend(
        tokenizer_object=converter(tokenizer).converted(),
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        model_input_names=tokenizer.model_input_names,
        **tokenizer.special_tokens_map,
    )
