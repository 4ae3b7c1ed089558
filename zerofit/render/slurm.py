"""The recipe launch/slurm.sbatch."""

from __future__ import annotations

_SBATCH = """\
#!/usr/bin/env bash
# Trains a script on a Slurm cluster. Written by `make presets`.
#
#   sbatch launch/slurm.sbatch train.py ARGS
#   sbatch --nodes=4 --export=ALL,PRESET=z3 launch/slurm.sbatch train.py ARGS
#
#SBATCH --job-name=zerofit
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@RANKS_PER_NODE@
#SBATCH --output=%x-%j.out
set -euo pipefail
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-@RANKS_PER_NODE@}}
PRESET=${PRESET:-@PRESET@}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a node must not share a port.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export RANKS_PER_NODE PRESET MASTER_ADDR MASTER_PORT

# One launcher a node; SLURM_NODEID is known only inside the step, so it is read there.
srun --kill-on-bad-exit=1 --ntasks-per-node=1 bash -c '
  exec zerofit launch --preset "$PRESET" \\
    --num-machines "$SLURM_NNODES" --machine-rank "$SLURM_NODEID" --nproc-per-node "$RANKS_PER_NODE" \\
    --main-process-ip "$MASTER_ADDR" --main-process-port "$MASTER_PORT" "$@"' zerofit "$@"
"""


def slurm_script(*, preset: str, num_nodes: int, ranks_per_node: int) -> str:
    """Return the recipe for a Slurm cluster."""
    return (
        _SBATCH.replace("@PRESET@", preset)
        .replace("@NODES@", str(num_nodes))
        .replace("@RANKS_PER_NODE@", str(ranks_per_node))
    )
