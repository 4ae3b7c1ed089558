"""`zerofit launch` with another launcher's line, as a user types it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import RunZerofit, run_command

from zerofit.checking.rule import ACCELERATE

SCRIPT = """\
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    print("trained on", accelerator.num_processes, accelerator.distributed_type.value, sys.argv[1:])
"""


@pytest.fixture
def folder(same_folder: Path) -> Path:
    """Return a folder with a script that takes any arguments."""
    (same_folder / "train.py").write_text(SCRIPT)
    return same_folder


def test_line_of_accelerate_trains(zerofit_fork: RunZerofit, folder: Path) -> None:
    line = "--cpu --engine native accelerate launch --multi_gpu --num_processes 2 train.py --lr 1"
    run = zerofit_fork("launch", *line.split(), cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "trained on 2 MULTI_CPU ['--lr', '1']" in run.stdout
    assert run.stderr.splitlines()[:2] == [
        "zerofit: the command is equivalent to: zerofit launch --num-processes 2 --cpu --engine native "
        "train.py --lr 1",
        "zerofit: without --multi_gpu, which zerofit handles itself",
    ]


def test_flags_before_the_line_win(run_zerofit: RunZerofit, folder: Path) -> None:
    line = "--cpu --dry-run --num-processes 1 torchrun --nproc_per_node=8 train.py"
    run = run_zerofit("launch", *line.split(), cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "--num_processes 1 " in run.stdout


@pytest.mark.parametrize(
    ("line", "said", "launched"),
    [
        (
            "--fast --gpus 8xH100 accelerate launch --num_processes 4 --machine_rank 0 --multi_gpu --use_cpu "
            "--mixed_precision bf16 train.py --lr 1",
            [
                "zerofit: the command is equivalent to: zerofit plan --num-processes 4 "
                "--mixed-precision bf16 --fast --gpus 8xH100 train.py --lr 1",
                "zerofit: without --multi_gpu, which zerofit handles itself",
                "zerofit: without --machine-rank, --cpu, which zerofit plan does not use",
            ],
            "on 4 x NVIDIA H100 80GB HBM3; "
            "zerofit launch --num-processes 4 --mixed-precision bf16 train.py --lr 1",
        ),
        (
            "--fast --gpus 8xH100 --zero-stage 2 accelerate launch --config_file acc.yaml train.py --lr 1",
            [
                "zerofit: the command is equivalent to: zerofit plan --config-file acc.yaml --fast "
                "--gpus 8xH100 --zero-stage 2 train.py --lr 1",
                "zerofit: acc.yaml sets precision bf16",
            ],
            "on 8 x NVIDIA H100 80GB HBM3; "
            "zerofit launch --config-file acc.yaml --zero-stage 2 train.py --lr 1",
        ),
        (
            "--fast --gpus 8xH100 --num-machines 2 torchrun --nnodes 2 --nproc_per_node 6 -m train",
            [
                "zerofit: the command is equivalent to: zerofit plan --nnodes 2 --nproc-per-node 6 "
                "--fast --gpus 8xH100 --num-machines 2 -m train",
            ],
            "on 2 nodes of 6 x NVIDIA H100 80GB HBM3; zerofit launch --nproc-per-node 6 -m train",
        ),
    ],
)
def test_plan_takes_lines_of_other_launchers(
    zerofit_fork: RunZerofit, folder: Path, line: str, said: list[str], launched: str
) -> None:
    (folder / "acc.yaml").write_text("mixed_precision: bf16\n")
    run = zerofit_fork("plan", *line.split(), cwd=folder)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[: len(said)] == said
    on = re.search(r"^on .*?HBM3", run.stdout, re.MULTILINE)
    assert on is not None
    (command,) = (line for line in run.stdout.splitlines() if line.startswith("    zerofit launch "))
    assert f"{on[0]}; {command.strip()}" == launched


def test_run_folder_of_a_module_has_its_name(run_zerofit: RunZerofit, folder: Path) -> None:
    for line in ("-m train", "python -m train"):
        run = run_zerofit("launch", "--cpu", "--dry-run", *line.split(), cwd=folder)
        assert run.returncode == 0, run.stderr
        assert re.search(r"/zerofit-runs/[\d_-]+-train/plan\.json -m train$", run.stdout, re.MULTILINE)


_ANCHORS = (
    "as your files say (acc.yaml): ZeRO-3, ",
    "your script without these files: ",
    "what fits: ",
)
_FROM_PYTHON = """\
import zerofit

