#!/usr/bin/env bash
# The same command on every node, with its own NODE_RANK; every further flag goes to finetune.sft:
#   NODE_RANK=0 MASTER_ADDR=192.168.1.100 bash launchers/multi_node.sh --config ds_configs/qwen32b_lora_zero3.json
# Also: NNODES (2), MASTER_PORT (29500), NPROC_PER_NODE (the visible devices), MAX_RESTARTS (3). The log is in logs/.
set -euo pipefail

for name in NODE_RANK MASTER_ADDR; do
  [[ -n ${!name:-} ]] || { echo "[ERROR] $name is not set" >&2; missing=1; }
done
[[ -z ${missing:-} ]] || { echo "  fix:   set NODE_RANK to 0 on the first node, 1 on the next, ..., and MASTER_ADDR \
to the first node's address on all" >&2; exit 2; }
count_devices() {
  local visible=${ASCEND_RT_VISIBLE_DEVICES-${CUDA_VISIBLE_DEVICES-all}}
  if [[ $visible != all ]]; then awk -F, '{ print NF }' <<<"$visible"
  elif command -v npu-smi >/dev/null; then npu-smi info -m | awk '$3 ~ /^[0-9]+$/' | wc -l # chips with a logic id
  elif command -v nvidia-smi >/dev/null; then nvidia-smi -L | grep -c '^GPU '
  fi || true
}
processes=${NPROC_PER_NODE:-$(count_devices)} nodes=${NNODES:-2}
((processes > 0)) || processes=1
threads=$(($(getconf _NPROCESSORS_ONLN) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}    # torchrun would set 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600} # seconds to save after a SIGTERM
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torch 2.13: in a shared one, restarted workers find their dead peers
python=$(command -v python || command -v python3)
"$python" -c 'import importlib.util as u; exit(not u.find_spec("torch"))' || python=$(dirname "$0")/../.venv/bin/python
log="logs/$(date +%Y%m%d-%H%M%S)-node$NODE_RANK-$$.log"
mkdir -p logs && exec > >(trap '' INT TERM; exec tee -a "$log") 2>&1
echo "[INFO] node $NODE_RANK of $nodes, $processes process(es) on it, log in $log"
# Wrong settings and data are refused here, once, and not by every worker and restart.
RANK=0 WORLD_SIZE=$((nodes * processes)) "$python" -m finetune inspect --rows 0 "$@" >/dev/null
# c10d, not static rendezvous: when one node's workers restart, the others' do at once. It orders nodes by address and
# dials the first one's only, so "~", which sorts last, with the number keeps the others in order.
first=false address=$(printf '~%05d' "$NODE_RANK")
[[ $NODE_RANK != 0 ]] || first=true address=$MASTER_ADDR
exec "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$processes" \
  --max-restarts "${MAX_RESTARTS:-3}" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
  --rdzv-conf "is_host=$first" --local-addr "$address" -m finetune.sft "$@"
