#!/bin/bash
# Builds the extension under sanitizers and runs its tests: sanitize.sh address,undefined|thread [pytest options]
#
# The instrumented module is not installed: an environment of its own (build/sanitize-KIND/venv) has the same packages,
# and before them a folder `kvferry` made of links to the sources and to that module. The runtime must be in the process
# before Python, which is not instrumented: LD_PRELOAD. ASLR is off for thread, whose shadow memory has fixed places.
set -euo pipefail
cd "$(dirname "$0")/../.."
kinds=$1
shift
python=${PYTHON:-.venv/bin/python}
build=$PWD/build/sanitize-${kinds%%,*}
launcher=$(command -v ccache || true)

cmake -S . -B "$build/cmake" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVFERRY_SANITIZE="$kinds" \
  -DPython_EXECUTABLE="$($python -c 'import sys; print(sys.executable)')" \
  -Dnanobind_DIR="$($python -m nanobind --cmake_dir)" \
  ${launcher:+-DCMAKE_CXX_COMPILER_LAUNCHER=$launcher} >"$build.log" 2>&1 || { tail -30 "$build.log"; exit 1; }
cmake --build "$build/cmake" --parallel "${JOBS:-2}" >>"$build.log" 2>&1 || { tail -30 "$build.log"; exit 1; }

rm -rf "$build/overlay" && mkdir -p "$build/overlay/kvferry"
for each in */__init__.py; do # each folder of the root with an __init__.py is kvferry.<folder>
  ln -s "$PWD/${each%/__init__.py}" "$build/overlay/kvferry/"
done
ln -s "$PWD"/package/kvferry/*.py "$build/overlay/kvferry/"
ln -s "$build"/cmake/_core*.so "$build/overlay/kvferry/"
test -x "$build/venv/bin/python" || $python -m venv --without-pip "$build/venv"
{
  echo "$build/overlay"
  $python -c 'import sys; print("\n".join(path for path in sys.path if "site-packages" in path))'
} >"$build/venv/$($python -c 'import sys; print(f"lib/python3.{sys.version_info[1]}/site-packages")')/overlay.pth"

compiler=${CXX:-c++}
runtime() { $compiler -print-file-name="lib$1.so"; }
here=$PWD/tests/csrc
run=()
rm -f "$build"/report.*
trap 'cat "$build"/report.* 2>/dev/null || true' EXIT # pytest has taken the standard error away
case $kinds in
  thread)
    preload=$(runtime tsan)
    export TSAN_OPTIONS="suppressions=$here/thread.supp,halt_on_error=1,exitcode=66,report_signal_unsafe=0,log_path=$build/report"
    run=(setarch "$(uname -m)" --addr-no-randomize)
    tests=(tests/csrc/test_copy.py tests/csrc/test_host_pages.py tests/csrc/test_engine_memory.py
      tests/csrc/gpu/test_{memory,parts,rows,pitched,busy,refusals,backlog}.py tests/radix/test_digests.py
      tests/transfer/host_tier/test_copy_plan.py tests/transfer/geometry/test_layouts.py tests/transfer/host_tier/test_rows.py)
    ;;
  *)
    preload="$(runtime asan) $(runtime ubsan) $(runtime stdc++)"
    # No search for leaks: what CPython and its extensions keep until the end would hide what is ours.
    export ASAN_OPTIONS="detect_leaks=0,abort_on_error=0,exitcode=66,detect_stack_use_after_return=1,log_path=$build/report"
    export UBSAN_OPTIONS="print_stacktrace=1,halt_on_error=1,log_path=$build/report"
    tests=(tests/csrc tests/radix tests/transfer tests/regressions)
    ;;
esac
export PYTHONMALLOC=malloc # each object is an allocation that the runtime knows
echo "== $kinds: ${tests[*]}"
LD_PRELOAD="$preload" "${run[@]}" "$build/venv/bin/python" -c 'import kvferry._core as core; print("== the module:", core.__file__)'
LD_PRELOAD="$preload" "${run[@]}" "$build/venv/bin/python" -m pytest -q -m 'not nightly' -k 'not kept_kernels and not kept_stub' --timeout=900 -p no:cacheprovider "$@" \
  $(test $# -gt 0 && [[ $* == *tests/* ]] || echo "${tests[@]}")
