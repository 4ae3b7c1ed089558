"""Every file of ds_configs/ and launch/, rendered from the presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.configs.write.accelerate import accelerate_yaml
from zerofit.configs.write.deepspeed import deepspeed_json
from zerofit.core.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.presets import Preset

_README_HEAD = """\
<!-- Written by `make presets` from zerofit/core/presets.py: edit that. -->
# DeepSpeed presets

One JSON a strategy, and the accelerate YAML that goes with it. They work unchanged in a script that uses
`Accelerator()` and in one that uses `Trainer`, in bf16, fp16 and fp32: what the script or the launch command
decides is `"auto"`, and both fill it in. Copy the folder into your project, then:

```sh
accelerate launch --config_file ds_configs/accelerate_z3.yaml \\
  --num_processes 8 --mixed_precision bf16 train.py
```

With `Trainer`, `--deepspeed ds_configs/ds_z3.json` (with `--bf16`) does the same. With zerofit,
`zerofit launch --preset z3 train.py` does, and also keeps the script's own clipping, finds a free port,
and rehearses on the CPU with `--cpu --num-processes 2`.

Bytes a parameter on each GPU are those of the model states for AdamW in 16 bit with fp32 master weights (2
weights, 2 gradients, 12 optimizer states), over N ranks; activations, buffers and the layer that is gathered
come on top. Bytes of RAM are a least: pinned buffers are rounded up to powers of two.

"""

_README_TAIL = """
Things to know:

- Plain accelerate fills `gradient_clipping: "auto"` with 1.0 and ignores `clip_grad_norm_` under DeepSpeed.
  Write the number you want; 0 is off. `zerofit launch` follows the script instead.
- `reduce_bucket_size` and its kin are numbers, as `"auto"` needs a model with `config.hidden_size`.
- Change `nvme_path` in `ds_z3_nvme.json` to a folder on a local NVMe disk, and raise `buffer_size` above
  the number of elements of the largest parameter (vocabulary x hidden size, most often).
- Explicit numbers in place of `"auto"`, for your own batch:
  `zerofit config --preset z3 --num-processes 8 --micro-batch-size 4 --global-batch-size 64`.
"""


def presets_readme(presets: Sequence[Preset]) -> str:
    """Return the README's text."""
    columns = ("preset", "strategy", "files", "bytes a parameter", "fits where", "costs", "never with")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rows += [_readme_row(preset) for preset in presets]
    return _README_HEAD + "\n".join(rows) + "\n" + _README_TAIL


def _readme_row(preset: Preset) -> str:
    files = ", ".join(f"[{name}]({name})" for name in (preset.deepspeed_file, preset.accelerate_file))
    cells = (
        f"`{preset.name}`",
        preset.title,
        files,
        preset.gpu_bytes_per_parameter,
        preset.fits,
        preset.costs,
        preset.not_with,
    )
    return f"| {' | '.join(cells)} |"


_RECIPE_PRESET = "z2"
"""The lowest stage that shards more than optimizer states; the recipes let the user name another."""
_NUM_NODES = 2
"""The fewest that show what several nodes need."""
_RANKS_PER_NODE = 8
"""ASSUMPTION: GPUs of one node, as in most servers for training."""


def shipped_files() -> dict[str, str]:
    """Return the text of each shipped file by its path below the repository's root."""
    files = {"ds_configs/README.md": presets_readme(PRESETS)}
    for preset in PRESETS:
        deepspeed_file = f"ds_configs/{preset.deepspeed_file}"
        files[deepspeed_file] = deepspeed_json(preset.strategy, trains=preset.trains)
        files[f"ds_configs/{preset.accelerate_file}"] = accelerate_yaml(
            preset.strategy, topology=None, deepspeed_file=deepspeed_file
        )
    files["launch/single_node.sh"] = single_node_script(preset=_RECIPE_PRESET)
    files["launch/multi_node.sh"] = multi_node_script(preset=_RECIPE_PRESET)
    sizes = {"num_nodes": _NUM_NODES, "ranks_per_node": _RANKS_PER_NODE}
    files["launch/slurm.sbatch"] = slurm_script(preset=_RECIPE_PRESET, **sizes)
    files["launch/kubernetes.yaml"] = kubernetes_yaml(preset=_RECIPE_PRESET, **sizes)
    return files


