"""The backend with SGLang's own classes, of each version in a process of its own: `make sglang-wheels` fetches them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.sglang.sglang_on_cpu import VERSIONS, unpacked

FOLDER = Path(__file__).parent / "on_cpu"
ROOT = Path(__file__).parents[3]
SECONDS = 300.0
INTERFACES = "check_interfaces.py"  # of later versions each run sees this
CASES = [
    pytest.param(
        version, path.name, marks=[] if version == VERSIONS[0] or path.name == INTERFACES else [pytest.mark.nightly]
    )
    for version in VERSIONS
    for path in sorted(FOLDER.glob("check_*.py"))
]


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("version", "file"), CASES)
def test_with_the_classes_of(version: str, file: str) -> None:
    if unpacked(version) is None:
        pytest.skip(f"SGLang {version} is not unpacked: make sglang-wheels")
    words = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["-o", "python_files=check_*.py", str(FOLDER / file)]
    environment = {**os.environ, "SGLANG_VERSION": version}
    done = subprocess.run(
        words, env=environment, cwd=ROOT, timeout=SECONDS, check=False, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
