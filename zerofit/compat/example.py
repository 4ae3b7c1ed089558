"""Example: a run in small, as a user would write it, for a rule's documentation, tests and evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.checkpoint import Checkpoint
    from zerofit.command import Route
    from zerofit.facts import Machine
    from zerofit.plan import Topology
    from zerofit.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The layers of a run; what is None is not there."""

    deepspeed: Mapping[str, Any] | str | None = None
    """ds_config.json, as a mapping or as the text itself."""
    accelerate: Mapping[str, Any] | str | None = None
    """accelerate.yaml."""
    route: Route | None = None
    """Who reads the DeepSpeed configuration, where no script says it."""
    command: str | None = None
    """The command line up to the script: "accelerate launch --zero_stage 3"."""
    script: str | None = None
    """The source of train.py."""
    arguments: str = ""
    """The script's own arguments, as in a shell."""
    strategy: Strategy | None = None
    """zerofit's own flags, in place of files."""
    topology: Topology | None = None
    machine: Machine | None = None
    checkpoint: Checkpoint | None = None
    """What the run is to resume from."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions other than those that zerofit is tested with: {"deepspeed": "0.18.0"}."""