_NAME = "zerofit"
_PORT = 29500
_HEAD = """\
# Trains a script on a Kubernetes cluster: one pod a node. Written by `make presets`.
#
#   edit the image, the command's last line and the volumes, then: kubectl apply -f launch/kubernetes.yaml
#
# The image holds zerofit and the script; no operator is needed.
"""


def kubernetes_yaml(*, preset: str, num_nodes: int, ranks_per_node: int) -> str:
    """Return the recipe for a Kubernetes cluster."""
    import yaml

    documents = (_service(), _job(preset, num_nodes, ranks_per_node))
    return _HEAD + "---\n".join(yaml.safe_dump(document, sort_keys=False) for document in documents)


def _service() -> dict[str, Any]:
    """Return the headless service that gives each pod a name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _NAME},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods look for pod 0 before it is ready
            "selector": {"job-name": _NAME},
        },
    }


def _job(preset: str, num_nodes: int, ranks_per_node: int) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _NAME},
        "spec": {
            "completions": num_nodes,
            "parallelism": num_nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": _pod(preset, num_nodes, ranks_per_node)},
        },
    }


def _pod(preset: str, num_nodes: int, ranks_per_node: int) -> dict[str, Any]:
    container = {
        "name": "train",
        "image": "registry.example/zerofit:latest",
        # JOB_COMPLETION_INDEX is set by an indexed Job, and $(...) expanded by Kubernetes, not by a shell.
        "command": [
            *("zerofit", "launch", "--preset", preset),
            *("--num-machines", str(num_nodes), "--machine-rank", "$(JOB_COMPLETION_INDEX)"),
            *("--nproc-per-node", str(ranks_per_node)),
            *("--main-process-ip", f"{_NAME}-0.{_NAME}", "--main-process-port", str(_PORT)),
            "train.py",
        ],
        "resources": {"limits": {"nvidia.com/gpu": ranks_per_node}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "subdomain": _NAME,
        "restartPolicy": "Never",
        "containers": [container],
        # NCCL and DataLoader workers share memory; a container's default of 64 MiB is too little.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


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


_SINGLE_NODE = """\
#!/usr/bin/env bash
# Trains a script on the GPUs of this node, or rehearses on its CPU. Written by `make presets`.
#
#   launch/single_node.sh train.py ARGS
#   PRESET=z3-offload launch/single_node.sh train.py ARGS       # ds_configs/README.md lists the presets
#   launch/single_node.sh --cpu --num-processes 2 train.py ARGS  # flags of `zerofit launch` come first
set -euo pipefail
exec zerofit launch --preset "${PRESET:-@PRESET@}" "$@"
"""

_MULTI_NODE = """\
#!/usr/bin/env bash
# Trains a script on several nodes: start it on each of them. Written by `make presets`.
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/multi_node.sh train.py ARGS   # on node0
#   NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/multi_node.sh train.py ARGS   # on node1
#
# RANKS_PER_NODE (the node's GPUs where nvidia-smi lists them), MASTER_PORT and PRESET may be set too.
# Where a node's own name leads to 127.0.1.1, as on Debian, also export GLOO_SOCKET_IFNAME=eth0 and
# NCCL_SOCKET_IFNAME=eth0 with the interface that the nodes share.
set -euo pipefail
: "${NUM_NODES:?set the number of nodes}" "${NODE_RANK:?set the number of this node, from 0}"
: "${MASTER_ADDR:?set the address of node 0}"
RANKS_PER_NODE=${RANKS_PER_NODE:-$(nvidia-smi --list-gpus | wc -l)}
exec zerofit launch --preset "${PRESET:-@PRESET@}" \\
  --num-machines "$NUM_NODES" --machine-rank "$NODE_RANK" --nproc-per-node "$RANKS_PER_NODE" \\
  --main-process-ip "$MASTER_ADDR" --main-process-port "${MASTER_PORT:-29500}" "$@"
"""


def single_node_script(*, preset: str) -> str:
    """Return the recipe for one node."""
    return _SINGLE_NODE.replace("@PRESET@", preset)


def multi_node_script(*, preset: str) -> str:
    """Return the recipe for several nodes, started by hand or by a cluster's own tool."""
    return _MULTI_NODE.replace("@PRESET@", preset)