print(zerofit.plan("accelerate", "launch", "--config_file", "acc.yaml", "train.py", gpus="8xA100-80G"))
"""


def test_plan_launch_and_python_give_one_answer_to_a_line_with_files(
    zerofit_fork: RunZerofit, folder: Path
) -> None:
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    (folder / "acc.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    line = "--gpus 8xA100-80G accelerate launch --config_file acc.yaml train.py"
    planned = zerofit_fork("plan", "--wide", *line.split(), cwd=folder)
    launched = zerofit_fork("launch", "--dry-run", "--wide", *line.split(), cwd=folder)
    (folder / "ask.py").write_text(_FROM_PYTHON)
    asked = run_command((sys.executable, "ask.py"), folder)
    texts = (planned.stdout, launched.stderr, asked.stdout)
    answers = [[line for line in text.splitlines() if line.startswith(_ANCHORS)] for text in texts]
    assert [line[: len(start)] for line, start in zip(answers[0], _ANCHORS, strict=True)] == list(_ANCHORS)
    assert answers[0] == answers[1] == answers[2]


def test_recovery_that_cannot_ask_says_so_first(run_zerofit: RunZerofit, folder: Path) -> None:
    run = run_zerofit("launch", "--cpu", "--dry-run", "--recover", "ask", "train.py", cwd=folder)
    assert run.returncode == 0, run.stderr
    said = "zerofit: --recover ask has no terminal to ask on: the run ends if memory runs out"
    assert run.stderr.splitlines()[0] == said


def test_dry_run_shows_the_short_files_and_names_the_long_one(run_zerofit: RunZerofit, folder: Path) -> None:
    model = "--model gpt2 --seq-len 64 --global-batch-size 8 --fast"
    line = f"--dry-run --verbose --gpus 8xH100 --zero-stage 2 {model} train.py"
    run = run_zerofit("launch", *line.split(), cwd=folder)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("# /")]
    shown = [re.sub(r"[\d.]+ KiB", "N KiB", Path(line).name) for line in lines]
    assert shown == ["plan.json: N KiB, not shown", "accelerate.yaml", "command.sh", "ds_config.json"]
    assert len(run.stdout.splitlines()) < 60


_MODEL = "--model gpt2 --seq-len 64 --global-batch-size 8 --fast"


@pytest.mark.parametrize(
    ("typed", "pasted"),
    [
        ("--cpu --dry-run train.py", "zerofit launch --cpu train.py"),
        ("--cpu --dry-run --quiet train.py --lr 1", None),
        (
            "--cpu --num-processes 2 --dry-run --verbose train.py 'a b'",
            "zerofit launch --cpu --num-processes 2 train.py 'a b'",
        ),
        (f"--dry-run --gpus 8xH100 {_MODEL} train.py", f"zerofit launch {_MODEL} train.py"),
        (
            f"--dry-run --cpu --gpus 8xH100 {_MODEL} train.py",
            f"zerofit launch --cpu --gpus 8xH100 {_MODEL} train.py",
        ),
        (
            "--cpu --dry-run accelerate launch --num_processes 2 train.py",
            "zerofit launch --num-processes 2 --cpu train.py",
        ),
        ("--cpu --dry-run --zero-stage 2 -m train", "zerofit launch --cpu --zero-stage 2 -m train"),
    ],
)
def test_a_dry_run_names_the_line_that_runs_when_pasted(
    typed: str, pasted: str | None, run_zerofit: RunZerofit, folder: Path
) -> None:
    run = run_zerofit("launch", *shlex.split(typed), cwd=folder)
    assert run.returncode == 0, run.stderr
    said = " ".join(run.stderr.split())
    is_planned = "--model" in typed
    shown = "the one above" if is_planned else f"`{pasted}`"
    sentence = f"a dry run writes none of the files that the command below reads: {shown} writes them"
    assert (sentence in said) is (pasted is not None)
    assert (f"    {pasted}" in run.stderr.splitlines()) is is_planned
    assert not (folder / "zerofit-runs").exists()
    command = run.stdout.splitlines()[-1]
    assert "accelerate.yaml" in command


def test_plan_of_more_ranks_than_gpus_is_refused(run_zerofit: RunZerofit, folder: Path) -> None:
    line = "--gpus 2xH100 torchrun --nproc_per_node 4 train.py"
    run = run_zerofit("plan", *line.split(), cwd=folder)
    assert run.returncode == 2
    assert run.stderr.partition("\n")[2] == (
        "error[more-ranks-than-gpus]: there are fewer GPUs than ranks\n"
        "  found: 4 ranks on 1 x 2 GPUs\n"
        "  why:   each rank needs a GPU of its own\n"
        "  fix:   name more GPUs in --gpus, or set --num-processes to at most 2\n"
        f"  see:   {ACCELERATE}/state.py\n"
    )


_ZERO3 = """\
deepspeed_config:
  gradient_clipping: 0.5
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 2
"""
_DEEPSPEED = """\
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
 "bf16": {"enabled": "auto"},
 "scheduler": {"type": "WarmupLR"}}
