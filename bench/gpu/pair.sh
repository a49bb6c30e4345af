#!/usr/bin/env bash
# On a machine with two NVIDIA GPUs that reach each other: the couriers' tests that need GPUs, how fast parts and NIXL's
# writes are, and what proves that a write lands no more.
#   bash bench/gpu/wheels.sh; bash bench/gpu/pair.sh [OUTPUT_FOLDER]
# PYTHON=python3 (3.12), with numpy, nanobind, cmake, pytest; ONLY="tests slots rates proofs"
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
ONLY=${ONLY:-tests slots rates proofs}
OUT_DIR=${1:-build/gpu}
mkdir -p "$OUT_DIR/logs"
source bench/gpu/build.sh

failed=0
wanted() { [[ " $ONLY " == *" $1 "* ]]; }
machine() {
  date -u '+%Y-%m-%d %H:%M UTC'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  nvidia-smi topo -m | grep '^GPU'
}
proof() { timeout 100 $PYTHON bench/gpu/proofs.py --logs "$OUT_DIR/logs" --only "$1" >"$OUT_DIR/logs/$1.txt" 2>&1; }

if wanted tests; then
  timeout 200 $PYTHON -m pytest -q -p no:cacheprovider tests/transfer/courier/test_gpu.py 2>&1 | tee "$OUT_DIR/courier_tests.txt" | tail -15
fi
if wanted slots; then
  { machine; timeout 100 $PYTHON bench/gpu/slots.py; } 2>&1 | tee "$OUT_DIR/gpu_slots.txt"
fi
if wanted rates; then
  { machine; timeout 100 $PYTHON bench/gpu/rates.py --logs "$OUT_DIR/logs"; } 2>&1 | tee "$OUT_DIR/gpu_rates.txt"
fi
if wanted proofs; then
  # Beside each other: the more the GPUs have to do, the more a write can be late.
  running=()
  for name in transports order drained released killed unlocked; do
    proof "$name" &
    running+=($!)
  done
  for each in "${running[@]}"; do wait "$each" || failed=1; done
  proof orphaned || failed=1 # alone: it takes all of a GPU's memory
  { machine; for name in transports order drained released killed unlocked orphaned; do cat "$OUT_DIR/logs/$name.txt"; done; } 2>&1 | tee "$OUT_DIR/gpu_proofs.txt"
fi
exit $failed
