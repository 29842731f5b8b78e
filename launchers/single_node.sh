#!/usr/bin/env bash
# One machine, all its devices; every further flag goes to finetune.sft:
#   bash launchers/single_node.sh --config ds_configs/zero3.json
# Also: NPROC_PER_NODE (the visible devices), MAX_RESTARTS (3), MASTER_PORT (any free one), KIND=pretrain, PYTHON.
# The log is in logs/. What it does in full: python -m finetune launch --help, docs/guides/launching.md
set -euo pipefail

python=${PYTHON:-$(command -v python || command -v python3)}
"$python" -c 'import importlib.util as u; exit(not u.find_spec("torch"))' || python=$(dirname "$0")/../.venv/bin/python
exec "$python" -m finetune launch --nnodes 1 "${KIND:-sft}" "$@"
