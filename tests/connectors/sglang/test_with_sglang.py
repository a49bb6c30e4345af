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
SECONDS = 480.0
SHORT = ["check_interfaces.py", "check_pair.py"]
ALONE = ["check_ranks.py"]  # it forks before there are threads
ALL = sorted(path.name for path in FOLDER.glob("check_*.py") if path.name not in ALONE)
CASES = [(VERSIONS[0], SHORT)]
REST = [file for file in ALL if file not in SHORT]
NIGHTLY = [(VERSIONS[0], REST), (VERSIONS[0], ALONE), *((version, ALL) for version in VERSIONS[1:])]


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    ("version", "files"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_with_the_classes_of(version: str, files: list[str]) -> None:
    if unpacked(version) is None:
        pytest.skip(f"SGLang {version} is not unpacked: make sglang-wheels")
    words = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["-p", "no:logging"]  # it walks all loggers at each test, while an engine's threads make some
    words += ["-o", "python_files=check_*.py", *(str(FOLDER / file) for file in files)]
    environment = {**os.environ, "SGLANG_VERSION": version}
    done = subprocess.run(
        words, env=environment, cwd=ROOT, timeout=SECONDS, check=False, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
