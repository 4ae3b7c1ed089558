"""Command lines of other launchers: how they are parsed, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from zerofit.checking.check_run import check
from zerofit.checking.launch_line import read_line
from zerofit.core.errors import UserError

_READ = {
    "accelerate launch train.py --lr 1": "train.py --lr 1",
    "accelerate launch --num_processes 4 --mixed_precision=bf16 train.py": (
        "--num-processes 4 --mixed-precision bf16 train.py"
    ),
    "accelerate launch --multi_gpu --mixed_precision no train.py": "train.py",
    "accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device cpu train.py": (
        "--use-deepspeed --zero-stage 3 --offload-param-device cpu train.py"
    ),
    "accelerate launch --config_file acc.yaml -m pack.train": "--config-file acc.yaml -m pack.train",
    "torchrun train.py": "--nproc-per-node 1 train.py",
    "python -m torch.distributed.run --nnodes 2 --nproc_per_node=8 --rdzv_endpoint=h:29400 train.py": (
        "--nnodes 2 --nproc-per-node 8 --main-process-ip h --main-process-port 29400 train.py"
    ),
    "deepspeed --num_gpus=2 --master_port 29501 train.py --deepspeed ds.json": (
        "--num-gpus 2 --master-port 29501 train.py --deepspeed ds.json"
    ),
    "deepspeed --include localhost:1,3 train.py": "--gpu-ids 1,3 --nproc-per-node 2 train.py",
    "deepspeed --module pack.train --x": "-m pack.train --x",
    "python -u train.py": "train.py",
    "accelerate launch --use_deepspeed --use_parallelism_config --parallelism_config_sp_size 2 train.py": (
        "--use-deepspeed --sequence-parallel-size 2 train.py"
    ),
    "accelerate launch --use_parallelism_config --parallelism_config_tp_size 2 train.py": (
        "--tensor-parallel-size 2 train.py"
    ),
    "python3 -m pack.train --x 1": "-m pack.train --x 1",
    "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_activation_checkpointing true "
    "--fsdp_activation_checkpointing_offload true train.py": (
        "--engine fsdp2 --gradient-checkpointing --offload-activations train.py"
    ),
}


@pytest.mark.parametrize("line", _READ)
def test_line_reads_as_flags_of_zerofit(line: str) -> None:
    read = read_line(shlex.split(line))
    assert read is not None
    assert shlex.join([*read.words, *(["-m"] if read.is_module else []), *read.target]) == _READ[line]


def test_variables_and_ignored_flags_are_separated() -> None:
    read = read_line(shlex.split("A=1 CUDA_VISIBLE_DEVICES=0,1 accelerate launch --multi_gpu train.py"))
    assert read is not None
    assert read.environment == (("A", "1"), ("CUDA_VISIBLE_DEVICES", "0,1"))
    assert read.left_out == ("--multi_gpu",)


@pytest.mark.parametrize("line", ["train.py --lr 1", "pack.train", "zerofit launch train.py"])
def test_a_script_is_not_a_launch_line(line: str) -> None:
    assert read_line(line.split()) is None


_REFUSED = {
    "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward FULL_SHARD train.py": """\
error[fsdp-value-refused]: accelerate refuses a setting of FSDP
  found: --fsdp_reshard_after_forward FULL_SHARD
  why:   it is a switch
  fix:   write true or false""",
    "accelerate launch --use_fsdp --fsdp_activation_checkpointing_offload true train.py": """\
error[fsdp-value-refused]: accelerate refuses a setting of FSDP
  found: --fsdp_activation_checkpointing_offload true
  why:   it needs fsdp_activation_checkpointing: true and fsdp_version: 2
  fix:   write both, or leave it out""",
    "accelerate launch --use_megatron_lm train.py": """\
error[launcher-flag-not-taken]: a flag of accelerate launch is not supported
  found: --use_megatron_lm
  why:   zerofit splits models with --tensor-parallel-size and --pipeline-parallel-size, without Megatron-LM
  fix:   leave it out, or start this run without zerofit""",
    "srun -n 1 accelerate launch train.py": """\
error[runner-behind-zerofit]: zerofit must be started by srun, not the other way round
  found: srun behind zerofit
  why:   srun chooses where and in which environment the rest of its line runs
  fix:   srun -n 1 zerofit launch accelerate launch train.py; plan, tune and submit take the line without \
srun -n 1""",
    "deepspeed --include worker-0@worker-1 train.py": """\
error[launcher-flag-not-taken]: a flag of another launcher is not supported
  found: --include worker-0@worker-1
  why:   zerofit is started separately on each node, and reads nodes from a hostfile
  fix:   pass --hostfile FILE before the launcher, and leave this out""",
}


@pytest.mark.parametrize("line", _REFUSED)
def test_line_is_refused_with_its_reason(line: str) -> None:
    with pytest.raises(UserError) as caught:
        read_line(shlex.split(line))
    assert str(caught.value) == _REFUSED[line]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("torchrun --nproc_per_node 2", "launch-without-script"),
        ("accelerate launch", "launch-without-script"),
        ("accelerate launch --config_file train.py", "launch-without-script"),
        ("accelerate launch --multi_gpu true train.py", "launch-without-script"),
        ("accelerate launch --num_proceses 2 train.py", "launch-unknown-flag"),
        ("torchrun --replicas 2 train.py", "launch-unknown-flag"),
        ("accelerate launch --num_processes two train.py", "launch-flag-value"),
        ("accelerate launch --cpu --use_deepspeed train.py", "launch-flags-exclude-each-other"),
        ("deepspeed --num_gpus 2 --include localhost:0 train.py", "launch-flags-exclude-each-other"),
    ],
)
def test_a_line_that_its_launcher_refuses_has_one_text(
    line: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UserError) as caught:
        read_line(line.split())
    told = [finding.as_text() for finding in check(*line.split()).findings if finding.rule == rule]
    assert [str(caught.value)] == told
