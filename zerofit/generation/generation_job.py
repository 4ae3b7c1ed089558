"""GenerationJob: model, prompts and settings of `zerofit generate`, a file of the run folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from zerofit.core.validation import parse_strictly


class Gather(StrEnum):
    """How weights partitioned by ZeRO-3 are gathered for generation."""

    ALWAYS = "always"
    """Every rank gathers all weights once for the whole call: ranks no longer wait for each other."""
    NEVER = "never"
    """Layer by layer, for every token."""
    AUTO = "auto"
    """Once if every rank has enough memory, else layer by layer."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model or a stopping criterion ended it."""
    LENGTH = "length"
    """It reached the maximum of new tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation of a prompt."""

    tokens: tuple[int, ...]
    """New tokens only, including an end-of-sequence token, without padding."""
    text: str | None
    """Decoded without special tokens; None without a tokenizer."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A prompt's completions."""

    index: int
    """The index of the prompt in the input."""
    num_prompt_tokens: int
    completions: tuple[Completion, ...]
    """As many as num_return_sequences, best first with beam search."""

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
    """Model, prompts and settings of a run, read by every rank."""

    model: str
    """Folder of the model, or its hub id in the cache."""
    tokenizer: str
    """Folder of the tokenizer, or its hub id in the cache."""
    prompts: str
    """File with one JSON document per prompt, in order: its tokens, and its line in the input."""
    out: str
    """File for the results."""
    fingerprint: str
    """Of model, prompts and settings: unfinished results with another fingerprint are not continued."""
    dtype: str
    """dtype of the weights, as in torch: "bfloat16"."""
    batch_size: int
    """Prompts per call on one rank."""
    max_new_tokens: int
    gather: Gather = Gather.AUTO
    seed: int = 0
    trust_remote_code: bool = False
    deepspeed: str | None = None
    """The DeepSpeed JSON; None if each rank holds the whole model."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Settings of transformers' GenerationConfig."""


def job_to_json(job: GenerationJob) -> str:
    """Return a job as the text of a file."""
    return json.dumps(dataclasses.asdict(job), indent=2) + "\n"


def job_from_json(text: str) -> GenerationJob:
    """Return the job in a text written by job_to_json."""
    return parse_strictly(GenerationJob, text)
