#!/usr/bin/env bash
# Trains a script on several nodes: start it on each of them.
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
exec zerofit launch --preset "${PRESET:-z2}" \
  --num-machines "$NUM_NODES" --machine-rank "$NODE_RANK" --nproc-per-node "$RANKS_PER_NODE" \
  --main-process-ip "$MASTER_ADDR" --main-process-port "${MASTER_PORT:-29500}" "$@"
