"""Limits that the pages on failures promise are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.core.plan import GENERATE_LIMIT_S
from zerofit.launching import checks, hang, log_lines, recover
from zerofit.launching.clusters import kubernetes, meeting, skypilot, slurm
from zerofit.launching.failures import failures
from zerofit.machine import extensions
from zerofit.scripts.capture.limit import CAPTURE_LIMIT_S

_DOCS = Path(__file__).parents[2] / "docs"
_WORDS = {5: "five", 10: "ten"}

_PROMISES = (
    ("explain", f"zerofit knows {len(failures())} failures"),
    ("explain", f"Of a line {log_lines._LONGEST_LINE:,} characters are read"),
    ("recovery", f"zerofit lowers its memory limit to {recover._MAX_PHASE_SHARE:.0%}".replace("%", " %")),
    ("recovery", f"as before the run, at most {recover._FREE_LIMIT_S:.0f} s"),
    ("recovery", f"By default it is {hang._LIMIT_S / 60:.0f} minutes"),
    ("recovery", f"it is {hang._LIMIT_IN_PHASES} times the longest phase"),
    ("recovery", f"and at least {hang._LEAST_LIMIT_IN_STEPS_S / 60:.0f} minutes"),
    ("recovery", f"or inside a step: for {_WORDS[hang._WORK_FACTOR]} times the limit"),
    ("recovery", f"removes locks older than {_WORDS[extensions._ABANDONED_S // 60]} minutes"),
    ("launch", f"limits it ({CAPTURE_LIMIT_S})"),
    ("launch", f"more than {checks.MOST_CPU_RANKS} CPU ranks"),
    ("generate", f"within `--generate-limit` seconds ({GENERATE_LIMIT_S})"),
    ("clusters", f"A node that is silent for {meeting.LOST_S:.0f} s counts as lost"),
    ("clusters", f"Nodes wait {slurm.JOIN_LIMIT_S:.0f} s for each other"),
    ("clusters", f"on Kubernetes and SkyPilot {kubernetes.JOIN_LIMIT_S / 60:.0f} minutes"),
    ("clusters", f"on Kubernetes and SkyPilot {skypilot.JOIN_LIMIT_S / 60:.0f} minutes"),
)


@pytest.mark.parametrize(("page", "promise"), _PROMISES)
def test_a_page_names_the_limit_that_holds(page: str, promise: str) -> None:
    assert promise in " ".join((_DOCS / f"{page}.md").read_text(encoding="utf-8").split())
