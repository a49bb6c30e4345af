#!/bin/bash
# AIPerf's multi-turn profile against `kvferry front`: any OpenAI-compatible generator can drive it.
#
#   bash bench/aiperf.sh [flags of bench/aiperf_profile.py, for instance --url http://HOST:8000 --tokenizer FOLDER]
#
# AIPerf 0.13 goes into a virtual environment of its own (AIPERF_VENV, default build/aiperf): it pins other versions than
# kvferry does. PYTHON: the interpreter that has kvferry, default .venv/bin/python.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${AIPERF_VENV:-build/aiperf}"
python="${PYTHON:-.venv/bin/python}"
if ! [ -x "$venv/bin/aiperf" ]; then
    echo "== installing AIPerf 0.13 into $venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q 'aiperf>=0.13,<0.14'
fi
exec "$python" bench/aiperf_profile.py --aiperf "$venv/bin/aiperf" "$@"
