#!/usr/bin/env bash
# On a machine with one or two NVIDIA GPUs: builds the core, then whole daemons whose pools are on GPUs: tests, delta pages.
#   bash bench/gpu/wheels.sh                            on a machine with pip's index: NIXL's wheels, into build/gpu-wheels
#   bash bench/gpu/system.sh [OUTPUT_FOLDER] [STEP...]  STEP: tests, delta; PYTHON=python3 with torch, transformers, nanobind, cmake
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
shift || true
STEPS=${*:-tests delta}
source bench/gpu/build.sh

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for step in $STEPS; do
  echo "== $step"
  case $step in
    tests) timeout 280 $PYTHON -m pytest -q -p no:cacheprovider -m gpu --timeout=90 tests/system/test_gpu.py tests/transfer/test_courier_gpu.py 2>&1 | tail -60 ;;
    delta)
      timeout 200 $PYTHON bench/gpu/delta.py --awake 2>&1 | tee "$OUT_DIR/gpu_delta.txt"
      timeout 200 $PYTHON bench/gpu/delta.py --fragments 8,64,2048 2>&1 | tee -a "$OUT_DIR/gpu_delta.txt"
      ;;
    *) echo "unknown step $step" >&2; exit 2 ;;
  esac
done
