"""Measures all cases, continues a stopped run, and stores what each rank measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kept_measurements import KeptAnswers, Measured, digest, measured_here
from measuring_ranks import Ranks

from memory.cases import deepspeed_config
from memory.results import compact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memory.cases import Case

_DECIDES = ("collectives.py", "devices.py", "models.py", "track.py", "train.py")
_BATCH = 12
"""Cases that one group of ranks measures before it ends."""
_LIMIT_S = 90.0
"""For one case, on a busy machine."""


def run_memory(
    cases: Sequence[Case], folder: Path, *, anew: bool = False, tell: Callable[[str], None] = print
) -> Measured:
    """Return what the cases hold.

    Args:
        cases: what to run.
        folder: keeps measurements, so that a run that was stopped goes on, and logs.
        anew: forget earlier measurements.
        tell: takes a line for each case that could not be measured.
    """
    kept = KeptAnswers(folder / "memory", Path(__file__).parent, _DECIDES, anew=anew)
    names = {
        case.key: f"{case.key} {digest(dataclasses.asdict(case), deepspeed_config(case))}" for case in cases
    }
    missing = [case for case in cases if names[case.key] not in kept.known]
    for num_ranks in sorted({case.num_ranks for case in missing}):
        with Ranks("memory.rank", num_ranks, folder / "logs", limit_s=_LIMIT_S) as ranks:
            for number, case in enumerate(one for one in missing if one.num_ranks == num_ranks):
                if number % _BATCH == 0:
                    ranks.stop()
                answers = ranks.run({"key": case.key})
                if said := next((answer["raised"] for answer in answers if "raised" in answer), None):
                    tell(f"{case.key}: {said}")
                else:
                    kept.keep(names[case.key], answers)
    answered = [(case, kept.known.get(names[case.key])) for case in cases]
    return measured_here({case.key: compact(case, ranks) for case, ranks in answered if ranks is not None})
