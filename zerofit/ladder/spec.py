"""What the process of one rung is told."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from zerofit.strategy import Strategy
from zerofit.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One rung to be run."""

    model: str
    """A name of the catalog, a folder, or a config.json."""
    task: str
    """What its head is for, as zerofit.probe.model_task.Task says it."""
    strategy: Strategy
    """With micro-batch and accumulation filled in."""
    sequence_length: int
    """Tokens of a sample."""
    full_length: int
    """Tokens of the samples as they are made; those of a shorter rung are cut off."""
    num_steps: int
    """Optimizer steps that are timed, after the warm-up."""
    on_cpu: bool
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
