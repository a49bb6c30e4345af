#!/usr/bin/env bash
# Makes a folder of wheels for a GPU machine without a package index, that has torch, transformers and what they bring:
# kvferry-nixl, and what daemons, workers and tests need besides.
#   bash bench/gpu/wheels.sh [FOLDER]     build/gpu-wheels; PYTHON=python3, PYTHON_VERSION=3.12, NIXL_VERSION=1.5.1
# There: python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
NIXL_VERSION=${NIXL_VERSION:-1.5.1}
OTHERS="grpcio-health-checking==1.76.0 grpcio-reflection==1.76.0 pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.7.0
  typing-inspection==0.4.2 fastapi==0.121.0 starlette==0.49.3 uvicorn==0.38.0 annotated-doc==0.0.3
  pytest-timeout==2.4.0 cryptography==46.0.3 cffi==2.0.0 pycparser==2.23"
FOLDER=${1:-build/gpu-wheels}
mkdir -p "$FOLDER"

platforms=()
for tag in manylinux_2_39 manylinux_2_35 manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_17 manylinux2014; do
  platforms+=(--platform "${tag}_x86_64")
done
$PYTHON -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$PYTHON_VERSION" \
  "${platforms[@]}" -d "$FOLDER" $OTHERS
$PYTHON deploy/wheels/repack_nixl.py --version "$NIXL_VERSION" --python "$PYTHON_VERSION" --dest "$FOLDER"
du -sh "$FOLDER"
