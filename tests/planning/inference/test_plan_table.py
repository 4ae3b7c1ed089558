"""The table of `zerofit generate`, as goldens: on GPUs, with offload, on the CPU, and if nothing fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from inference_facts import GPU_24, GPU_80, machine, plan, workload

from zerofit.core.strategy import ZeroStage
from zerofit.generation.generation_job import Gather
from zerofit.planning.inference.plan_table import inference_table

if TYPE_CHECKING:
    from collections.abc import Callable

_EIGHT = machine(*(GPU_80,) * 8, host_gib=1024)
_CASES: dict[str, dict[str, Any]] = {
    "whole": {"name": "llama-3-8b", "node": _EIGHT},
    "gather-ignored": {"name": "llama-3-8b", "node": machine(GPU_80, host_gib=64), "gather": Gather.ALWAYS},
    "zero3": {"name": "llama-3-70b", "node": _EIGHT, "num_nodes": 2},
    "nvme": {"name": "llama-3-70b", "node": machine(GPU_24, host_gib=48), "nvme_path": "/nvme"},
    "cpu": {"name": "gpt2", "node": machine(host_gib=4), "work": workload(num_prompts=1, longest_prompt=9)},
    "ranks-on-cpu": {
        "name": "t5-base",
        "node": machine(host_gib=16),
        "work": workload(num_beams=4),
        "zero_stage": ZeroStage.PARAMETERS,
        "num_processes": 2,
    },
    "nothing": {"name": "llama-3-70b", "node": machine(GPU_24, GPU_24, host_gib=64)},
}


@pytest.mark.parametrize("name", _CASES)
def test_table(name: str, golden: Callable[[str, str], None]) -> None:
    case = dict(_CASES[name])
    found = plan(case.pop("name"), case.pop("node"), **case)
    golden(inference_table(found) + "\n", f"generate_plan/{name}.txt")
