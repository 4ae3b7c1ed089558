"""The accelerate launch command line and its environment, to the letter."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.configs.write.command import (
    Rendezvous,
    accelerate_launch_arguments,
    first_gpu,
    is_on_one_of_many_gpus,
    launch_environment,
    shell_command,
)
from zerofit.core.facts import GpuSpec, Machine, Versions
from zerofit.core.plan import Plan, Topology
from zerofit.core.strategy import Engine, Precision, Strategy, ZeroStage

_ZERO3 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS, precision=Precision.BF16)
_PLAN = Plan(
    strategy=_ZERO3,
    topology=Topology(world_size=8),
    machine=Machine(gpus=(), num_cpu_cores=64, host_memory_bytes=1, host_memory_available_bytes=1),
    versions=Versions(python="3.12.4", zerofit="0.1.0"),
)
_HERE = Rendezvous(main_process_port=29500)


def test_text(plan_case: Any, golden: Callable[[str, str], None]) -> None:
    arguments = accelerate_launch_arguments(
        plan_case.plan, config_file="accelerate.yaml", rendezvous=_HERE, target=("train.py", "--epochs", "3")
    )
    environment = launch_environment(plan_case.plan, inherited={})
    golden(shell_command(arguments, environment=environment) + "\n", f"command/{plan_case.name}.sh")


@pytest.mark.parametrize(
    ("plan", "rendezvous", "target", "line"),
    [
        pytest.param(
            _PLAN,
            _HERE,
            ("train.py",),
            "--config_file a.yaml --mixed_precision bf16 --num_processes 8 --num_machines 1 --machine_rank 0 "
            "--main_process_port 29500 train.py",
            id="one node",
        ),
        pytest.param(
            replace(_PLAN, topology=Topology(num_nodes=2, world_size=16)),
            Rendezvous(machine_rank=1, main_process_ip="node0", main_process_port=1234, gpu_ids="0,2"),
            ("-m", "package.train", "--lr", "1e-4"),
            "--config_file a.yaml --mixed_precision bf16 --num_processes 16 --num_machines 2 "
            "--machine_rank 1 --main_process_ip node0 --main_process_port 1234 --gpu_ids 0,2 "
            "-m package.train --lr 1e-4",
            id="second of two nodes, a module",
        ),
        pytest.param(
            replace(_PLAN, topology=Topology(on_cpu=True), strategy=Strategy(compile=True)),
            Rendezvous(main_process_port=29500, gpu_ids="0"),
            (),
            "--config_file a.yaml --mixed_precision no --num_processes 1 --num_machines 1 --machine_rank 0 "
            "--main_process_port 29500 --dynamo_backend inductor",
            id="CPU: no GPU is named; compiled",
        ),
    ],
)
def test_arguments(plan: Plan, rendezvous: Rendezvous, target: tuple[str, ...], line: str) -> None:
    arguments = accelerate_launch_arguments(plan, config_file="a.yaml", rendezvous=rendezvous, target=target)
    assert " ".join(arguments) == line


@pytest.mark.parametrize(
    ("plan", "inherited", "environment"),
    [
        (_PLAN, {}, {"OMP_NUM_THREADS": "8"}),
        (_PLAN, {"OMP_NUM_THREADS": "3"}, {}),
        (replace(_PLAN, topology=Topology(world_size=128)), {}, {"OMP_NUM_THREADS": "1"}),
        (replace(_PLAN, topology=Topology(num_nodes=2, world_size=16)), {}, {"OMP_NUM_THREADS": "8"}),
        (
            replace(_PLAN, topology=Topology(world_size=2, on_cpu=True)),
            {},
            {
                "OMP_NUM_THREADS": "32",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_WAIT_POLICY": "PASSIVE",
                "DS_ACCELERATOR": "cpu",
            },
        ),
        (
            replace(_PLAN, strategy=Strategy(engine=Engine.DEEPSPEED, compile=True)),
            {},
            {"OMP_NUM_THREADS": "8", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
        ),
        (
            replace(_PLAN, topology=Topology(on_cpu=True), strategy=Strategy()),
            {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE", "CUDA_VISIBLE_DEVICES": "0"},
            {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"},
        ),
    ],
)
def test_environment(plan: Plan, inherited: dict[str, str], environment: dict[str, str]) -> None:
    assert launch_environment(plan, inherited=inherited) == environment


def test_a_shell_reads_back_what_was_written() -> None:
    arguments = ("--config_file", "my runs/a.yaml", "train.py", "it's", "$HOME", "", "*")
    line = shell_command(arguments, environment={"A": "", "B": "two words"})
    assert line == (
        "A='' B='two words' accelerate launch --config_file 'my runs/a.yaml' train.py "
        "'it'\"'\"'s' '$HOME' '' '*'"
    )
    assert shlex.split(line) == ["A=", "B=two words", "accelerate", "launch", *arguments]


_GPU = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=1, compute_capability=(9, 0))


@pytest.mark.parametrize(
    ("strategy", "topology", "num_gpus", "expected"),
    [
        (Strategy(), Topology(), 8, True),
        (Strategy(), Topology(), 1, False),
        (Strategy(), Topology(world_size=8), 8, False),
        (Strategy(), Topology(on_cpu=True), 8, False),
        (_ZERO3, Topology(), 8, False),
    ],
)
def test_a_lone_rank_without_deepspeed_is_kept_to_one_gpu(
    strategy: Strategy, topology: Topology, num_gpus: int, expected: bool
) -> None:
    machine = replace(_PLAN.machine, gpus=(_GPU,) * num_gpus)
    plan = replace(_PLAN, strategy=strategy, topology=topology, machine=machine)
    assert is_on_one_of_many_gpus(plan) is expected


@pytest.mark.parametrize(
    ("gpu_ids", "visible_devices", "gpu"),
    [
        (None, None, "0"),
        ("all", None, "0"),
        (None, "2,3", "2"),
        (None, "GPU-aaaa,GPU-bbbb", "GPU-aaaa"),
        ("1, 4", "2,3", "1"),
    ],
)
def test_the_first_gpu_is_the_first_that_the_user_named(
    gpu_ids: str | None, visible_devices: str | None, gpu: str
) -> None:
    assert first_gpu(gpu_ids, visible_devices) == gpu
