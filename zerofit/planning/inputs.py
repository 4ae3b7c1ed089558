"""Flags about a model, its workload and the GPUs of another machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.models.task import Task
from zerofit.planning.problem import DEFAULT_RESERVE, Allow, Reserve


class Loop(StrEnum):
    """How the script runs a micro-batch, which decides how long the model's outputs stay."""

    PLAIN = "plain"
    """`outputs = model(**batch)`, as scripts with accelerate do: they stay until the next ones are there."""
    TRAINER = "trainer"
    """transformers' Trainer, which lets go of them once it has the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """The flags about model and workload."""

    model: str | None
    sequence_length: int | None
    target_length: int | None
    task: Task | None
    is_padded: bool | None
    """None where it was not said."""
    loop: Loop | None
    """None where it was not said."""
    dtype: Precision | None
    """Format in which the weights are loaded; None for the checkpoint's."""
    trust_remote_code: bool
    allow: frozenset[Allow]
    reserve: Reserve
    expandable_segments: bool
    is_fast: bool
    takes_fastest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFlags:
    """The flags about another machine's GPUs."""

    gpus: str | None = None
    host_ram: str | None = None
    nvme: str | None = None
    cpu_cores: int | None = None
    network: str | None = None
    host_bandwidth: str | None = None


DEFAULTS: dict[str, Any] = {
    "trust_remote_code": False,
    "allow": frozenset(),
    "reserve": Reserve(share=DEFAULT_RESERVE),
    "expandable_segments": False,
    "is_fast": False,
    "takes_fastest": False,
}
"""Defaults of the planning flags; None for those not listed."""
CAPTURE_LIMIT_S = 600
"""ASSUMPTION: imports, data and tokenization of most scripts take less; --capture-limit says otherwise."""


_ONLY_PLANNING = {
    "sequence_length": "--seq-len",
    "target_length": "--target-len",
    "task": "--task",
    "is_padded": "--padded",
    "loop": "--loop",
    "dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
    "allow": "--allow",
    "reserve": "--reserve",
    "expandable_segments": "--expandable-segments",
    "is_fast": "--fast",
    "takes_fastest": "--fastest",
}
"""Flags that have no effect where no plan is made, by field of ModelFlags."""


def check_none_ignored(flags: ModelFlags, *, because: str, instead: str) -> None:
    """Check that no flag says how to plan, for a verb that makes no plan.

    Args:
        flags: what was said.
        because: why no plan is made.
        instead: what to do beside leaving the flag out.

    Raises:
        UserError: one was given.
    """
    given = [flag for name, flag in _ONLY_PLANNING.items() if getattr(flags, name) != DEFAULTS.get(name)]
    if given:
        raise UserError(
            "planning-flag-without-planning",
            "a flag of planning would be ignored, as no plan is made here",
            found=f"{', '.join(given)} with {because}",
            why="it says how to plan, and here a preset, a plan file or other flags say what runs",
            fix=f"leave out {', '.join(given)}, or {instead}",
        )


def check_capture_limit(limit_s: float, *, because: str) -> None:
    """Check that --capture-limit is left out, for a verb that captures nothing.

    Args:
        limit_s: what was said.
        because: why nothing is captured: the flag that says so.

    Raises:
        UserError: it was given.
    """
    if limit_s != CAPTURE_LIMIT_S:
        raise UserError(
            "capture-limit-without-capture",
            "a limit for a capture, and nothing is captured",
            found=f"--capture-limit {limit_s:g} with {because}",
            why="it is how long the script may take to come to its training, when it is run to look at it",
            fix="leave out --capture-limit",
        )
