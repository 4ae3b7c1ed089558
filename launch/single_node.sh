#!/usr/bin/env bash
# Trains a script on the GPUs of this node, or rehearses on its CPU.
#
#   launch/single_node.sh train.py ARGS
#   PRESET=z3-offload launch/single_node.sh train.py ARGS       # ds_configs/README.md lists the presets
#   launch/single_node.sh --cpu --num-processes 2 train.py ARGS  # flags of `zerofit launch` come first
set -euo pipefail
exec zerofit launch --preset "${PRESET:-z2}" "$@"
