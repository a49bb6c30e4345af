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
BUILD=build/gpu-core
SITE=$PWD/build/gpu-site
mkdir -p "$OUT_DIR" "$BUILD" "$SITE/kvferry"

$PYTHON -m cmake --version >/dev/null 2>&1 && CMAKE="$PYTHON -m cmake" || CMAKE=cmake
$CMAKE -S . -B "$BUILD" -Dnanobind_DIR="$($PYTHON -m nanobind --cmake_dir)" -DPython_EXECUTABLE="$($PYTHON -c 'import sys; print(sys.executable)')" >"$OUT_DIR/build.log"
$CMAKE --build "$BUILD" -j "$(nproc)" >>"$OUT_DIR/build.log" 2>&1 || { tail -30 "$OUT_DIR/build.log"; exit 1; }
for folder in proto radix transfer daemon workers loadgen; do ln -sfn "$PWD/$folder" "$SITE/kvferry/$folder"; done
ln -sf "$PWD"/package/kvferry/* "$SITE/kvferry/"
ln -sf "$PWD/$BUILD"/_core*.so "$SITE/kvferry/"
if compgen -G "build/gpu-wheels/*.whl" >/dev/null; then
  $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" build/gpu-wheels/*.whl
fi
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 NIXL_LOG_LEVEL=${NIXL_LOG_LEVEL:-WARN} HF_HUB_OFFLINE=1

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
