#!/usr/bin/env bash
# All GPUs of one host, 2, 4 or 8: what many ranks and a fleet of servers do with as many as there are.
#   bash bench/gpu_host.sh OUTPUT_FOLDER [STEP...]    PLAN=1 prints the calls of scripts of bench/gpu, and makes none
# lanes   one session over all ranks: its bytes a second, the sum of the links (lanes.py)
# P:D     ranks of Qwen3-32B's shape: TTFT, hand-off and its parts, GPU memory and processors, NixlConnector in the same call (ranks.sh)
# fleet   prefill and decode servers of the 8B shape, one a GPU, under chats that return to any prefill server (fleet.sh): 6 + 2 on 8
#         GPUs, 2 + 2 on 4, 1 + 1 on 2 (DECODES=1: 3 + 1 on 4)
# half    the same on half of the GPUs, under half of the chats; not on 2
# Without steps: all of them, some 40 minutes on 4 GPUs. GPUS=N, of those that are there. SHAPE, LAYERS, RANK_SYSTEMS, AT_ONCE, REQUESTS
# and RANK_SECONDS as for ranks.sh: without LAYERS as many as fit for every pair. SYSTEMS, as for fleet.sh, and SECONDS_EACH of one.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT_DIR=${1:?bash bench/gpu_host.sh OUTPUT_FOLDER [STEP...]}
shift
export PYTHON=${PYTHON:-python3}
gpus=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)}
case $gpus in
  2) pairs="2:2 1:2 2:1 1:1" decodes=1 chats=32 steps="lanes $pairs fleet" ;;
  4) pairs="4:4 2:4 4:2 1:1" decodes=2 chats=64 steps="lanes $pairs fleet half" ;;
  8) pairs="4:4 2:4 4:2 1:1" decodes=2 chats=96 steps="lanes $pairs fleet half" ;;
  *) echo "there are $gpus GPUs; it must be 2, 4 or 8: GPUS=2 takes the first two" >&2; exit 2 ;;
esac
decodes=${DECODES:-$decodes}
for step in "$@"; do
  case $step in
    half) [ "$gpus" -gt 2 ] || { echo "half of 2 GPUs is one: no server has a peer there" >&2; exit 2; } ;;
    lanes | fleet | [1-8]:[1-8]) ;;
    *) echo "$step is no step; it must be lanes, fleet, half or ranks as in 4:2" >&2; exit 2 ;;
  esac
done
chat=(--prefixes 16 --prefix 8192 --own 1024 --output-tokens 128 --turns 4 --seconds "${SECONDS_EACH:-80}")

call() { if [ -n "${PLAN:-}" ]; then printf '%q ' "$@"; echo; else env "$@"; fi; }
first() { seq -s, -f 'cuda:%g' 0 $(($1 - 1)); } # devices

[ -n "${PLAN:-}" ] || source bench/gpu/build.sh
for step in ${*:-$steps}; do
  echo "== $step"
  case $step in
    lanes) call "$PYTHON" bench/gpu/lanes.py --devices "$(first "$gpus")" --pairs $pairs --output "$OUT_DIR/gpu_lanes.txt" ;;
    *:*)
      call DEVICES="$(first "$gpus")" SHAPE="${SHAPE:-qwen3-32b}" LAYERS="${LAYERS:-0}" FIT="$pairs" \
        bash bench/gpu/ranks.sh "$OUT_DIR" "$step"
      ;;
    fleet)
      call DEVICES="$(first "$gpus")" DECODES=$decodes SYSTEMS="${SYSTEMS:-nixl kvferry}" bash bench/gpu/fleet.sh "$OUT_DIR" "${chat[@]}" --at-once $chats
      ;;
    half)
      call DEVICES="$(first $((gpus / 2)))" DECODES=$(((decodes + 1) / 2)) SYSTEMS="${SYSTEMS:-nixl kvferry}" \
        bash bench/gpu/fleet.sh "$OUT_DIR" "${chat[@]}" --at-once $((chats / 2))
      ;;
  esac
done
