#!/usr/bin/env bash
# The same command on every node, with its own NODE_RANK; every further flag goes to finetune.sft:
#   NODE_RANK=0 MASTER_ADDR=192.168.1.100 bash launchers/multi_node.sh --config ds_configs/qwen32b_lora_zero3.json
# Also: NNODES (2), MASTER_PORT (29500; the same on all nodes, and free on the first), NPROC_PER_NODE (the visible
# devices), MAX_RESTARTS (3), KIND=pretrain, PYTHON. The log is in logs/. All of it: docs/guides/launching.md
set -euo pipefail

python=${PYTHON:-$(command -v python || command -v python3)}
"$python" -c 'import importlib.util as u; exit(not u.find_spec("torch"))' || python=$(dirname "$0")/../.venv/bin/python
exec "$python" -m finetune launch --nnodes "${NNODES:-2}" "${KIND:-sft}" "$@"
