"""Groups that share samples are a part of the plan of a captured script, as on GPUs, and train by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from parallel_dimensions import assert_trains_as, script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runs import Run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequence", "tensor"])
def test_a_captured_script_is_planned_in_groups_and_trains_as_in_one_process(
    kind: str,
    launch: Callable[..., Run],
    model_of: Callable[[str], Path],
    one_process: Callable[..., Path],
) -> None:
    groups = ("--gpus", "2xA100-80G", "--num-processes", "2", f"--{kind}-parallel-size", "2")
    run = launch(*groups, *script(model_of("llama"), "--batch-size", "8")).check()
    assert_trains_as(run.folder / "out", one_process("llama", "--batch-size", "8"))
    plan = json.loads((run.run_folder / "plan.json").read_text())
    assert plan["topology"][f"{kind}_parallel_size"] == 2
    names = {term["name"] for term in plan["estimate"]["step_time"]["terms"]}
    assert "exchange in the group" in names
    (reason,) = (one for one in plan["reasons"] if one["field"] == f"{kind}_parallel_size")
    assert reason["origin"] == "flag"
