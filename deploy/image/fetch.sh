#!/usr/bin/env bash
# Fetches into wheels/ what the image (cpu, or cuda as argument) is built from: for Python 3.11 on x86_64, whatever Python runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
for part in build runtime $([ "${1:-cpu}" = cuda ] && echo cuda); do
  wanted=deploy/image/$part.txt
  if cmp -s "$wanted" "wheels/$part/fetched.txt"; then continue; fi
  rm -rf "wheels/$part"
  mkdir -p "wheels/$part"
  if nixl=$(sed -n 's/^kvferry-nixl==//p' "$wanted") && [ -n "$nixl" ]; then
    "$python" deploy/wheels/repack_nixl.py --version "$nixl" --python 3.11 --dest "wheels/$part"
  fi
  grep -v '^kvferry-nixl==' "$wanted" >"wheels/$part/listed.txt"
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.11 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --dest "wheels/$part" -r "wheels/$part/listed.txt"
  cp "$wanted" "wheels/$part/fetched.txt"
done
du -sh wheels/*
