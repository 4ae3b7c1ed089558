"""What a launch sets so that NCCL writes its last collectives into the run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import PLAN

from zerofit.core.plan import Plan, Topology
from zerofit.launching.run_folder import RunFolder
from zerofit.launching.start import flight_recorder

_PLAN = replace(PLAN, topology=Topology(world_size=2), versions=replace(PLAN.versions, torch="2.13.0+cu130"))
_FOLDER = RunFolder(path=Path("/runs/one"))
_NEW = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_TEMP_FILE": "/runs/one/ranks/nccl_trace_rank_",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
_OLD = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/one/ranks/nccl_trace_rank_",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


@pytest.mark.parametrize(
    ("plan", "environment"),
    [
        (_PLAN, _NEW),
        (replace(_PLAN, versions=replace(_PLAN.versions, torch="2.9.0")), _NEW),
        (replace(_PLAN, versions=replace(_PLAN.versions, torch="2.8.1+cu126")), _OLD),
        (replace(_PLAN, topology=Topology(world_size=2, on_cpu=True)), {}),
        (replace(_PLAN, topology=Topology(world_size=1)), {}),
    ],
    ids=["new", "2.9", "2.8", "CPU", "one rank"],
)
def test_variable_names_follow_the_version_of_torch(plan: Plan, environment: dict[str, str]) -> None:
    assert flight_recorder(plan, _FOLDER, inherited={}) == environment


def test_variables_that_the_user_has_set_are_kept() -> None:
    assert "TORCH_FR_BUFFER_SIZE" not in flight_recorder(
        _PLAN, _FOLDER, inherited={"TORCH_FR_BUFFER_SIZE": "9"}
    )
