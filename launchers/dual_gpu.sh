#!/usr/bin/env bash
# Pretrain with a preset for 2 GPUs; every further flag goes to finetune.pretrain:
#   bash launchers/dual_gpu.sh conservative    depth 12, 8 x 1536 tokens a device; the guide expects 15-16 GB on each
#   bash launchers/dual_gpu.sh balanced        depth 16, 12 x 2048; 20-22 GB
#   bash launchers/dual_gpu.sh aggressive      depth 20, 14 x 3072; 28-30 GB
#   bash launchers/dual_gpu.sh balanced --num_iterations=50 --eval_every=25     any setting of the preset, otherwise
#   NPROC_PER_NODE=1 bash launchers/dual_gpu.sh balanced     the same training on one GPU, with more accumulation
# The token files are made by: python -m finetune prepare --data TEXTS --output-dir runs/tokens
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  conservative | balanced | aggressive) preset=$1 && shift ;;
  *)
    echo "[ERROR] '${1:-}' is no preset for 2 GPUs" >&2
    echo "  fix:   name one: conservative, balanced or aggressive" >&2
    exit 2
    ;;
esac
export KIND=pretrain NPROC_PER_NODE=${NPROC_PER_NODE:-2}
exec bash "$here/launchers/single_node.sh" --config "$here/ds_configs/pretrain_gpu2_$preset.json" "$@"