"""


def _said(run: subprocess.CompletedProcess[str]) -> list[str]:
    assert run.returncode == 0, run.stderr
    return [" ".join(line.split()) for line in run.stderr.splitlines()]


def test_accelerate_file_is_followed_and_named(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder / "acc.yaml").write_text(_ZERO3)
    line = "--cpu --dry-run --config_file acc.yaml train.py"
    assert _said(run_zerofit("launch", *line.split(), cwd=folder)) == [
        "zerofit: acc.yaml sets num_processes 2, engine deepspeed, zero_stage 3, precision bf16, "
        "gradient_clipping 0.5",
        "zerofit: strategy: DeepSpeed ZeRO-3, bf16 on 2 CPU ranks",
        "script alone runs why",
        "engine DDP DeepSpeed ZeRO-3 acc.yaml:3 says so",
        "precision its own bf16 acc.yaml:5 says so",
        "gradient clipping its own norm 0.5 acc.yaml:2 says so",
        "zerofit: a dry run writes none of the files that the command below reads: "
        "`zerofit launch --cpu --config-file acc.yaml train.py` writes them and trains",
    ]


def test_default_file_of_accelerate_is_read(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder / "accelerate").mkdir()
    (folder / "accelerate" / "default_config.yaml").write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 2\n"
    )
    environment = {"HF_HOME": str(folder)}
    line = ("launch", "--cpu", "--dry-run", "train.py")
    said = _said(run_zerofit(*line, cwd=folder, environment=environment))
    assert said[0].endswith("default_config.yaml sets num_processes 2, engine native")
    assert said[1] == "zerofit: strategy: PyTorch without DeepSpeed, fp32 on 2 CPU ranks"


@pytest.mark.parametrize(
    "text",
    ['{"zero_optimization":{"stage":2}}', "eyJ6ZXJvX29wdGltaXphdGlvbiI6eyJzdGFnZSI6Mn19"],
    ids=["json", "base64"],
)
def test_a_configuration_in_place_of_its_name_is_followed(
    run_zerofit: RunZerofit, folder: Path, text: str
) -> None:
    line = f"--cpu --dry-run --num_processes 2 --deepspeed {text} train.py"
    said = _said(run_zerofit("launch", *line.split(), cwd=folder))
    assert said[0].endswith("sets engine deepspeed, zero_stage 2")


def test_deepspeed_file_is_followed_and_flags_win(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder / "ds.json").write_text(_DEEPSPEED)
    line = "--cpu --dry-run --num_processes 2 --zero_stage 1 --deepspeed ds.json train.py"
    said = _said(run_zerofit("launch", *line.split(), cwd=folder))
    assert said[0] == (
        "zerofit: ds.json sets engine deepspeed, zero_stage 2, optimizer_offload cpu; not used: scheduler"
    )
    assert "engine DDP DeepSpeed ZeRO-1 --zero-stage says so, against ds.json:1 (2)" in said


def test_deepspeed_file_of_the_script_is_followed_where_nothing_is_planned(
    run_zerofit: RunZerofit, folder: Path
) -> None:
    (folder / "ds.json").write_text(_DEEPSPEED)
    line = "--cpu --dry-run --num_processes 2 train.py --deepspeed ds.json"
    said = _said(run_zerofit("launch", *line.split(), cwd=folder))
    # What the file has beside it stays: the script reads it itself.
    assert said[0] == "zerofit: ds.json sets engine deepspeed, zero_stage 2, optimizer_offload cpu"
    assert said[1] == "zerofit: strategy: DeepSpeed ZeRO-2, optimizer on cpu, fp32 on 2 CPU ranks"


def test_tensor_parallelism_of_a_deepspeed_file_is_followed(run_zerofit: RunZerofit, folder: Path) -> None:
    group = '"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": true}'
    (folder / "ds.json").write_text(f'{{"zero_optimization": {{"stage": 1}}, {group}}}')
    line = "--cpu --dry-run --num_processes 4 --deepspeed ds.json train.py"
    said = _said(run_zerofit("launch", *line.split(), cwd=folder))
    assert said[0] == (
        "zerofit: ds.json sets engine deepspeed, zero_stage 1, tensor_parallel_size 2; not "
        "used: tensor_parallel.tp_overlap_comm"
    )
    assert "zerofit: strategy: DeepSpeed ZeRO-1, fp32 on 4 CPU ranks in tensor-parallel groups of 2" in said


@pytest.mark.parametrize(("short", "kind"), [("sp", "sequence"), ("tp", "tensor")])
def test_groups_of_accelerates_file_are_followed(
    short: str, kind: str, run_zerofit: RunZerofit, folder: Path
) -> None:
    section = f"parallelism_config:\n  parallelism_config_{short}_size: 2\n"
    (folder / "acc.yaml").write_text(_ZERO3 + section)
    line = "--cpu --dry-run --num_processes 4 --config_file acc.yaml train.py"
    said = _said(run_zerofit("launch", *line.split(), cwd=folder))
    assert f"{kind}_parallel_size 2" in said[0]
    assert any(f"on 4 CPU ranks in {kind}-parallel groups of 2" in one for one in said)


def test_plan_replaces_the_strategy_of_a_file(zerofit_fork: RunZerofit, folder: Path) -> None:
    (folder / "acc.yaml").write_text(_ZERO3)
    line = "--cpu --gpus 2xA100-40G --fast --wide --dry-run accelerate launch --config_file acc.yaml train.py"
    said = _said(zerofit_fork("launch", *line.split(), cwd=folder))
    assert any(one.startswith("engine DeepSpeed ZeRO-3 DDP the fastest that fits") for one in said), said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "distributed_type: FSDP\n"
            "fsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: LOCAL_STATE_DICT\n",
            """\
