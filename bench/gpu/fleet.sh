#!/usr/bin/env bash
# On a machine with several NVIDIA GPUs and a vLLM that was packed for it (packed_vllm.sh): a prefill engine on each GPU but the last, which
# has decode's (DECODES=2: the last two); bench/vllm/fleet.py says what is measured.
#   bash bench/gpu/fleet.sh [OUTPUT_FOLDER] [more of fleet.py's flags]   build/gpu; SYSTEMS="nixl-cold nixl kvferry kvferry-back",
#     DEVICES=cuda:0,cuda:1,..., SYSTEM_SECONDS=1500: a system that takes longer is ended, and has no row
# Without that pack, in an environment with vLLM 0.26 and kvferry, on GPUs of 80 GB (the defaults are for 141 GB):
#   VLLM_PYTHON=$(which python) VLLM_MODEL=FOLDER VLLM_DEVICES=cuda:0,cuda:1,cuda:2,cuda:3 python bench/vllm/fleet.py run \
#     --output build/fleet.json --prefixes 4 --at-once 44 --decode-tokens 425984 --prefill-tokens 425984
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
shift || true
source bench/gpu/build.sh
source bench/gpu/packed_vllm.sh
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | sed 's/^/cuda:/' | paste -sd,)
export VLLM_DEVICES=${DEVICES:-$gpus}
decodes=${DECODES:-1}
prefills=$(($(tr , '\n' <<<"$VLLM_DEVICES" | grep -c .) - decodes))
for number in $(seq 0 7); do
  for role in prefill decode; do
    [ -d "$VLLM_CACHES/$role-$number" ] || cp -a "$VLLM_CACHES/$role" "$VLLM_CACHES/$role-$number"
  done
done
# What a GPU's memory holds beside weights, graphs and daemons.
if [ "$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0)" -gt 130000 ]; then
  room=(--decode-tokens 819200 --prefill-tokens 819200 --prefixes 10 --at-once 56)
else
  room=(--decode-tokens 425984 --prefill-tokens 425984 --prefixes 4 --at-once 44)
fi
for system in ${SYSTEMS:-nixl-cold nixl kvferry kvferry-back}; do
  timeout "${SYSTEM_SECONDS:-1500}" $PYTHON bench/vllm/fleet.py run --systems "$system" --prefills "$prefills" --decodes "$decodes" "${room[@]}" "$@" \
    --output "$OUT_DIR/fleet.json" 2>&1 | tail -40
done
$PYTHON bench/vllm/fleet.py table "$OUT_DIR/fleet.json" --output "$OUT_DIR/gpu_fleet.txt"
