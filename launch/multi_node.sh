#!/usr/bin/env bash
# Trains a script on several nodes: start it on each of them.
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/multi_node.sh --plan plan.json train.py ARGS   # on node0
#   NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/multi_node.sh --plan plan.json train.py ARGS   # on node1
#
# `zerofit plan --num-machines 2 --gpus 8xA100-80G --output plan.json train.py ARGS` writes the plan. Without
# --plan as the first argument PRESET says the strategy (z2), and RANKS_PER_NODE the ranks (one for each GPU of
# the node).
# A node without a visible GPU ends with an error. MASTER_PORT may be set too.
# Where a node's own name leads to 127.0.1.1, as on Debian, also export GLOO_SOCKET_IFNAME=eth0 and
# NCCL_SOCKET_IFNAME=eth0 with the interface that the nodes share.
set -euo pipefail
: "${NUM_NODES:?set the number of nodes}" "${NODE_RANK:?set the number of this node, from 0}"
: "${MASTER_ADDR:?set the address of node 0}"
[[ ${1-} == --plan* ]] || set -- --preset "${PRESET:-z2}" --nproc-per-node "${RANKS_PER_NODE:-gpu}" "$@"
exec zerofit launch --num-machines "$NUM_NODES" --machine-rank "$NODE_RANK" \
  --main-process-ip "$MASTER_ADDR" --main-process-port "${MASTER_PORT:-29500}" "$@"
