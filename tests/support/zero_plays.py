"""Plays DeepSpeed's engines on made logs, for the tests of what they hold."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from zerofit.core.allocation_log import AllocationLog
from zerofit.core.estimates import RunPhase
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.replay import Tape
from zerofit.planning.estimate.engines.engine import Setup

VERSIONS = Versions(python="3.11", zerofit="0", deepspeed="0.19.8")
STATE_TERMS = ("weights", "master weights", "optimizer states")
ENGINE_TERMS = (
    *STATE_TERMS,
    "gradients",
    "gradient bucket",
    "gradient copy",
    "gradient partition",
    "gathered weights",
    "all-gather buffer",
    "optimizer temporaries",
)
"""All that is not the model's own."""


def setup_of(
    log: AllocationLog,
    stage: int,
    *,
    ranks: int = 2,
    offload: str = "",
    num_samples: int = 1,
    **strategy: Any,
) -> Setup:
    """Return the setup of a stage; offload holds "o" for the optimizer and "p" for the parameters."""
    return Setup(
        log=log,
        strategy=Strategy(
            engine=Engine.DEEPSPEED,
            zero_stage=ZeroStage(stage),
            optimizer_offload=OffloadDevice.CPU if "o" in offload else OffloadDevice.NONE,
            param_offload=OffloadDevice.CPU if "p" in offload else OffloadDevice.NONE,
            micro_batch_size=num_samples,
            **strategy,
        ),
        topology=Topology(world_size=ranks),
        versions=VERSIONS,
    )


def played(setup: Setup) -> Tape:
    """Return the tape of a whole run."""
    return play_strategy(setup).tape


def at_end(tape: Tape) -> Counter[str]:
    """Return the live bytes by term when the run is over."""
    live: Counter[str] = Counter()
    for entry in tape.entries:
        live[tape.terms[abs(entry) - 1]] += tape.sizes[abs(entry) - 1] * (1 if entry > 0 else -1)
    return +live


def peaks(tape: Tape, *terms: str) -> dict[RunPhase, int]:
    """Return the most bytes of these terms, or of all, that each phase holds at one time."""
    found: dict[RunPhase, int] = {}
    live, marks = 0, [*tape.marks, (len(tape.entries), None)]
    for (start, phase), (end, _) in pairwise(marks):
        assert phase is not None
        found[phase] = max(found.get(phase, 0), live)
        for entry in tape.entries[start:end]:
            if not terms or tape.terms[abs(entry) - 1] in terms:
                live += tape.sizes[abs(entry) - 1] * (1 if entry > 0 else -1)
                found[phase] = max(found[phase], live)
    return found


def state_bytes(setup: Setup) -> int:
    """Return the model states on the device once a run has settled."""
    held = at_end(played(setup))
    return sum(held[term] for term in STATE_TERMS)
