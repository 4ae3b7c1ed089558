"""How many ranks a line starts: accelerate's file without ranks, --include, and GPUs for a vLLM server."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rule_examples.example import LAUNCH_FILE, Example
from rule_situations import situations_of_example

from zerofit.checking.check_run import check as check_run
from zerofit.checking.engine import check
from zerofit.checking.rules import ALL_RULES
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.units import GIB

_ONE, _VLLM = "distributed-type-starts-one-process", "vllm-needs-a-gpu-of-its-own"
_LAUNCH = "accelerate launch --config_file accelerate.yaml"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _found(example: Example, rule: str) -> list[str]:
    chosen = [declared for declared in ALL_RULES if declared.id == rule]
    verdicts = [check(situation, rules=chosen) for situation in situations_of_example(example)]
    return [finding.found for verdict in verdicts for finding in verdict.findings]


_ALONE = {**LAUNCH_FILE, "distributed_type": "NO"}


@pytest.mark.parametrize(
    ("file", "command", "shown"),
    [
        ({**_ALONE, "num_processes": 8}, None, "num_processes=8"),
        ({**_ALONE, "num_processes": 2, "mixed_precision": "bf16"}, _LAUNCH, "num_processes=2"),
        ({**_ALONE, "num_processes": 4, "gpu_ids": "0,1,2,3"}, _LAUNCH, "num_processes=4"),
        (_ALONE, f"{_LAUNCH} --num_processes 4", "--num_processes 4"),
        (_ALONE, f"{_LAUNCH} --num-processes=2 --mixed_precision bf16", "--num-processes=2"),
    ],
)
def test_accelerate_starts_one_process(file: dict[str, object], command: str | None, shown: str) -> None:
    example = Example(accelerate=file, command=command)
    (found,) = _found(example, _ONE)
    assert found == f"{shown} with distributed_type='NO'"
    for situation in situations_of_example(example):
        assert situation.topology is not None
        assert situation.topology.world_size == 1


@pytest.mark.parametrize(
    ("file", "command"),
    [
        (_ALONE, _LAUNCH),
        ({**_ALONE, "num_processes": 4}, f"{_LAUNCH} --multi_gpu"),
        ({**_ALONE, "num_processes": 4}, f"{_LAUNCH} --use_deepspeed --zero_stage 2"),
        ({**_ALONE, "num_processes": 4}, f"{_LAUNCH} --use_fsdp"),
        ({**_ALONE, "num_processes": 4}, f"{_LAUNCH} --num_processes 1"),
        (
            {**_ALONE, "num_processes": 4, "mpirun_config": {"mpirun_hostfile": "hosts"}},
            f"mpirun -n 4 {_LAUNCH}",
        ),
        ({**_ALONE, "distributed_type": "MULTI_GPU", "num_processes": 4}, _LAUNCH),
    ],
)
def test_files_and_flags_that_start_their_ranks(file: dict[str, object], command: str) -> None:
    assert _found(Example(accelerate=file, command=command), _ONE) == []


@pytest.mark.parametrize(
    ("include", "ranks"),
    [
        ("localhost:0", 1),
        ("localhost:0,1", 2),
        ("127.0.0.1:2,3,4", 3),
        ("worker-0:0", 1),
        ("localhost:0,0", 1),
    ],
)
def test_include_counts_the_gpus_of_this_machine(include: str, ranks: int) -> None:
    for flag in (f"--include {include}", f"--include={include}"):
        (situation,) = situations_of_example(Example(command=f"deepspeed {flag}"))
        assert situation.topology is not None
        assert situation.topology.world_size == ranks


@pytest.mark.parametrize(
    "flags", ["--include localhost", "--include worker-1:0@worker-2:0", "--hostfile hosts"]
)
def test_other_hosts_stay_unknown(flags: str) -> None:
    (situation,) = situations_of_example(Example(command=f"deepspeed {flags}"))
    assert situation.topology is None


_GPU = GpuSpec(name="A100", memory_bytes=80 * GIB, compute_capability=(8, 0))
_FOUR_GPUS = Machine(
    gpus=(_GPU,) * 4, num_cpu_cores=8, host_memory_bytes=256 * GIB, host_memory_available_bytes=250 * GIB
)
_GRPO = """\
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig("out", per_device_train_batch_size=8, {})
GRPOTrainer(model="m", reward_funcs=len, args=args, train_dataset=[]).train()
"""
_SERVER = "--use_vllm true --vllm_mode server --output_dir out"


@pytest.mark.parametrize(
    "example",
    [
        Example(command="torchrun --nproc_per_node 4", arguments=_SERVER, machine=_FOUR_GPUS),
        Example(command="accelerate launch --num_processes 4", arguments=_SERVER, machine=_FOUR_GPUS),
        Example(
            command="torchrun --nproc_per_node 4",
            script=_GRPO.format('use_vllm=True, vllm_mode="server"'),
            machine=_FOUR_GPUS,
        ),
        Example(
            command="torchrun --nproc_per_node 4",
            script=_GRPO.format('use_vllm=True, vllm_device="auto"'),
            machine=_FOUR_GPUS,
        ),
        Example(
            command="torchrun --nproc_per_node 4",
            script=_GRPO.format('use_vllm=True, vllm_mode="server", vllm_server_host="0.0.0.0"'),
            machine=_FOUR_GPUS,
        ),
    ],
)
def test_no_gpu_is_left_for_vllm(example: Example) -> None:
    (found,) = _found(example, _VLLM)
    assert found.startswith("4 ranks a node with ")
    assert found.endswith(", on 4 GPUs")


@pytest.mark.parametrize(
    "example",
    [
        Example(command="torchrun --nproc_per_node 3", arguments=_SERVER, machine=_FOUR_GPUS),
        Example(command="torchrun --nproc_per_node 4", arguments=_SERVER),  # nothing says how many GPUs
        Example(
            command="torchrun --nproc_per_node 4",
            arguments=_SERVER.replace("server", "colocate"),
            machine=_FOUR_GPUS,
        ),
        Example(
            command="torchrun --nproc_per_node 4",
            arguments=f"{_SERVER} --vllm_server_host 10.0.0.7",
            machine=_FOUR_GPUS,
        ),
        Example(
            command="torchrun --nproc_per_node 4", script=_GRPO.format("use_vllm=True"), machine=_FOUR_GPUS
        ),  # colocate by default
        Example(
            command="torchrun --nproc_per_node 4",
            script=_GRPO.format('use_vllm=False, vllm_mode="server"'),
            machine=_FOUR_GPUS,
        ),
    ],
)
def test_vllm_has_its_gpu_or_shares_them(example: Example) -> None:
    assert _found(example, _VLLM) == []


_RECIPE = {"model_name_or_path": "m", "output_dir": "o", "learning_rate": 1e-6, "use_vllm": True}
_JOB = (
    "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:8\naccelerate launch --num_processes {} grpo.py {}\n"
)


@pytest.mark.parametrize(
    ("more", "ranks", "found"),
    [
        ({"vllm_mode": "server"}, 8, ["8 ranks a node with use_vllm=true and vllm_mode=server"]),
        ({"vllm_device": "auto"}, 8, ["8 ranks a node with use_vllm=true and vllm_device=auto"]),
        ({"vllm_device": "auto", "num_processes": 7}, 8, ["8 ranks with use_vllm=true and num_processes=7"]),
        ({"vllm_mode": "server"}, 7, []),
        ({"vllm_mode": "colocate"}, 8, []),
    ],
)
def test_a_recipe_beside_the_jobs_gpus(more: dict[str, object], ranks: int, found: list[str]) -> None:
    Path("grpo.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer, TrlParser\n\n"
        "(args,) = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
        "GRPOTrainer(model='m', args=args).train()\n"
    )
    Path("recipe.yaml").write_text(yaml.safe_dump({**_RECIPE, **more}))
    Path("job.slurm").write_text(_JOB.format(ranks, "--config recipe.yaml"))
    seen = [finding for finding in check_run("job.slurm").findings if finding.rule == _VLLM]
    assert [finding.found.partition(", on")[0] for finding in seen] == found


_TAKES = """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr")
{}args = parser.parse_args()
"""


@pytest.mark.parametrize(
    ("option", "line", "is_refused"),
    [
        (
            "parser.add_argument('--local_rank', type=int)\n",
            "python -m torch.distributed.launch --nproc_per_node 2",
            True,
        ),
        ("", "python3 -m torch.distributed.launch --nproc_per_node=2", True),
        (
            "parser.add_argument('--local-rank', '--local_rank')\n",
            "python -m torch.distributed.launch",
            False,
        ),
        ("", "python -m torch.distributed.launch --use_env --nproc_per_node 2", False),
        ("", "torchrun --nproc_per_node 2", False),
        ("", "python -m torch.distributed.run --nproc_per_node 2", False),
    ],
)
def test_torchs_older_launcher_passes_the_rank_with_a_hyphen(
    option: str, line: str, is_refused: bool
) -> None:
    found = _found(Example(command=line, script=_TAKES.format(option)), "script-must-take-local-rank")
    assert found == ["parser.parse_args() without --local-rank"] * is_refused


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("swift rlhf --rlhf_type grpo --model m --num_generations 1 --output_dir o", True),
        ("swift rlhf --rlhf_type grpo --model m --num_generations 8 --output_dir o", False),
        ("trl grpo --config recipe.yaml", True),
        ("trl grpo --config other.yaml", False),
        ("swift sft --model m --output_dir o", False),
    ],
)
def test_one_generation_has_no_advantage(line: str, is_refused: bool) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump({**_RECIPE, "num_generations": 1}))
    Path("other.yaml").write_text(yaml.safe_dump({**_RECIPE, "num_generations": 4}))
    rules = [finding.rule for finding in check_run(*line.split()).findings]
    assert ("generation-batch-holds-whole-groups" in rules) is is_refused
