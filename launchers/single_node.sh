#!/usr/bin/env bash
# One machine, all its devices:  bash launchers/single_node.sh --config ds_configs/zero3.json [flags of finetune.sft]
# This is multi_node.sh with one node: NPROC_PER_NODE, MAX_RESTARTS and the log are explained there.
set -euo pipefail

# Port 0 is any free port, so several runs can share a machine.
NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 exec bash "$(dirname "${BASH_SOURCE[0]}")/multi_node.sh" "$@"
