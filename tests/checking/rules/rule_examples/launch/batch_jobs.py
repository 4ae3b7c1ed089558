"""Examples of the rules of zerofit/checking/rules/launch/batch_jobs.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, Example, Examples

_NODES = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n"
_TORCHRUN = "torchrun --nnodes 2 --nproc_per_node 8 {} train.py"
_RANKED = _TORCHRUN.format("--node_rank $SLURM_NODEID --master_addr $ADDRESS")
_MEETING = _TORCHRUN.format("--rdzv_backend c10d --rdzv_endpoint $ADDRESS:29500")


def _job(header: str, line: str) -> Example:
    return Example(shell=f"#!/bin/bash\n{header}{line}\n")


EXAMPLES = {
    "sbatch-variable-not-expanded": Examples(
        bad=_job("#SBATCH --time=$LIMIT\n", "torchrun --nproc_per_node 8 train.py"),
        good=_job("#SBATCH --time=20:00:00\n", "torchrun --nproc_per_node 8 train.py"),
    ),
    "sbatch-tasks-contradict": Examples(
        bad=_job("#SBATCH --ntasks=1\n#SBATCH --ntasks-per-node=4\n", "srun python train.py"),
        good=_job("#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=4\n", "srun python train.py"),
    ),
    "sbatch-output-folder-too-late": Examples(
        bad=_job("#SBATCH --output=logs/%j/out.txt\n", "srun python train.py"),
        good=_job("#SBATCH --output=logs/%j-out.txt\n", "srun python train.py"),
    ),
    "launch-needs-more-than-job": Examples(
        bad=_job("#SBATCH --gres=gpu:4\n", "torchrun --nproc_per_node 8 train.py"),
        good=_job("#SBATCH --gres=gpu:8\n", "torchrun --nproc_per_node 8 train.py"),
    ),
    "launch-on-first-node-only": Examples(
        bad=Example(shell=f"{_NODES}{_MEETING}\n"),
        good=Example(shell=f"{_NODES}srun {_MEETING}\n"),
    ),
    "nodes-train-alone": Examples(
        bad=Example(shell=f"{_NODES}srun torchrun --nproc_per_node 8 train.py\n"),
        good=Example(shell=f"{_NODES}srun {_MEETING}\n"),
    ),
    "tasks-leave-gpus-idle": Examples(
        bad=Example(shell=f"{_NODES}srun python train.py\n", script=LANGUAGE),
        good=Example(shell=f"{_NODES.replace('node=1', 'node=8')}srun python train.py\n", script=LANGUAGE),
    ),
    "node-rank-of-batch-shell": Examples(
        bad=Example(shell=f'{_NODES}srun bash -c "{_RANKED}"\n'),
        good=Example(shell=f"{_NODES}srun bash -c '{_RANKED}'\n"),
    ),
    "shell-variable-unset": Examples(
        bad=Example(shell="SCRIPT=train.py\npython $PROGRAM\n"),
        good=Example(shell="SCRIPT=train.py\npython $SCRIPT\n"),
    ),
    "environment-variable-misspelt": Examples(
        bad=Example(shell="export MASTER_ADR=node1\npython train.py\n"),
        good=Example(shell="export MASTER_ADDR=node1\npython train.py\n"),
    ),
}
