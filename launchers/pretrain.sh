#!/usr/bin/env bash
# Pretrain with a preset of ds_configs/pretrain_*.json on this machine's devices; every further flag goes to
# finetune.pretrain:
#   bash launchers/pretrain.sh npu4_conservative [--train-data-path DATA]   4 NPUs; also npu4_standard, npu4_full
#   bash launchers/pretrain.sh gpu2_balanced                                2 GPUs; also gpu2_conservative, gpu2_aggressive
#   NPROC_PER_NODE=1 bash launchers/pretrain.sh npu4_conservative           the same training on one device
# The token files are made by: python -m finetune prepare --data TEXTS --output-dir runs/tokens
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
preset=${1:-} config=$here/ds_configs/pretrain_${1:-}.json
if [[ -z $preset || ! -f $config ]]; then
  echo "[ERROR] there is no preset '$preset'" >&2
  echo "  fix:   name one of $(cd "$here/ds_configs" && echo pretrain_*.json | sed 's/pretrain_//g; s/\.json//g')" >&2
  exit 2
fi
shift
named=${preset%%_*} # npu4, gpu2: the kind of device and how many
processes=${NPROC_PER_NODE:-${named//[^0-9]/}}
# Of the guide's conservative settings: small pieces, less fragmentation. What is exported already counts.
[[ $preset != npu4_conservative ]] || export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-max_split_size_mb:32}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600} # seconds to save after a SIGTERM
python=$(command -v python || command -v python3)
"$python" -c 'import importlib.util as u; exit(not u.find_spec("torch"))' || python=$here/.venv/bin/python
# --standalone: a port and a store of torchrun's choice, so several runs can share a machine.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" \
  -m finetune.pretrain --config "$config" "$@"
