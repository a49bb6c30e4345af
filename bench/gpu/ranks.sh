#!/usr/bin/env bash
# On a machine with NVIDIA GPUs and a vLLM that was packed for it (packed_vllm.sh): engines of several tensor-parallel ranks beside vLLM's
# NixlConnector, with a model's shape without weights.
#   bash bench/gpu/ranks.sh [OUTPUT_FOLDER] [P:D...]   2:2 and 1:1; where the GPUs are fewer than P + D some have a rank of both
# SHAPE=llama-70b|qwen3-32b   LAYERS=16: 0 are as many as fit for every pair of FIT="P:D ...", those that are measured
# RANK_SYSTEMS="nixl blocks"  DEVICES=cuda:0,cuda:1    COMPARE='more of gpu_compare's flags'    RANK_SECONDS=280, of a system
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
shift || true
source bench/gpu/build.sh
source bench/gpu/packed_vllm.sh
SHAPE=${SHAPE:-llama-70b}
export VLLM_DEVICES=${DEVICES:-cuda:0,cuda:1}
gib=$(($(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0) / 1024 - 1))
VLLM_MODEL=$($PYTHON bench/model_shapes.py "$SHAPE" "$HOME/m8" "$HOME/$SHAPE" --pairs ${FIT:-${*:-2:2 1:1}} --layers "${LAYERS:-16}" \
  --gpus "$(tr , '\n' <<<"$VLLM_DEVICES" | grep -c .)" --gpu-gib "$gib") || exit 2
export VLLM_MODEL
for ranks in ${*:-2:2 1:1}; do
  # Ranks of unlike numbers share heads only where these are outermost in a block.
  [ "${ranks%:*}" = "${ranks#*:}" ] && layout=() || layout=(VLLM_KV_CACHE_LAYOUT=HND)
  for system in ${RANK_SYSTEMS:-nixl blocks}; do
    env "${layout[@]}" timeout "${RANK_SECONDS:-280}" $PYTHON bench/vllm/gpu_compare.py run --ranks "$ranks" --systems "$system" \
      --at-once ${AT_ONCE:-1 4} --tokens-out 16 --visits 1 --requests "${REQUESTS:-40}" ${COMPARE:-} --output "$OUT_DIR/ranks.json" 2>&1 | tail -40
  done
done
$PYTHON bench/vllm/gpu_compare.py table "$OUT_DIR/ranks.json" --output "$OUT_DIR/gpu_ranks.txt"
tar -cJf "$OUT_DIR/caches-ranks.tar.xz" -C "$HOME" vllm-caches # in the pack they spare the next machine the compiling
