"""GenerationJob: what the ranks of `zerofit generate` are to do, as a file of the run folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from zerofit.core.validation import parse_strictly


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """The model, prompts and settings of a run, as every rank reads them."""

    model: str
    """Folder of the model, or its name in the hub's cache."""
    tokenizer: str
    """Folder of the tokenizer, or its name in the hub's cache."""
    prompts: str
    """File with one JSON document a prompt, in order: its tokens, and the line that it came from."""
    out: str
    """File that gets the results."""
    fingerprint: str
    """Of model, prompts and settings: unfinished results of another fingerprint are not continued."""
    dtype: str
    """Of the weights, as torch names it, such as "bfloat16"."""
    batch_size: int
    """Prompts in one call on one rank."""
    max_new_tokens: int
    gather: Gather = Gather.AUTO
    seed: int = 0
    trust_remote_code: bool = False
    deepspeed: str | None = None
    """The DeepSpeed JSON; None where each rank holds the whole model."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Settings of transformers' GenerationConfig."""


def job_to_json(job: GenerationJob) -> str:
    """Return the text of a job's file."""
    return json.dumps(dataclasses.asdict(job), indent=2) + "\n"


def job_from_json(text: str) -> GenerationJob:
    """Return the job that a file written by job_to_json holds."""
    return parse_strictly(GenerationJob, text)
