#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds the core, runs the tests that need a GPU, checks memory accesses, measures.
#   bash bench/gpu/run.sh [OUTPUT_FOLDER]     PYTHON=python3, with torch, numpy, nanobind, cmake, pytest
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
source bench/gpu/build.sh

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
$PYTHON -m pytest -q -p no:cacheprovider tests/csrc tests/transfer/test_copy_plan.py 2>&1 | tail -15
if command -v compute-sanitizer >/dev/null; then
  compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 $PYTHON -m pytest -q -p no:cacheprovider tests/csrc -m gpu -k small 2>&1 | tail -6
fi
{ $PYTHON bench/gpu/copies.py --pairs 31; $PYTHON bench/gpu/rows.py; } 2>&1 | tee "$OUT_DIR/gpu_copies.txt"
$PYTHON bench/gpu/parts.py 2>&1 | tee "$OUT_DIR/gpu_parts.txt"
