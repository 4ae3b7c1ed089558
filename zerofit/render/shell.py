"""The recipes launch/single_node.sh and launch/multi_node.sh."""

from __future__ import annotations

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