error[fsdp-value-refused]: accelerate refuses a setting of FSDP
  found: fsdp_config.fsdp_state_dict_type=LOCAL_STATE_DICT   (acc.yaml:4)
  why:   FSDP2 has no LOCAL_STATE_DICT
  fix:   write SHARDED_STATE_DICT
""",
        ),
        (
            None,
            """\
error[named-file-missing]: a named configuration does not exist
  found: acc.yaml
  why:   accelerate, Trainer and zerofit look for it in the folder in which the command runs
  fix:   write the path relative to the folder in which the command runs, and run zerofit there
  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/deepspeed.py#L154-L156
""",
        ),
    ],
)
def test_file_is_refused(run_zerofit: RunZerofit, folder: Path, text: str | None, message: str) -> None:
    if text is not None:
        (folder / "acc.yaml").write_text(text)
    run = run_zerofit("launch", "--cpu", "--config_file", "acc.yaml", "train.py", cwd=folder)
    assert (run.returncode, run.stderr) == (2, message)


def test_a_launch_names_what_a_file_says_by_its_line(run_zerofit: RunZerofit, folder: Path) -> None:
    (folder / "ds.json").write_text(
        '{"zero_optimization": {\n"stage": 2,\n"offload_param": {"device": "cpu"}}}'
    )
    words = ("--cpu", "--no-capture", "--dry-run", "--deepspeed-config-file", "ds.json", "train.py")
    run = run_zerofit("launch", *words, cwd=folder)
    assert run.returncode == 2
    found = "zero_optimization.offload_param.device=cpu with zero_optimization.stage=2   (ds.json:3)"
    assert (
        f"error[param-offload-needs-zero3]: parameter offload needs ZeRO-3\n  found: {found}\n" in run.stderr
    )
