#!/usr/bin/env bash
# Pretrain with a preset for 4 NPUs; every further flag goes to finetune.pretrain:
#   bash launchers/npu_4.sh conservative [--train-data-path DATA] [--device_batch_size=1]     also: standard, full
#   NPROC_PER_NODE=1 bash launchers/npu_4.sh conservative      the same training on one NPU, with more accumulation
# The token files are made by: python -m finetune prepare --data TEXTS --output-dir runs/tokens
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  conservative | standard | full) preset=$1 && shift ;;
  *)
    echo "[ERROR] '${1:-}' is no preset for 4 NPUs" >&2
    echo "  fix:   name one: conservative, standard or full" >&2
    exit 2
    ;;
esac
# Of the guide's conservative settings: small pieces, less fragmentation. What is exported already counts.
[[ $preset != conservative ]] || export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-max_split_size_mb:32}
export KIND=pretrain NPROC_PER_NODE=${NPROC_PER_NODE:-4}
exec bash "$here/launchers/single_node.sh" --config "$here/ds_configs/pretrain_npu4_$preset.json" "$@"
