"""The kept stub, package/kvferry/_core.pyi, is what the built module says of itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_kept_stub_is_the_modules_own() -> None:
    nanobind = pytest.importorskip("nanobind")
    pytest.importorskip("ruff", reason="ruff lays out the stub; it is not on this machine")
    pinned = re.search(r"^nanobind==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    if nanobind.__version__ != pinned[1]:
        pytest.skip(f"the kept stub was made with nanobind {pinned[1]}; another may lay it out otherwise")
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "csrc/bindings/stub.sh"), "--check"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
