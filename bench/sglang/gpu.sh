#!/usr/bin/env bash
# On a machine with two GPUs, Python 3.12 and torch for CUDA 13, in the repository's root: unpacks what pack.sh made,
# builds kvferry, runs the comparison and the tokens, and prints everything. OUT gets logs and figures.
#   bash bench/sglang/gpu.sh keep            only keeps the parts that this call brought
#   bash bench/sglang/gpu.sh all             the comparison with room, the half-sized pool, and the tokens
#   bash bench/sglang/gpu.sh compare FLAGS   see gpu_compare.py
#   bash bench/sglang/gpu.sh tokens FLAGS    see tokens.py
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} PACK=${PACK:-$PWD/build/sglang-pack}
export ROOT=${ROOT:-$HOME/sgl} OUT_DIR=${OUT:-$PWD/build/sglang-out}
export PACK
mkdir -p "$ROOT/parts" "$OUT_DIR"
cp -n "$PACK"/parts/* "$ROOT/parts/"
ls -l "$ROOT/parts"
[ "${1:-all}" = keep ] && exit 0

began=$(date +%s)
said() { echo "== $(($(date +%s) - began)) s: $*"; }
if [ ! -d "$ROOT/site/sglang" ]; then
  bash "$PACK/unpack.sh" "$ROOT/parts" "$ROOT" || exit 1
fi
said unpacked
source bench/gpu/build.sh || exit 1
$PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$PACK"/wheels/*.whl || exit 1
export PYTHONPATH=$SITE:$ROOT/site:$PWD/bench/sglang
# SGLang's servers see the folder site alone: kvferry, what it needs, and the entry point by which it is found.
for each in "$SITE"/*; do
  [ -e "$ROOT/site/$(basename "$each")" ] || ln -s "$each" "$ROOT/site/"
done
$PYTHON - "$ROOT/site" <<'PYTHON_END' || exit 1
import pathlib
import sys
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1]) / f"kvferry-{project['version']}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvferry\nVersion: {project['version']}\n")
group, points = "sglang.srt.plugins", project["entry-points"]["sglang.srt.plugins"]
(folder / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
PYTHON_END
said built
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

what=${1:-all}
shift || true
status=0
case $what in
  compare) $PYTHON -u bench/sglang/gpu_compare.py "$@" || status=$? ;;
  tokens) $PYTHON -u bench/sglang/tokens.py "$@" || status=$? ;;
  all)
    $PYTHON -u bench/sglang/gpu_compare.py || status=$?
    said compared
    $PYTHON -u bench/sglang/tokens.py || status=$?
    ;;
  *) echo "unknown word $what" && status=2 ;;
esac
said "over, status $status"
exit "$status"
