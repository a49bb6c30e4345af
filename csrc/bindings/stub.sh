#!/usr/bin/env bash
# Writes package/kvferry/_core.pyi from what the built module says of itself, or with --check says whether the kept file is that.
# The same under each Python that kvferry has; another nanobind than constraints.txt's may lay it out otherwise.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
stub=package/kvferry/_core.pyi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m nanobind.stubgen -q -m kvferry._core -p csrc/bindings/stub.patterns -o "$out/raw.pyi"
{ echo "# Made from csrc/bindings: make stub"; cat "$out/raw.pyi"; } |
  "$python" -m ruff check -q --fix-only --stdin-filename "$stub" - >"$out/sorted.pyi"
"$python" -m ruff format -q --stdin-filename "$stub" - <"$out/sorted.pyi" >"$out/_core.pyi"
if [ "${1:-}" = --check ]; then
  diff "$stub" "$out/_core.pyi" >&2 || { echo "stale: $stub; run make stub" >&2; exit 1; }
else
  cp "$out/_core.pyi" "$stub"
fi
