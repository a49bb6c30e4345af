#!/usr/bin/env bash
# Fetches into wheels/ what an image (cpu, cuda, front, demo; vllm PYTHON_VERSION) is built from: for Python 3.11 on x86_64, or
# the one that is named, whatever Python runs this. TORCH_INDEX: an extra index of CPU builds of torch, for demo.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
variant=${1:-cpu}
version=${2:-3.11}
case "$variant" in
  cpu) parts=(build runtime) ;;
  cuda | front) parts=(build runtime "$variant") ;;
  demo) parts=(build runtime front demo model) ;;
  vllm) parts=(build runtime compile) ;;
  *) echo "there is no image $variant: cpu, cuda, front, demo or vllm" >&2; exit 2 ;;
esac
fetch() { # PART FOLDER
  local wanted=deploy/image/$1.txt folder=$2 nixl
  if cmp -s "$wanted" "$folder/fetched.txt"; then return; fi
  rm -rf "$folder"
  mkdir -p "$folder"
  nixl=$(sed -n 's/^kvferry-nixl==//p' "$wanted")
  if [ -n "$nixl" ]; then "$python" deploy/wheels/repack_nixl.py --version "$nixl" --python "$version" --dest "$folder"; fi
  grep -v '^kvferry-nixl==' "$wanted" >"$folder/listed.txt"
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --python-version "$version" \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --dest "$folder" -r "$folder/listed.txt"
  cp "$wanted" "$folder/fetched.txt"
}
for part in "${parts[@]}"; do
  if [ "$variant" = vllm ]; then fetch "$part" "wheels/vllm-$version/$part"; else fetch "$part" "wheels/$part"; fi
done
du -sh wheels/*
