"""Flags that can't be followed together, as whole messages."""

from __future__ import annotations

from typing import Any

import pytest
from inference_facts import GPU_80, machine, plan

from zerofit.checking.rule import ACCELERATE
from zerofit.core.errors import UserError
from zerofit.core.strategy import OffloadDevice, ZeroStage
from zerofit.generation.generation_job import Gather

_NODE = machine(GPU_80, GPU_80, host_gib=256)

_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"zero_stage": ZeroStage.GRADIENTS},
        "error[generate-stage-pointless]: ZeRO stage 2 partitions nothing that generation has\n"
        "  found: --zero-stage 2\n"
        "  why:   stages 1 and 2 partition optimizer states and gradients; each rank would hold the whole"
        " model, as with stage 0\n"
        "  fix:   give --zero-stage 0 for the whole model on each rank, 3 for a part of it, or leave it out\n"
        "  see:   https://www.deepspeed.ai/tutorials/zero/#zero-overview",
    ),
    (
        {"zero_stage": ZeroStage.NOTHING, "gather": Gather.ALWAYS},
        "error[generate-gather-needs-zero3]: there are no weights to gather\n"
        "  found: --gather always with --zero-stage 0\n"
        "  why:   each rank holds the whole model already\n"
        "  fix:   leave out --gather",
    ),
    (
        {"num_processes": 3, "num_nodes": 2},
        "error[num-processes-is-for-all-machines]: the ranks do not divide over the nodes\n"
        "  found: --num-processes 3 with --num-machines 2\n"
        "  why:   --num-processes counts the ranks of all nodes together, and each node gets as many\n"
        "  fix:   set --num-processes to a multiple of 2\n"
        f"  see:   {ACCELERATE}/utils/launch.py",
    ),
]


@pytest.mark.parametrize(("flags", "expected"), _REFUSED)
def test_flags_that_contradict(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        plan("gpt2", _NODE, **flags)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("flags", "rule", "found"),
    [
        (
            {"zero_stage": ZeroStage.NOTHING, "param_offload": OffloadDevice.CPU},
            "param-offload-needs-zero3",
            "--offload-param cpu with --zero-stage 0",
        ),
        (
            {"param_offload": OffloadDevice.NVME},
            "nvme-needs-path",
            "--offload-param nvme with no --nvme-path",
        ),
        (
            {"param_offload": OffloadDevice.CPU, "nvme_path": "/nvme"},
            "nvme-path-unused",
            "--nvme-path /nvme without an offload to nvme",
        ),
    ],
)
def test_flags_that_break_a_rule(flags: dict[str, Any], rule: str, found: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        plan("gpt2", _NODE, **flags)
    assert [(one.rule, one.found) for one in caught.value.exceptions] == [(rule, found)]


@pytest.mark.parametrize(
    "flags",
    [
        {"zero_stage": ZeroStage.PARAMETERS, "param_offload": OffloadDevice.CPU},
        {"num_processes": 4, "on_cpu": True},
        {"num_processes": 4, "num_nodes": 2},
        {"nvme_path": "/nvme"},
    ],
)
def test_flags_that_go_together(flags: dict[str, Any]) -> None:
    assert plan("gpt2", _NODE, **flags).fits
