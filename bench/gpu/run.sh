#!/usr/bin/env bash
# On a machine with NVIDIA GPUs: builds the core, runs the tests that need a GPU, checks memory accesses, measures; with two
# GPUs or more also what goes between them (pair.sh and system.sh, which can be called by themselves).
#   bash bench/gpu/wheels.sh; bash bench/gpu/run.sh [OUTPUT_FOLDER]
# PYTHON=python3, with torch, numpy, nanobind, cmake, pytest; ONLY="tests storm memcheck copies parts system pair"
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
ONLY=${ONLY:-tests storm memcheck copies parts system pair}
OUT_DIR=${1:-build/gpu}
source bench/gpu/build.sh
export PYTHON

failed=0
count=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
wanted() { [[ " $ONLY " == *" $1 "* ]] && echo "== $1"; }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if wanted tests; then
  $PYTHON -m pytest -q -p no:cacheprovider tests/csrc tests/transfer/host_tier/test_copy_plan.py --ignore=tests/csrc/test_gpu_storm.py --ignore=tests/csrc/test_gpu_dying_worker.py 2>&1 | tail -15 || failed=1
fi
if wanted storm; then
  STORM_OPERATIONS=${STORM_OPERATIONS:-100000} $PYTHON -m pytest -q -s -p no:cacheprovider tests/csrc/test_gpu_storm.py tests/csrc/test_gpu_dying_worker.py -m gpu 2>&1 | tee "$OUT_DIR/gpu_storm.txt" | tail -15 || failed=1
fi
if wanted memcheck; then
  if command -v compute-sanitizer >/dev/null; then
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 $PYTHON -m pytest -q -p no:cacheprovider tests/csrc -m gpu -k small 2>&1 | tee "$OUT_DIR/gpu_memcheck.txt" | tail -8 || failed=1
  else
    echo "no compute-sanitizer on this machine: memory accesses were not checked" | tee "$OUT_DIR/gpu_memcheck.txt"
  fi
fi
if wanted copies; then
  { $PYTHON bench/gpu/copies.py --pairs 31 && $PYTHON bench/gpu/rows.py; } 2>&1 | tee "$OUT_DIR/gpu_copies.txt" || failed=1
fi
if wanted parts; then
  $PYTHON bench/gpu/parts.py 2>&1 | tee "$OUT_DIR/gpu_parts.txt" || failed=1
fi
if wanted system; then
  bash bench/gpu/system.sh "$OUT_DIR" tests storms $([ "$count" -gt 1 ] && echo delta slots demo turns) || failed=1
fi
if [ "$count" -gt 1 ] && wanted pair; then
  ONLY="tests slots rates proofs" bash bench/gpu/pair.sh "$OUT_DIR" || failed=1
fi
exit $failed
