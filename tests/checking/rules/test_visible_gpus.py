"""gpu_ids and CUDA_VISIBLE_DEVICES against the ranks of a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rule_examples.example import LAUNCH, Example
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.inputs.shell_lines import shell_lines
from zerofit.checking.rules import ALL_RULES

_IDS = (
    "num-processes-is-for-all-machines",
    "num-processes-of-one-machine",
    "gpu-ids-too-few",
    "gpu-ids-unused",
    "multi-gpu-needs-two-ids",
)
_RULES = [rule for rule in ALL_RULES if rule.id in _IDS]
_EIGHT = "0,1,2,3,4,5,6,7"
_UNEVEN, _SEVERAL, _FEW, _UNUSED, _ONE = _IDS


def _file(kind: str = "MULTI_GPU", **keys: Any) -> dict[str, Any]:
    section = {"deepspeed_config": {"zero_stage": 2, "deepspeed_multinode_launcher": "standard"}}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "machine_rank": 0,
        "main_process_ip": "10.0.0.7",
        "main_process_port": 29500,
        **(section if kind == "DEEPSPEED" else {}),
        **keys,
    }


def _found(example: Example) -> list[str]:
    verdict = check(situation_of_example(example), rules=_RULES)
    return [f"{finding.rule}: {finding.found}" for finding in verdict.findings]


@pytest.mark.parametrize(
    ("ranks", "machines", "ids", "found"),
    [
        (10, 2, "0,1", f"{_FEW}: num_processes=10 with num_machines=2 and gpu_ids=0,1"),
        (16, 2, "0,1,2,3", f"{_FEW}: num_processes=16 with num_machines=2 and gpu_ids=0,1,2,3"),
        (8, 1, "4,5,6,7", f"{_FEW}: num_processes=8 with gpu_ids=4,5,6,7"),
        (3, None, "0, 1", f"{_FEW}: num_processes=3 with gpu_ids=0, 1"),
        (12, 3, "1,2,3", f"{_FEW}: num_processes=12 with num_machines=3 and gpu_ids=1,2,3"),
        (4, 2, "0,1,2,3", f"{_SEVERAL}: num_processes=4 with num_machines=2 and gpu_ids=0,1,2,3"),
        (8, 4, "0,1,2,3,4,5,6,7", f"{_SEVERAL}: num_processes=8 with num_machines=4 and gpu_ids={_EIGHT}"),
        (2, 2, "0,1", f"{_SEVERAL}: num_processes=2 with num_machines=2 and gpu_ids=0,1"),
        (6, 3, "2,3,4,5,6,7", f"{_SEVERAL}: num_processes=6 with num_machines=3 and gpu_ids=2,3,4,5,6,7"),
        (7, 2, "0,1,2,3", f"{_UNEVEN}: num_processes=7 with num_machines=2"),
        (4, 1, "0,1,2,3,4,5,6,7", f"{_UNUSED}: num_processes=4 with gpu_ids=0,1,2,3,4,5,6,7"),
        (2, None, "3,4,5", f"{_UNUSED}: num_processes=2 with gpu_ids=3,4,5"),
        (6, 2, "0,1,2,3", f"{_UNUSED}: num_processes=6 with num_machines=2 and gpu_ids=0,1,2,3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP", "DEEPSPEED", "MULTI_XPU", "MEGATRON_LM"])
def test_the_files_ids_do_not_fit_its_ranks(
    kind: str, ranks: int, machines: int | None, ids: str, found: str
) -> None:
    counts = {"num_processes": ranks} | ({} if machines is None else {"num_machines": machines})
    assert _found(Example(accelerate=_file(kind, **counts, gpu_ids=ids))) == [found]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("accelerate launch --multi_gpu --num_processes 4 --gpu_ids 0,1", [_FEW]),
        ("accelerate launch --num_processes 8 --gpu_ids=0,1,2", [_FEW]),
        ("accelerate launch --use_fsdp --num_machines 2 --num_processes 8 --gpu_ids 0,1", [_FEW]),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --multi_gpu --num_processes 4", [_FEW]),
        ("CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 4", [_FEW]),
        ("CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node=8 --nnodes 2", [_FEW]),
        ("accelerate launch --multi_gpu --num_machines 2 --num_processes 4 --gpu_ids 0,1,2,3", [_SEVERAL]),
        ("accelerate launch --multi_gpu --num_processes 2 --gpu_ids 0,1,2,3", [_UNUSED]),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node 2", [_UNUSED]),
        ("accelerate launch --multi_gpu --num_processes 2 --gpu_ids 0,1", []),
        ("accelerate launch --multi_gpu --num_processes 4 --gpu_ids all", []),
        ("accelerate launch --multi_gpu --num_processes 4 --gpu_ids $GPUS", []),
        ("accelerate launch --multi_gpu --num_processes $N --gpu_ids 0,1", []),
        ("accelerate launch --multi_gpu --num_machines $N --num_processes 4 --gpu_ids 0,1", []),
        ("accelerate launch --cpu --num_processes 4 --gpu_ids 0,1", []),
        ("accelerate launch --tpu --num_processes 8 --gpu_ids 0,1", []),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node gpu", []),
        ("CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node 2", []),
        ("CUDA_VISIBLE_DEVICES=GPU-8932f937 torchrun --nproc_per_node 2", []),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes 4", []),
        ("CUDA_VISIBLE_DEVICES=0 accelerate launch --multi_gpu --num_processes 4 --gpu_ids 0,1,2,3", []),
    ],
)
def test_a_lines_ids_do_not_fit_its_ranks(line: str, found: list[str]) -> None:
    assert [text.partition(":")[0] for text in _found(Example(command=line))] == found


_TORCHRUN = "torchrun --nproc_per_node 4 train.py"


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("export CUDA_VISIBLE_DEVICES=0,1", [_FEW]),
        ("CUDA_VISIBLE_DEVICES=0,1\nexport CUDA_VISIBLE_DEVICES", [_FEW]),
        ("GPUS=0,1,2\nexport CUDA_VISIBLE_DEVICES=$GPUS", [_FEW]),
        ('export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="4,5"', [_FEW]),
        ("export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7", [_UNUSED]),
        ("export CUDA_VISIBLE_DEVICES=0,1,2,3", []),
        ("export CUDA_VISIBLE_DEVICES=$1", []),
        ("export CUDA_VISIBLE_DEVICES=${GPUS:-$ALL}", []),
        ("CUDA_VISIBLE_DEVICES=0,1", []),  # not exported
        ("export CUDA_VISIBLE_DEVICES=0,1\nunset CUDA_VISIBLE_DEVICES", []),
        ("if [ $X ]; then\n  export CUDA_VISIBLE_DEVICES=0,1\nfi", []),
    ],
)
def test_a_file_exports_the_visible_gpus(before: str, found: list[str]) -> None:
    *_, line = shell_lines(f"#!/bin/bash\n{before}\n{_TORCHRUN}\n", name="run.sh")
    situation = replace(situation_of_example(Example(command=_TORCHRUN)), line=line)
    assert [finding.rule for finding in check(situation, rules=_RULES).findings] == found


def test_flags_win_over_the_file() -> None:
    file = _file("MULTI_GPU", num_processes=2, num_machines=1, gpu_ids="0,1")
    more = f"{LAUNCH} --num_processes 4"
    assert _found(Example(accelerate=file, command=more)) == [f"{_FEW}: --num_processes 4 with gpu_ids=0,1"]
    assert _found(Example(accelerate=file, command=f"{more} --gpu_ids 0,1,2,3")) == []


@pytest.mark.parametrize(
    ("keys", "flags", "found"),
    [
        ({"num_processes": 2, "gpu_ids": "0"}, "", "distributed_type=MULTI_GPU with gpu_ids='0'"),
        ({"num_processes": 1, "gpu_ids": "3"}, "", "distributed_type=MULTI_GPU with gpu_ids='3'"),
        ({"num_processes": 2}, "--gpu_ids 1", "distributed_type=MULTI_GPU with --gpu_ids 1"),
        (
            {"kind": "MULTI_NPU", "num_processes": 2, "gpu_ids": "0"},
            "",
            "distributed_type=MULTI_NPU with gpu_ids='0'",
        ),
        (
            {"kind": "NO", "num_processes": 2, "gpu_ids": "0"},
            "--multi_gpu",
            "--multi_gpu with gpu_ids='0'",
        ),
    ],
)
def test_accelerate_refuses_multi_gpu_with_one_id(keys: dict[str, Any], flags: str, found: str) -> None:
    assert _found(Example(accelerate=_file(**keys), command=f"{LAUNCH} {flags}")) == [f"{_ONE}: {found}"]


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "NO", "num_processes": 1, "gpu_ids": "0"},
        {"kind": "NO", "num_processes": 1, "gpu_ids": "0,1,2,3"},  # a model spread by device_map
        {"kind": "MULTI_CPU", "num_processes": 4, "gpu_ids": "0"},
        {"num_processes": 8, "num_machines": 2, "gpu_ids": "0,1,2,3"},
        {"num_processes": 2, "num_machines": 2, "gpu_ids": "0"},
        {"num_processes": 4, "gpu_ids": "all"},
        {"num_processes": 4},
        {"num_processes": 4, "gpu_ids": "0,1", "use_cpu": True},
        {"kind": "DEEPSPEED", "num_processes": 1, "gpu_ids": "0"},
    ],
)
def test_ids_that_fit(keys: dict[str, Any]) -> None:
    assert _found(Example(accelerate=_file(**keys))) == []


def test_deepspeeds_launcher_chooses_the_gpus_of_several_machines_itself() -> None:
    file = _file("DEEPSPEED", num_processes=8, num_machines=2, gpu_ids="0,1")
    file["deepspeed_config"] = {"zero_stage": 2, "deepspeed_hostfile": "hosts"}
    assert _found(Example(accelerate=file)) == []


def test_a_gpu_beside_the_ranks_may_be_for_vllm() -> None:
    line = "accelerate launch --multi_gpu --num_processes 3 --gpu_ids 0,1,2,3"
    assert _found(Example(command=line, arguments="--use_vllm true")) == []
