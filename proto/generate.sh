#!/usr/bin/env bash
# Generates the stubs beside the .proto files and docs/protocol.md, or with --check says whether the committed ones are fresh. Needs grpcio-tools==1.76.0.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -Ikvferry/proto=proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" proto/*.proto
if [ "${1:-}" = --check ]; then
  for made in "$out"/kvferry/proto/*; do
    cmp -s "$made" "proto/$(basename "$made")" || { echo "stale: proto/$(basename "$made"); run proto/generate.sh" >&2; exit 1; }
  done
  "$python" docs/make_protocol.py --check
else
  cp "$out"/kvferry/proto/* proto/
  "$python" docs/make_protocol.py
fi
