"""accelerate's file and flags to settings and ranks."""

from __future__ import annotations

import shlex

import pytest

from zerofit.checking.inputs.accelerate import settings_of_accelerate, topology_of_launch
from zerofit.checking.inputs.command_line import read_command
from zerofit.configs.document import Document
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.read import read_document
from zerofit.core.command import LaunchCommand
from zerofit.core.plan import Topology

_SCHEMAS = load_schemas()
_FILE = "distributed_type: DEEPSPEED\nnum_processes: 8\nnum_machines: 2\n"


def _document(text: str | None) -> Document | None:
    return read_document(text, name="accelerate.yaml") if text is not None else None


def _command(text: str | None) -> LaunchCommand | None:
    return read_command(shlex.split(text), schemas=_SCHEMAS) if text is not None else None


_SETTINGS = [
    (
        f"{_FILE}mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\n",
        None,
        {
            "engine": ("deepspeed", "distributed_type=DEEPSPEED"),
            "zero_stage": (3, "deepspeed_config.zero_stage=3"),
            "optimizer_offload": ("none", "no offload_optimizer_device"),
            "param_offload": ("cpu", "deepspeed_config.offload_param_device=cpu"),
            "optimizer_nvme_path": ("none", "no offload_optimizer_nvme_path"),
            "param_nvme_path": ("none", "no offload_param_nvme_path"),
            "precision": ("bf16", "mixed_precision=bf16"),
            "force_cpu_optimizer": (True, "no zero_force_ds_cpu_optimizer"),
        },
    ),
    (
        f"{_FILE}deepspeed_config:\n  zero_stage: 3\n",
        "accelerate launch --zero_stage 1 --mixed_precision no",
        {
            "engine": ("deepspeed", "distributed_type=DEEPSPEED"),
            "zero_stage": (1, "--zero_stage 1"),
            "optimizer_offload": ("none", "no offload_optimizer_device"),
            "param_offload": ("none", "no offload_param_device"),
            "optimizer_nvme_path": ("none", "no offload_optimizer_nvme_path"),
            "param_nvme_path": ("none", "no offload_param_nvme_path"),
            "precision": ("fp32", "--mixed_precision no"),
            "force_cpu_optimizer": (True, "no zero_force_ds_cpu_optimizer"),
        },
    ),
    (
        f"{_FILE}deepspeed_config:\n  deepspeed_config_file: ds.json\n",
        None,
        {"engine": ("deepspeed", "distributed_type=DEEPSPEED"), "precision": (None, "no mixed_precision")},
    ),
    (
        None,
        "accelerate launch --multi_gpu train.py",
        {
            "engine": ("native", "--multi_gpu"),
            "zero_stage": (0, "--multi_gpu"),
            "optimizer_offload": ("none", "--multi_gpu"),
            "param_offload": ("none", "--multi_gpu"),
            "precision": (None, "no mixed_precision"),
        },
    ),
    ("num_processes: 2\n", None, {"precision": (None, "no mixed_precision")}),
]


@pytest.mark.parametrize(("file", "command", "expected"), _SETTINGS)
def test_what_file_and_flags_come_to(
    file: str | None, command: str | None, expected: dict[str, tuple[object, str]]
) -> None:
    settings = settings_of_accelerate(_document(file), _command(command))
    assert settings is not None
    names = [name for name in type(settings).__dataclass_fields__ if name not in ("names", "fields")]
    said = {name: getattr(settings, name) for name in names}
    assert {name: (one.value, one.text) for name, one in said.items() if one is not None} == expected


def test_without_a_stage_it_is_2() -> None:
    settings = settings_of_accelerate(_document(_FILE), None)
    assert settings is not None
    assert settings.zero_stage is not None
    assert (settings.zero_stage.value, settings.zero_stage.text) == (2, "no zero_stage, so it is 2")


def test_other_launchers_have_other_settings() -> None:
    assert settings_of_accelerate(None, _command("torchrun train.py")) is None


_RANKS = [
    (_FILE, None, Topology(num_nodes=2, world_size=8)),
    (_FILE, "accelerate launch --num_processes 4 --num_machines 1", Topology(world_size=4)),
    (_FILE, "accelerate launch --num_processes 3", None),
    ("distributed_type: DEEPSPEED\n", None, None),
    (None, "accelerate launch --num_processes 2 --cpu", Topology(world_size=2, on_cpu=True)),
    (None, "accelerate launch --num_processes $N", None),
    (None, "torchrun --nnodes 2 --nproc_per_node 4 a.py", Topology(num_nodes=2, world_size=8)),
    (None, "torchrun --nproc_per_node gpu a.py", None),
    (None, "deepspeed --num_gpus 2 a.py", Topology(world_size=2)),
    (None, "deepspeed --hostfile hosts --num_gpus 2 a.py", None),
    (None, "python train.py", None),
]


@pytest.mark.parametrize(("file", "command", "expected"), _RANKS)
def test_how_many_ranks(file: str | None, command: str | None, expected: Topology | None) -> None:
    assert topology_of_launch(_document(file), _command(command)) == expected
