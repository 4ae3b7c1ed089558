"""What the process of one rung is told."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from zerofit.core.strategy import Precision, Strategy
from zerofit.core.validation import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One rung to be run."""

    model: str
    """A name of the catalog, a folder, or a config.json."""
    task: str
    """What its head is for, as zerofit.models.task.Task says it."""
    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens of a sample."""
    full_length: int
    """Tokens of the samples as they are made; those of a shorter rung are cut off."""
    num_steps: int
    """Optimizer steps that are timed, after the warm-up."""
    on_cpu: bool
    weights: Precision = Precision.FP32
    """Format in which the loop makes the model. On fp32 weights it computes in 16 bit by autocast, on weights
    of that very format without it; DeepSpeed casts by itself."""
    num_ranks: int = 1
    """Data-parallel ranks under DeepSpeed. Above 1 the process is rank 0 of them, among collectives that
    exchange nothing: its tensors are a rank's, its losses are of no use."""
    memory_limit_bytes: int | None = None
    """What torch may allocate on the GPU; on the CPU, what the process may map beyond what it has imported:
    private writable mappings (getrlimit(2), RLIMIT_DATA). None for all there is."""
    waits: bool = False
    """Whether, with all imported, the process waits for a line on its standard input before it touches the
    device."""
    result_file: str
    """Where the process writes its Outcome."""

    __pydantic_config__ = STRICT

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step."""
        return (self.strategy.micro_batch_size or 1) * (self.strategy.gradient_accumulation_steps or 1)


def spec_to_json(spec: Spec) -> str:
    """Return the text of a spec file."""
    return json.dumps(dataclasses.asdict(spec), indent=2) + "\n"


def spec_from_json(text: str) -> Spec:
    """Return the spec that spec_to_json() wrote."""
    from pydantic import TypeAdapter

    return TypeAdapter(Spec).validate_json(text)
