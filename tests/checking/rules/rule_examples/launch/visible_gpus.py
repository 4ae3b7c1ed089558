"""Examples of the rules of zerofit/checking/rules/launch/visible_gpus.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import LAUNCH_FILE, SMALL, ZERO2_LAUNCH, Example, Examples, changed, config

_ON_CPU = changed(
    changed(SMALL, "Accelerator()", "Accelerator(cpu=True)"), ".square().mean()", ".square().mean() / 100"
)
"""Gradients that the harness's reference does not clip."""


def _file(num_processes: int, gpu_ids: str) -> dict[str, Any]:
    return {**ZERO2_LAUNCH, "num_processes": num_processes, "gpu_ids": gpu_ids}


def _two_machines(num_processes: int) -> dict[str, Any]:
    node = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    section = {"deepspeed_config": {"zero_stage": 2, "deepspeed_multinode_launcher": "standard"}}
    return {**_file(num_processes, "0,1,2,3"), **node, **section}


def _multi_gpu(gpu_ids: str) -> Example:
    file = {**LAUNCH_FILE, "distributed_type": "MULTI_GPU", "num_processes": 2, "gpu_ids": gpu_ids}
    return Example(accelerate=file, script=_ON_CPU)


EXAMPLES = {
    "gpu-ids-too-few": Examples(
        bad=Example(accelerate=_file(4, "0,1")), good=Example(accelerate=_file(2, "0,1"))
    ),
    "num-processes-of-one-machine": Examples(
        bad=Example(accelerate=_two_machines(4)), good=Example(accelerate=_two_machines(8))
    ),
    "gpu-ids-unused": Examples(
        bad=Example(accelerate=_file(2, "0,1,2,3")), good=Example(accelerate=_file(4, "0,1,2,3"))
    ),
    "multi-gpu-needs-two-ids": Examples(bad=_multi_gpu("0"), good=_multi_gpu("0,1")),
    "visible-devices-ignored": Examples(
        bad=Example(deepspeed=config(2), command="CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 2"),
        good=Example(deepspeed=config(2), command="CUDA_VISIBLE_DEVICES=2,3 deepspeed"),
    ),
}
