"""What generation returns: the completions of each prompt; and how ZeRO-3 finds its weights for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Gather(StrEnum):
    """How a model that ZeRO-3 partitioned finds its weights while it generates."""

    ALWAYS = "always"
    """Every rank gathers all weights once, for the whole call: no rank waits for another any more."""
    NEVER = "never"
    """Layer by layer, for every token."""
    AUTO = "auto"
    """Once where every rank has the memory for it."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model ended it, or a stopping criterion did."""
    LENGTH = "length"
    """It has as many new tokens as were allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation of a prompt."""

    tokens: tuple[int, ...]
    """New tokens alone, an end-of-sequence token with them, padding without."""
    text: str | None
    """Decoded without special tokens; None without a tokenizer."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A prompt's completions."""

    index: int
    """The prompt's place among those given, from 0."""
    num_prompt_tokens: int
    completions: tuple[Completion, ...]
    """As many as num_return_sequences says, best first under beam search."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens of the first completion."""
        return self.completions[0].tokens

    @property
    def text(self) -> str | None:
        """The text of the first completion; None without a tokenizer."""
        return self.completions[0].text
