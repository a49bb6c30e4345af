#!/usr/bin/env bash
# On a machine with NVIDIA GPUs and a vLLM that was packed for it (packed_vllm.sh): engines of several tensor-parallel ranks beside vLLM's
# NixlConnector, with Llama-70B's shape cut to LAYERS layers.
#   bash bench/gpu/ranks.sh [OUTPUT_FOLDER] [P:D...]   2:2 and 1:1; RANK_SYSTEMS="nixl blocks", DEVICES=cuda:0,cuda:1, COMPARE='more of gpu_compare's flags'
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
shift || true
source bench/gpu/build.sh
source bench/gpu/packed_vllm.sh
LAYERS=${LAYERS:-16}
export VLLM_MODEL=$HOME/llama-70b-$LAYERS VLLM_DEVICES=${DEVICES:-cuda:0,cuda:1}
$PYTHON - "$HOME/m8" "$VLLM_MODEL" "$LAYERS" <<'PYTHON_END'
import json
import shutil
import sys

base, folder, layers = sys.argv[1:]
shutil.copytree(base, folder, dirs_exist_ok=True)
with open(f"{folder}/config.json") as file:
    config = json.load(file)
config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": int(layers)}
with open(f"{folder}/config.json", "w") as file:
    json.dump(config, file)
PYTHON_END
for ranks in ${*:-2:2 1:1}; do
  timeout "${RANK_SECONDS:-280}" $PYTHON bench/vllm/gpu_compare.py run --ranks "$ranks" --systems ${RANK_SYSTEMS:-nixl blocks} --at-once 1 4 \
    --tokens-out 16 --visits 1 --requests "${REQUESTS:-40}" ${COMPARE:-} --output "$OUT_DIR/ranks.json" 2>&1 | tail -40
done
$PYTHON bench/vllm/gpu_compare.py table "$OUT_DIR/ranks.json" --output "$OUT_DIR/gpu_ranks.txt"
