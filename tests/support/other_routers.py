"""Routers of others, each in a folder of its own. They skip where it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VLLM_ROUTER = "0.1.17"
DYNAMO = "1.6.1"
DYNAMO_OF_VLLM_026 = "1.4.2"
REDIS = "6.4.0"  # which Dynamo's front end imports


def vllm_router(folder: Path) -> Path:
    """The program of vLLM's own router."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install([str(folder / "bin" / "python"), "-m", "pip"], [f"vllm-router=={VLLM_ROUTER}"])
    return folder / "bin" / "vllm-router"


def dynamo(folder: Path, version: str = DYNAMO) -> Path:
    """The folder with Dynamo's packages, for an interpreter that has all else."""
    packages = [f"ai-dynamo=={version}", f"ai-dynamo-runtime=={version}", f"redis=={REDIS}"]
    install([sys.executable, "-m", "pip"], ["--no-deps", "--target", str(folder), *packages])
    return folder


def production_stack() -> Path:
    """The program of production-stack's router, which no package index has: PRODUCTION_STACK_ROUTER."""
    named = os.environ.get("PRODUCTION_STACK_ROUTER", "")
    if not os.path.exists(named):
        pytest.skip("no production-stack: PRODUCTION_STACK_ROUTER names no program (pip install of its checkout)")
    return Path(named)


def install(pip: list[str], words: list[str]) -> None:
    done = subprocess.run([*pip, "install", "-q", *words], capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.skip(f"no {words[-1]}: {done.stderr.strip().splitlines()[-1]}")
