#!/usr/bin/env bash
# On a machine with one or two NVIDIA GPUs: builds the core, then whole daemons whose pools are on GPUs.
#   bash bench/gpu/wheels.sh                            on a machine with pip's index: wheels, into build/gpu-wheels
#   bash bench/gpu/system.sh [OUTPUT_FOLDER] [STEP...]  PYTHON=python3 with torch, transformers, nanobind, cmake
# STEP: tests; storms, the tests of tiers, transfers, faults and connectors on device pools (TEST_DEVICES; without it both GPUs, or the
# one that is there); delta, delta pages from GPU to GPU; slots, the same
# with two sizes of slots; demo; turns, multi-turn chats with decode-side reuse off and on
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT_DIR=${1:-build/gpu}
shift || true
STEPS=${*:-tests delta}
source bench/gpu/build.sh

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
count=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
DEVICES=${TEST_DEVICES:-$([ "$count" -gt 1 ] && echo cuda:0,cuda:1 || echo cuda:0)}
STORM_TESTS="tests/system/serving/test_tiers.py tests/system/serving/test_transfers.py tests/system/serving/test_admission.py tests/system/serving/test_failures.py"
STORM_TESTS+=" tests/faults/test_processes.py tests/faults/test_lost_workers.py tests/faults/test_aborts.py tests/faults/test_cycles.py"
STORM_TESTS+=" tests/connectors/worker_side"
# They import openai, msgspec and opentelemetry, which are not needed here: none of their tests has a GPU in it.
NO_GPU_TESTS="--ignore=tests/system/serving/test_front.py --ignore=tests/system/operating/test_kv_events.py --ignore=tests/system/operating/test_traces.py"
# Steps of run.sh.
STORMS_OF_A_POOL="--ignore=tests/csrc/test_gpu_storm.py --ignore=tests/csrc/test_gpu_dying_worker.py"
for step in $STEPS; do
  echo "== $step"
  case $step in
    tests) timeout 400 $PYTHON -m pytest -q -p no:cacheprovider -m gpu --continue-on-collection-errors --timeout=90 --durations=5 $NO_GPU_TESTS $STORMS_OF_A_POOL tests/system tests/transfer tests/csrc tests/connectors 2>&1 | tail -60 ;;
    delta)
      timeout 200 $PYTHON bench/gpu/delta.py 2>&1 | tee "$OUT_DIR/gpu_delta.txt"
      timeout 200 $PYTHON bench/gpu/delta.py --awake --direct off 2>&1 | tee -a "$OUT_DIR/gpu_delta.txt"
      ;;
    slots) # of the daemons: fewer and smaller ones
      for slots in "16 64MiB" "8 32MiB"; do
        timeout 100 $PYTHON bench/gpu/delta.py --awake --direct off --fragments "${FRAGMENTS:-8,64,2048}" --slots ${slots% *} --slot-bytes ${slots#* } 2>&1 | tee -a "$OUT_DIR/gpu_daemon_slots.txt"
      done
      ;;
    demo) timeout 200 $PYTHON -m kvferry demo --random-weights llama-1b --device "$DEVICES" --page-size 64 --pool-bytes 4GiB 2>&1 | tee "$OUT_DIR/gpu_demo.txt" ;;
    turns) timeout "${TURNS_SECONDS:-400}" $PYTHON bench/gpu/turns.py --devices "$DEVICES" ${TURNS:-} 2>&1 | tee "$OUT_DIR/gpu_turns.txt" ;;
    storms)
      # Several tests at a time where pytest-xdist is there.
      TEST_DEVICES=$DEVICES timeout "${STORMS_SECONDS:-280}" $PYTHON -m pytest -q -p no:cacheprovider \
        $($PYTHON -c 'import xdist; print("-n8")' 2>/dev/null) -m "not nightly" --timeout=120 --durations=5 \
        ${STORMS:-$STORM_TESTS} 2>&1 | tee "$OUT_DIR/gpu_storms_${DEVICES//[:,]/-}.txt" | tail -60
      ;;
    *) echo "unknown step $step" >&2; exit 2 ;;
  esac
done
