"""GenerationJob: what the ranks of `zerofit generate` are to do, as a file of the run folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from zerofit.generated import Gather
from zerofit.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """What to generate with what, as every rank reads it."""

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

    __pydantic_config__ = STRICT


def job_to_json(job: GenerationJob) -> str:
    """Return the text of a job's file."""
    return json.dumps(dataclasses.asdict(job), indent=2) + "\n"


def job_from_json(text: str) -> GenerationJob:
    """Return the job that a file written by job_to_json holds."""
    from pydantic import TypeAdapter

    return TypeAdapter(GenerationJob).validate_json(text)
