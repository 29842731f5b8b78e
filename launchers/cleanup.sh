#!/usr/bin/env bash
# What runs left behind on this machine: processes whose launcher is gone, unfinished checkpoints, shared memory, locks.
# Only what a run of this package recorded, proved by start time, command and owner. On each node by itself:
#   bash launchers/cleanup.sh [RUN]          lists; changes nothing
#   bash launchers/cleanup.sh [RUN] --yes    ends and removes what is listed
# The flags are those of: python -m finetune clean --help
set -euo pipefail

python=${PYTHON:-$(command -v python || command -v python3)}
"$python" -c 'import importlib.util as u; exit(not u.find_spec("psutil"))' || python=$(dirname "$0")/../.venv/bin/python
PYTHONPATH=$(cd "$(dirname "$0")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m finetune clean "$@"
