#!/usr/bin/env bash
# On a machine with two NVIDIA GPUs that reach each other: what proves that a write lands no more, and how fast NIXL is.
#   bash bench/gpu/wheels.sh; bash bench/gpu/pair.sh [OUTPUT_FOLDER]     PYTHON=python3 (3.12), with numpy
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
SITE=$PWD/build/nixl-site
mkdir -p "$OUT_DIR/logs"
$PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" build/gpu-wheels/*.whl
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 NIXL_LOG_LEVEL=${NIXL_LOG_LEVEL:-WARN}

proof() { timeout "${LIMIT:-100}" $PYTHON bench/gpu/proofs.py --logs "$OUT_DIR/logs" --only "$1" >"$OUT_DIR/proof-$1.txt" 2>&1; }

{
  date -u '+%Y-%m-%d %H:%M UTC'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  nvidia-smi topo -m | head -4
  timeout 100 $PYTHON bench/gpu/rates.py --logs "$OUT_DIR/logs"
  # Beside each other: the more the engines have to do, the more a write can be late.
  proof transports & proof order & proof drained & proof released & proof killed &
  wait
  proof orphaned # alone: it takes all of a GPU's memory
  for name in transports order drained released killed orphaned; do cat "$OUT_DIR/proof-$name.txt"; done
} 2>&1 | tee "$OUT_DIR/gpu_proofs.txt"
