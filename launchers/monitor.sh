#!/usr/bin/env bash
# Watch a run from a second terminal; q quits:
#   bash launchers/monitor.sh                                  the newest run in runs/
#   bash launchers/monitor.sh runs/zero3 --interval 3          a run
#   bash launchers/monitor.sh --log logs/20260101-120000-1.log --interval 3    a copy of a run's console
# The flags are those of: python -m finetune monitor --help
set -euo pipefail

python=${PYTHON:-$(command -v python || command -v python3)}
"$python" -c 'import importlib.util as u; exit(not u.find_spec("rich"))' || python=$(dirname "$0")/../.venv/bin/python
PYTHONPATH=$(cd "$(dirname "$0")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m finetune monitor "$@"
