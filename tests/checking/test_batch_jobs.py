"""What check says of batch jobs: their header, the node that runs a line, and what nothing sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.checking.check_run import check
from zerofit.checking.inputs.batch_jobs import batch_job

_TWO = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
_TORCHRUN = "torchrun --nnodes 2 --nproc_per_node 4"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def _told(text: str, name: str = "job.sbatch") -> list[str]:
    Path(name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    return [
        f"{finding.place} {finding.severity} {finding.rule}: {finding.found}"
        for finding in check(name).findings
    ]


_HEADERS = [
    ("#SBATCH --nodes=$N\nsrun hostname\n", ["2 error: #SBATCH --nodes=$N"]),
    (
        "#SBATCH -N ${NODES}\n#SBATCH --gres=gpu:$G\necho\n",
        ["2 error: #SBATCH -N ${NODES}", "3 error: #SBATCH --gres=gpu:$G"],
    ),
    (
        "# why\n\n#SBATCH --time=${T:-2:00:00} # limit\ntorchrun a.py\n",
        ["4 error: #SBATCH --time=${T:-2:00:00}"],
    ),
    ("#SBATCH -o $HOME/%j.out\npython a.py\n", ["2 warning: #SBATCH -o $HOME/%j.out"]),
    ("#SBATCH --job-name=sft-$USER\naccelerate launch a.py\n", ["2 warning: #SBATCH --job-name=sft-$USER"]),
    ("#SBATCH -c`nproc`\nsrun python a.py\n", ["2 error: #SBATCH -c`nproc`"]),
    ("sbatch <<'E'\n#!/bin/bash\n#SBATCH -n $N\nsrun python a.py\nE\n", ["4 error: #SBATCH -n $N"]),
]


@pytest.mark.parametrize(("text", "expected"), _HEADERS)
def test_slurm_expands_nothing_in_its_header(text: str, expected: list[str]) -> None:
    told = [line.replace("job.sbatch:", "", 1) for line in _told(text)]
    assert [line.replace(" sbatch-variable-not-expanded", "") for line in told] == expected


@pytest.mark.parametrize(
    "text",
    [
        "#SBATCH --output=logs/%x-%j.out\n#SBATCH --nodes=2\nsrun python a.py\n",
        "#SBATCH --time={{ hours }}:00:00\nsrun python a.py\n",
        "echo $N\n#SBATCH --nodes=$N\ntorchrun a.py\n",
        "##SBATCH --nodes=$N\n# SBATCH --nodes=$N\ntorchrun a.py\n",
        "sbatch <<E\n#!/bin/bash\n#SBATCH --nodes=$N\nsrun python a.py\nE\n",
        "#SBATCH --comment='costs 5$'\ntorchrun a.py\n",
    ],
)
def test_what_slurm_reads_as_it_is_meant(text: str) -> None:
    assert _told(text) == []


_OUTPUTS = [
    (
        "#SBATCH -o logs/%x.out\n#SBATCH -e logs/e\nmkdir logs/\nsrun python a.py\n",
        "run mkdir -p logs before sbatch",
    ),
    (
        "#SBATCH --error ./a/b/%j.err\nset -e; mkdir -p -m 755 a a/b && ls\nsrun python a.py\n",
        "run mkdir -p ./a/b before sbatch",
    ),
    ("#SBATCH --output=runs/%j/out.txt\nsrun python a.py\n", "write --output=runs/%j-out.txt"),
    ("#SBATCH --output=run_%A/%a.txt\nsrun python a.py\n", "write --output=run_%A-%a.txt"),
    ("#SBATCH --output=/%j/o\nsrun python a.py\n", "write --output=/%j-o"),
]


@pytest.mark.parametrize(("text", "fix"), _OUTPUTS)
def test_slurm_opens_the_output_before_the_job_makes_its_folder(text: str, fix: str) -> None:
    assert _told(text) == [
        f"job.sbatch:2 warning sbatch-output-folder-too-late: {text.partition(chr(10))[0]}"
    ]
    (finding,) = check("job.sbatch").findings
    assert finding.fix == fix


@pytest.mark.parametrize(
    "text",
    [
        "#SBATCH --output=logs/%j.out\n# mkdir logs\nmkdir -p out/logs\nsrun python a.py\n",
        "#SBATCH --output=%j.out\nmkdir -p .\nsrun python a.py\n",
        "#SBATCH --output=logs/%x/%j.out\nmkdir -p logs\nsrun python a.py\n",
        "#SBATCH --output=logs/%j.out\nif true; then echo logs; fi\nsrun python a.py\n",
    ],
)
def test_the_folder_of_the_output_may_be_there(text: str) -> None:
    assert _told(text) == []


_COUNTS = [
    (
        "#SBATCH --ntasks=1\n#SBATCH --ntasks-per-node=2\nsrun python a.py\n",
        "--ntasks=1 with --ntasks-per-node=2",
    ),
    (
        "#SBATCH -N 4 -n 4\n#SBATCH --ntasks-per-node=8\nsrun python a.py\n",
        "-n 4 with --ntasks-per-node=8 on 4 nodes",
    ),
    (
        "#SBATCH -N2\n#SBATCH -n16\n#SBATCH --ntasks-per-node=4\nsrun a\n",
        "-n16 with --ntasks-per-node=4 on 2 nodes",
    ),
    (
        "#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node 8 a.py\n",
        "--nproc_per_node 8 with #SBATCH --gres=gpu:4",
    ),
    (
        "#SBATCH --gpus-per-node=a100:2\ndeepspeed --num_gpus=4 a.py\n",
        "--num_gpus=4 with #SBATCH --gpus-per-node=a100:2",
    ),
    (
        "#SBATCH --gres=gpu:v100:4,disk:1\nN=8\naccelerate launch --num_machines 1 --num_processes $N a.py\n",
        "--num_processes 8 with #SBATCH --gres=gpu:v100:4,disk:1",
    ),
    (
        "#SBATCH -N 2\n#SBATCH -G 8\nsrun -n 2 accelerate launch --num_machines 2 --num_processes 16 a.py\n",
        "--num_processes 16 with #SBATCH -G 8",
    ),
    (
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:4\nsrun torchrun --nproc_per_node 4 a.py\n",
        "--nproc_per_node 4, started by 4 tasks a node, with #SBATCH --gres=gpu:4",
    ),
    (
        "#SBATCH -N2\n#SBATCH --gres=gpu:8\nsrun accelerate launch --num_machines=2 --num_processes 8 a.py\n",
        "--num_processes 8 with #SBATCH --gres=gpu:8 on 2 nodes",
    ),
    (
        "#SBATCH -N4\n#SBATCH --gres=gpu:8\nsrun accelerate launch --num_machines 4 --num_processes 16 a\n",
        "--num_processes 16 with #SBATCH --gres=gpu:8 on 4 nodes",
    ),
    ("#SBATCH --nodes=2\nsrun torchrun --nnodes 4 a.py\n", "--nnodes 4 with #SBATCH --nodes=2"),
]


@pytest.mark.parametrize(("text", "expected"), _COUNTS)
def test_counts_of_header_and_line_contradict(text: str, expected: str) -> None:
    (told,) = _told(text)
    assert told.split(": ", 1)[1] == expected


_FIXES = [
    (
        "#SBATCH -N2\n#SBATCH --ntasks=16\n#SBATCH --gres=gpu:8\n"
        "srun torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d a.py\n",
        "write --ntasks-per-node=1 in place of --ntasks=16: torchrun starts the ranks of its node",
    ),
    (
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:4\nsrun torchrun --nproc_per_node 8 a.py\n",
        "write --ntasks-per-node=1: torchrun starts the ranks of its node; write --nproc_per_node 4, or ask "
        "for 8 GPUs a node",
    ),
    (
        "#SBATCH -N2\n#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=8\n"
        "srun torchrun --nnodes 2 --rdzv_backend c10d a.py\n",
        "write --ntasks-per-node=1 in place of --ntasks=2: torchrun starts the ranks of its node",
    ),
    (
        "#SBATCH -N2\n#SBATCH --ntasks=1\nsrun torchrun --nnodes 2 --rdzv_backend c10d a.py\n",
        "write --ntasks-per-node=1 in place of --ntasks=1: torchrun starts the ranks of its node",
    ),
    ("#SBATCH -N2\n#SBATCH -n2\n#SBATCH --ntasks-per-node=4\nsrun a\n", "leave -n2 out, or write --ntasks=8"),
    (
        "#SBATCH --gres=gpu:4\naccelerate launch --num_machines 1 --num_processes=8 a.py\n",
        "write --num_processes=4, or ask for 8 GPUs a node",
    ),
    ("#SBATCH --nodes=2\nsrun torchrun --nnodes 4 a.py\n", "write --nnodes 2, or #SBATCH --nodes=4"),
]


@pytest.mark.parametrize(("text", "fix"), _FIXES)
def test_a_fix_names_the_numbers_to_write(text: str, fix: str) -> None:
    Path("job.sbatch").write_text(f"#!/bin/bash\n{text}")
    (finding,) = check("job.sbatch").findings
    assert finding.fix == fix


@pytest.mark.parametrize(
    "text",
    [
        "#SBATCH --ntasks=3\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=2\nsrun python a.py\n",
        "#SBATCH --ntasks=16\n#SBATCH --ntasks-per-node=8\nsrun python a.py\n",
        "#SBATCH --nodes=2\n#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=0\nsrun python a.py\n",
        "#SBATCH --nodes=2-4\n#SBATCH --gres=gpu:8\nsrun torchrun --nnodes $N --nproc_per_node 8 a.py\n",
        "#SBATCH --gres=gpu:8\naccelerate launch --num_processes 7 a.py\n",
        "#SBATCH --ntasks-per-node=8\n#SBATCH --gres=gpu:8\n"
        "srun --ntasks-per-node=1 torchrun --nproc_per_node 8 a.py\n",
        "#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node $N a.py\n",
        "#SBATCH --gpus-per-task=4\n#SBATCH --ntasks-per-node=2\ntorchrun --nproc_per_node 8 a.py\n",
        "#SBATCH --gres=gpu:4\naccelerate launch --cpu --num_processes 8 a.py\n",
        "#SBATCH --gres=gpu:1\n#SBATCH hetjob\n#SBATCH --gres=gpu:8\ntorchrun --nproc_per_node 8 a.py\n",
    ],
)
def test_counts_that_agree_or_are_open(text: str) -> None:
    assert _told(text) == []


_FIRST = [
    (f"{_TORCHRUN} --rdzv_backend c10d a.py\n", "error", "torchrun --nnodes 2"),
    (
        "accelerate launch --num_machines $SLURM_NNODES a.py\n",
        "error",
        "accelerate launch --num_machines 2",
    ),
    ("accelerate launch --multi_gpu a.py\n", "warning", "accelerate launch"),
    ("deepspeed --num_nodes 2 a.py\n", "warning", "deepspeed --num_nodes 2"),
    (f"CMD='{_TORCHRUN} a.py'\nbash -c \"$CMD\"\n", "error", "torchrun --nnodes 2"),
    ("for i in 0 1; do torchrun --nnodes=2 --node_rank=$i a.py & done\n", "warning", "torchrun --nnodes=2"),
    (
        "python -m torch.distributed.run --nnodes=2 a.py\n",
        "error",
        "python -m torch.distributed.run --nnodes=2",
    ),
]


@pytest.mark.parametrize(("text", "severity", "expected"), _FIRST)
def test_a_line_without_srun_runs_on_the_first_node(text: str, severity: str, expected: str) -> None:
    (told,) = _told(_TWO + text)
    found = f"{expected} without srun, with #SBATCH --nodes=2"
    assert told.endswith(f"{severity} launch-on-first-node-only: {found}")


@pytest.mark.parametrize(
    "text",
    [
        f"srun {_TORCHRUN} --rdzv_backend c10d a.py\n",
        f"srun --jobid $SLURM_JOBID bash -c '{_TORCHRUN} a.py'\n",
        f"CMD='{_TORCHRUN} a.py'\nsrun $CMD\n",
        f"for host in $(scontrol show hostnames); do ssh $host {_TORCHRUN} --node_rank $i a.py & done\n",
        f"mpirun -np 2 {_TORCHRUN} a.py\n",
        "deepspeed --hostfile hosts --num_nodes 2 a.py\n",
        f"run() {{\n  {_TORCHRUN} a.py\n}}\nexport -f run\nsrun bash -c run\n",
        f'if [ -z "$WORKER" ]; then\n  WORKER=1 srun bash "$0"\nelse\n  {_TORCHRUN} a.py\nfi\n',
        "python prepare.py\nsrun python a.py\n",
    ],
)
def test_a_line_that_all_nodes_run(text: str) -> None:
    assert _told(_TWO + text) == []


def test_one_node_needs_no_srun() -> None:
    assert _told("#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node 4 a.py\n") == []
    assert _told("#SBATCH --gres=gpu:4\naccelerate launch --num_machines 1 a.py\n") == []


_RANKED = [
    ('srun bash -c "{} --node_rank $SLURM_NODEID a.py"\n', "--node_rank 0 (from $SLURM_NODEID)"),
    ("srun {} --node_rank=$SLURM_PROCID a.py\n", "--node_rank=0 (from $SLURM_PROCID)"),
    (
        'L="{} --node_rank $SLURM_PROCID"\nsrun --jobid $SLURM_JOBID bash -c "$L a.py"\n',
        "--node_rank 0 (from $SLURM_PROCID)",
    ),
    (
        "export RANK=${{SLURM_NODEID}}\nsrun bash -c '{} --node_rank '$RANK' a.py'\n",
        "--node_rank 0 (from $SLURM_NODEID)",
    ),
    ("srun bash <<E\n{} --node_rank ${{SLURM_NODEID:-0}} a.py\nE\n", "--node_rank 0"),
    ("srun {} --node_rank 0 a.py\n", "--node_rank 0"),
    (
        "srun accelerate launch --num_machines 2 --machine_rank $SLURM_NODEID a.py\n",
        "--machine_rank 0 (from $SLURM_NODEID)",
    ),
]


@pytest.mark.parametrize(("text", "expected"), _RANKED)
def test_the_batch_shell_gives_all_nodes_the_rank_0(text: str, expected: str) -> None:
    (told,) = _told(_TWO + text.format(_TORCHRUN))
    assert f"error node-rank-of-batch-shell: {expected}" in told


@pytest.mark.parametrize(
    "text",
    [
        "srun bash -c '{} --node_rank $SLURM_NODEID a.py'\n",
        'srun bash -c "{} --node_rank \\$SLURM_PROCID a.py"\n',
        'L="{} --node_rank \\$SLURM_PROCID"\nsrun --jobid $SLURM_JOBID bash -c "$L a.py"\n',
        "srun bash <<'E'\n{} --node_rank $SLURM_NODEID a.py\nE\n",
        "srun bash <<E\n{} --node_rank \\$SLURM_NODEID a.py\nE\n",
        "srun {} --node_rank $SLURM_NODEID --rdzv_backend=c10d a.py\n",
        "srun -N 1 -w $HEAD {} --node_rank 0 a.py &\nsrun --nodes=1 -w $OTHER {} --node_rank 1 a.py\n",
    ],
)
def test_a_rank_that_each_task_expands(text: str) -> None:
    assert _told(_TWO + text.replace("{}", _TORCHRUN)) == []


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (
            "srun -N 2 {} --node_rank $SLURM_NODEID a.py --name 'a b' $OUT",
            "srun -N 2 bash -c \"{} --node_rank \\$SLURM_NODEID a.py --name 'a b' $OUT\"",
        ),
        (
            "srun env NCCL_DEBUG=INFO {} --node_rank=$SLURM_PROCID a.py",
            'srun env bash -c "NCCL_DEBUG=INFO {} --node_rank \\$SLURM_NODEID a.py"',
        ),
        (
            "FOO=1 srun accelerate launch --num_machines 2 --machine_rank $SLURM_NODEID a.py",
            'FOO=1 srun bash -c "accelerate launch --num_machines 2 --machine_rank \\$SLURM_NODEID a.py"',
        ),
        (
            "srun {} --node_rank $SLURM_NODEID a.py --say '\"x\"'",
            "--node_rank \\$SLURM_NODEID in double quotes behind srun bash -c",
        ),
        (
            'srun bash -c "{} --node_rank $SLURM_NODEID a.py"',
            "--node_rank \\$SLURM_NODEID in the quotes of srun bash -c",
        ),
        (
            "srun bash <<E\n{} --node_rank $SLURM_NODEID a.py\nE",
            "--node_rank \\$SLURM_NODEID in the lines for the shell",
        ),
    ],
)
def test_the_line_whose_tasks_expand_their_rank(line: str, fix: str) -> None:
    Path("job.sbatch").write_text(f"#!/bin/bash\n{_TWO}{line.replace('{}', _TORCHRUN)}\n")
    (finding,) = check("job.sbatch").findings
    assert finding.fix == f"write {fix.replace('{}', _TORCHRUN)}"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (
            "{} --node_rank $SLURM_NODEID a.py",
            'write srun --ntasks-per-node=1 bash -c "{} --node_rank \\$SLURM_NODEID a.py"',
        ),
        (
            "NCCL_DEBUG=INFO accelerate launch --num_machines 2 --machine_rank $SLURM_PROCID a.py",
            "write NCCL_DEBUG=INFO srun --ntasks-per-node=1 bash -c "
            '"accelerate launch --num_machines 2 --machine_rank \\$SLURM_NODEID a.py"',
        ),
        (
            "torchrun --nproc_per_node 2 a.py",
            "write srun --ntasks-per-node=1 before the command; "
            "write --nnodes 2, and --rdzv_backend c10d --rdzv_endpoint",
        ),
        (
            "accelerate launch --num_processes 4 a.py",
            "write srun --ntasks-per-node=1 before the command; "
            "write --num_machines 2, and --main_process_ip and --machine_rank",
        ),
        ("{} --rdzv_backend c10d a.py", "write srun --ntasks-per-node=1 before the command"),
    ],
)
def test_a_line_without_srun_is_told_all_that_it_lacks_at_once(line: str, fix: str) -> None:
    job = f"#!/bin/bash\n{_TWO}{{}}\n"
    Path("job.sbatch").write_text(job.format(line.replace("{}", _TORCHRUN)))
    told = {finding.rule: finding.fix for finding in check("job.sbatch").findings}
    assert told.pop("launch-on-first-node-only") == fix.replace("{}", _TORCHRUN)
    if "; " not in fix and "before" not in fix:
        Path("job.sbatch").write_text(job.format(fix.removeprefix("write ").replace("{}", _TORCHRUN)))
        assert not {finding.rule for finding in check("job.sbatch").findings} - set(told)


_UNSET = [
    ('SCRIPT=a.py\nCMD="accelerate launch --num_processes 2 $PROGRAM $ARGS"\n$CMD\n', "$PROGRAM"),
    ("SCRIPTS_ARGS='--lr 1'\ntorchrun $TRAIN_FILE $SCRIPTS_ARGS\n", "$TRAIN_FILE"),
    ("#SBATCH --nodes=1\nCOMMAND='torchrun a.py'\nsrun --jobid $SLURM_JOBID $COMAND\n", "$COMAND"),
    ("LAUNCH='torchrun --nproc_per_node 2'\n$LAUNCHER a.py\n", "$LAUNCHER"),
    (
        'source ~/.rc/activate\neval "$(conda shell.bash hook)"\nENTRY=a.py\npython $ENTRY_FILE\n',
        "$ENTRY_FILE",
    ),
    ('#SBATCH -N 1\nsrun bash -c "$CMD 2>&1 | tee log"\n', "$CMD"),
]


@pytest.mark.parametrize(("text", "expected"), _UNSET)
def test_a_command_or_script_that_nothing_sets(text: str, expected: str) -> None:
    (told,) = _told(text)
    assert told.endswith(f"warning shell-variable-unset: {expected}")


@pytest.mark.parametrize(
    "text",
    [
        "torchrun $1 --lr 1\n",
        "torchrun ${SCRIPT:-a.py}\n",
        ": ${SCRIPT:?give a script}\ntorchrun $SCRIPT\n",
        '[ -z "$SCRIPT" ] && exit 1\ntorchrun $SCRIPT\n',
        "source config.sh\ntorchrun $SCRIPT\n",
        "read -r SCRIPT\ntorchrun $SCRIPT\n",
        "export SCRIPT\ntorchrun $SCRIPT\n",
        "# usage: SCRIPT=a.py bash job.sh\ntorchrun $SCRIPT\n",
        "for SCRIPT in a.py b.py; do\n  torchrun $SCRIPT\ndone\n",
        "while getopts s: SCRIPT; do torchrun $SCRIPT; done\n",
        "torchrun --nproc_per_node $SLURM_GPUS_ON_NODE a.py $EXTRA\n",
        "$CUDA_HOME/bin/nvcc a.cu\n$HOME/run a.py\n$CC a.c\n",
        "f() {\n  local SCRIPT=$1\n  torchrun $SCRIPT\n}\n",
        "case $MODE in sft) S=a.py;; dpo) S=b.py;; esac\ntorchrun $S\n",
    ],
)
def test_a_variable_that_something_sets(text: str) -> None:
    assert _told(text) == []


def test_the_nearest_name_is_the_fix() -> None:
    Path("job.sh").write_text("SCRIPT=a.py\nSCRIPT_ARGS=x\ntorchrun $PYTHON_FILE $SCRIPT_ARGS\n")
    assert [finding.fix for finding in check("job.sh").findings] == ["write $SCRIPT, which the file sets"]


def test_the_options_of_a_header() -> None:
    text = "#!/bin/sh\n#SBATCH -N2 -n 8\n\n#SBATCH --gres gpu:a100:4 # all\necho\n#SBATCH -N 3\n"
    job = batch_job(text, name="j")
    assert job is not None
    assert [option.text for option in job.options] == ["-N2", "-n 8", "--gres gpu:a100:4"]
    assert (job.nodes, job.tasks_per_node) == (2, 4)
    assert job.gpus_per_node is not None
    assert job.gpus_per_node[0] == 4
    assert batch_job("#!/bin/sh\necho\n", name="j") is None


@pytest.mark.parametrize(
    ("header", "line", "found"),
    [
        (_TWO, "srun torchrun --nproc_per_node 8 a.py", "srun torchrun without --nnodes"),
        (_TWO, "srun torchrun --nnodes=1 --nproc_per_node 8 a.py", "srun torchrun --nnodes=1"),
        (_TWO, "srun accelerate launch --multi_gpu a.py", "srun accelerate launch without --num_machines"),
        (
            "#SBATCH -N 4\n",
            "srun --ntasks-per-node=1 python -m torch.distributed.run --standalone a.py",
            "srun python -m torch.distributed.run without --nnodes",
        ),
        (
            "#SBATCH --ntasks=8\n#SBATCH --ntasks-per-node=4\n",
            "srun torchrun --rdzv_backend c10d --rdzv_endpoint $HOST:29500 a.py --out $OUT",
            "srun torchrun without --nnodes",
        ),
        (
            _TWO,
            "srun bash -c 'accelerate launch --num_machines 1 --num_processes 8 a.py'",
            "srun accelerate launch --num_machines 1",
        ),
    ],
)
def test_a_launcher_that_counts_one_node_on_each_of_several(header: str, line: str, found: str) -> None:
    told = [text for text in _told(f"{header}HOST=node1\nOUT=x\n{line}\n") if "nodes-train-alone" in text]
    assert len(told) == 1
    assert f" warning nodes-train-alone: {found}" in told[0].replace("accelerate  ", "accelerate ")


@pytest.mark.parametrize(
    "text",
    [
        f"{_TWO}srun torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint h:1 a.py\n",
        f"{_TWO}srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 a.py\n",
        f"{_TWO}export PET_NNODES=2\nsrun torchrun --nproc_per_node 8 a.py\n",
        f"{_TWO}srun --nodes=1 --ntasks=1 torchrun --nproc_per_node 8 a.py &\n",
        f"{_TWO}srun -w node1 torchrun --nproc_per_node 8 a.py\n",
        f"{_TWO}srun torchrun $DISTRIBUTED a.py\n",
        f"{_TWO}srun accelerate launch --config_file missing.yaml a.py\n",
        f"{_TWO}srun accelerate launch --num_machines $SLURM_NNODES a.py\n",
        f"{_TWO}srun python a.py\n",
        f"{_TWO}srun deepspeed a.py\n",  # by its hostfile
        "#SBATCH --nodes=1\nsrun torchrun --nproc_per_node 8 a.py\n",
    ],
)
def test_lines_whose_nodes_meet_or_are_meant_alone(text: str) -> None:
    assert [line for line in _told(text) if "nodes-train-alone" in line] == []


_ACCELERATOR = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
_TRAINER = (
    "from transformers import Trainer, TrainingArguments\n"
    "Trainer(model=None, args=TrainingArguments('o')).train()\n"
)
_SPREAD = (
    f"{_ACCELERATOR}from transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained('m', device_map='auto')\n"
)
_EIGHT = "#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n"
_ALONE = "; no process has its own RANK and LOCAL_RANK, so that each node trains alone"


@pytest.mark.parametrize(
    ("text", "script", "found", "why"),
    [
        (
            f"#SBATCH -N 2\n{_EIGHT}export WORLD_SIZE=16\nsrun python train.py\n",
            _ACCELERATOR,
            "srun python train.py with #SBATCH --ntasks-per-node=1 and #SBATCH --gres=gpu:8 on 2 nodes",
            f"14 of 16 GPUs stay idle{_ALONE}",
        ),
        (
            "#SBATCH -N 1\n#SBATCH --gpus-per-node=4\nsrun --ntasks-per-node=2 uv run python train.py\n",
            _ACCELERATOR,
            "srun python train.py with --ntasks-per-node=2 and #SBATCH --gpus-per-node=4",
            "2 of 4 GPUs stay idle",
        ),
        (
            "#SBATCH -N 4\n#SBATCH -G 16\nsrun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=0 python3 -m train'\n",
            _ACCELERATOR,
            "srun python3 -m train with #SBATCH -G 16 on 4 nodes",
            "12 of 16 GPUs stay idle",
        ),
        (
            f"#SBATCH -N 2\n{_EIGHT}srun python train.py\n",
            _TRAINER,
            "srun python train.py with #SBATCH --ntasks-per-node=1 and #SBATCH --gres=gpu:8 on 2 nodes",
            _ALONE.removeprefix("; "),
        ),
    ],
)
def test_a_plain_python_in_each_task_leaves_gpus_idle(text: str, script: str, found: str, why: str) -> None:
    Path("train.py").write_text(script)
    Path("job.sbatch").write_text(f"#!/bin/bash\n{text}")
    (finding,) = [one for one in check("job.sbatch").findings if one.rule == "tasks-leave-gpus-idle"]
    assert finding.found == found
    assert finding.why == f"a task is one process, and python starts no ranks: {why}"


def test_a_task_in_a_container_starts_its_ranks_there() -> None:
    Path("train.py").write_text(_ACCELERATOR)
    line = "srun --mpi=none apptainer exec --nv $IMAGE python train.py\n"
    Path("job.sbatch").write_text(f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH --gpus-per-node=4\n{line}")
    (finding,) = check("job.sbatch").findings
    assert finding.rule == "tasks-leave-gpus-idle"
    by_launcher, by_tasks = (finding.fix or "").split(", or ")
    assert by_launcher.startswith("write srun apptainer exec --nv $IMAGE torchrun --nproc_per_node 4 ")
    assert " and srun apptainer exec --nv $IMAGE bash -c 'RANK=$SLURM_PROCID " in by_tasks


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (
            "#SBATCH -N 2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gres=gpu:8\nsrun python train.py\n",
            _ACCELERATOR,
        ),
        ("#SBATCH -N 2\n#SBATCH --gpus-per-task=1\nsrun python train.py\n", _ACCELERATOR),
        (f"#SBATCH -N 2\n{_EIGHT}srun python train.py\n", "print('prepares data')\n"),
        (f"#SBATCH -N 2\n{_EIGHT}python train.py\n", _ACCELERATOR),
        (f"#SBATCH -N 2\n{_EIGHT}srun python train.py\n", _ACCELERATOR.replace("()", "(cpu=True)")),
        (f"#SBATCH -N 1\n{_EIGHT}srun python train.py\n", _TRAINER),
        (f"#SBATCH -N 1\n{_EIGHT}srun python train.py\n", _SPREAD),
        (f"#SBATCH -N 1\n{_EIGHT}export CUDA_VISIBLE_DEVICES=0\nsrun python train.py\n", _ACCELERATOR),
        (
            f"#SBATCH -N 2\n{_EIGHT}srun torchrun --nnodes 2 --nproc_per_node 8 train.py\n",
            _ACCELERATOR,
        ),
    ],
)
def test_tasks_that_use_their_gpus(text: str, script: str) -> None:
    Path("train.py").write_text(script)
    assert [line for line in _told(text) if "tasks-leave-gpus-idle" in line] == []
