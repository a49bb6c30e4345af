#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds the core, runs the tests that need a GPU, checks memory accesses, measures.
#   bash bench/gpu/run.sh [OUTPUT_FOLDER]     PYTHON=python3, with torch, numpy, nanobind, cmake, pytest
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
BUILD=build/gpu-core
SITE=build/gpu-site/kvferry
mkdir -p "$OUT_DIR" "$BUILD" "$SITE"

$PYTHON -m cmake --version >/dev/null 2>&1 && CMAKE="$PYTHON -m cmake" || CMAKE=cmake
$CMAKE -S . -B "$BUILD" -Dnanobind_DIR="$($PYTHON -m nanobind --cmake_dir)" -DPython_EXECUTABLE="$($PYTHON -c 'import sys; print(sys.executable)')" >"$OUT_DIR/build.log"
$CMAKE --build "$BUILD" -j "$(nproc)" >>"$OUT_DIR/build.log" 2>&1 || { tail -30 "$OUT_DIR/build.log"; exit 1; }
for folder in proto radix transfer; do ln -sfn "$PWD/$folder" "$SITE/$folder"; done
ln -sf "$PWD"/package/kvferry/* "$SITE/"
ln -sf "$PWD/$BUILD"/_core*.so "$SITE/"
export PYTHONPATH=$PWD/build/gpu-site PYTHONUNBUFFERED=1

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
$PYTHON -m pytest -q -p no:cacheprovider tests/csrc tests/transfer/test_copy_plan.py 2>&1 | tail -15
if command -v compute-sanitizer >/dev/null; then
  compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 $PYTHON -m pytest -q -p no:cacheprovider tests/csrc -m gpu -k small 2>&1 | tail -6
fi
$PYTHON bench/gpu/copies.py 2>&1 | tee "$OUT_DIR/gpu_copies.txt"
$PYTHON bench/gpu/parts.py 2>&1 | tee "$OUT_DIR/gpu_parts.txt"
