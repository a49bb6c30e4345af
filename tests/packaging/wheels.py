"""Commands that build and install wheels; a test is skipped where they find no package index."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_INDEX = ("No matching distribution found", "Could not find a version that satisfies", "Max retries exceeded")
LIMIT_S = 300


@contextlib.contextmanager
def building() -> Iterator[None]:
    """One build at a time: all have the build folder of pyproject.toml."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / ".building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str | Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    if done.returncode != 0:
        if any(sign in done.stderr for sign in NO_INDEX):
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
        pytest.fail(f"{command[:4]} exited {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout
