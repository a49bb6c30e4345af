#!/usr/bin/env bash
# Compiles copy_kernels.cu to PTX and writes it as C++ to standard output: bash csrc/cuda/kernels/make.sh > csrc/cuda/generated/kernels_ptx.cpp
# The PTX is kept with the sources, so that neither a build nor a daemon needs a CUDA toolkit. It is marked as the oldest
# version that has what the kernels use (parameters' addresses: 7.7), so that the drivers from CUDA 11.7 on take it; hints of
# later versions go, and ptxas says whether anything else of them is left. Names of what is local to the source hold a hash
# of where it lies, which is made 0: the same source is the same PTX everywhere.
set -euo pipefail
cd "$(dirname "$0")"
made=$(mktemp)
trap 'rm -f "$made"' EXIT
nvcc -std=c++17 -O3 -arch=compute_75 -I ../.. -ptx -o - copy_kernels.cu |
  sed -e 's/\(_INTERNAL_\|_GLOBAL__N__\)[0-9a-f]\{8\}_/\100000000_/g' -e '/^\/\//d' -e 's/[ \t]*\/\/.*$//' -e 's/^\.version .*/.version 7.7/' \
    -e '/\.pragma "used_bytes_mask /d' -e '/^$/d' >"$made"
ptxas -arch=sm_80 -o /dev/null "$made" >&2
echo '// Made by csrc/cuda/kernels/make.sh from copy_kernels.cu. Do not edit.'
echo '#include "cuda/kernels/copy_kernels.h"'
echo
echo 'namespace kvferry {'
echo
echo 'const char kCopyKernels[] = R"ptx('
cat "$made"
echo ')ptx";'
echo
echo '}  // namespace kvferry'
