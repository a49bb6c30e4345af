"""vLLM's own router, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "0.1.17"


def installed(folder: Path) -> Path:
    """The program. Skips where the package index does not have it."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    words = [folder / "bin" / "python", "-m", "pip", "install", "-q", f"vllm-router=={VERSION}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.skip(f"no vllm-router {VERSION}: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "vllm-router"
