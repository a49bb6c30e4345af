"""Every target on its seeds, on what is kept, and on some changes of both; and atheris itself, where there is one.

The long form is `make fuzz`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from random import Random

import pytest

from tests.fuzz.__main__ import MAX_BYTES, ROOT, TARGETS, seeds_of

CHANGED = {"courier_packets": 2000, "settings": 100, "host_file": 80, "questions": 25}


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_some_changes_of_them(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.{name}")
    seeds = seeds_of(name)
    for seed in seeds:
        target.one_input(seed)
    chance = Random(1)
    for number in range(CHANGED.get(name, 40)):
        data = chance.choice(seeds)
        for step in range(chance.randint(1, 4)):
            data = target.mutate(data, MAX_BYTES, number * 8 + step)
        try:
            target.one_input(data)
        except BaseException:
            print(f"{name} finds something in {data.hex()}")
            raise


needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="needs atheris (pip install 'kvferry[fuzz]', Python 3.11 to 3.13)",
)


@pytest.mark.nightly
@needs_atheris
def test_under_atheris_in_short() -> None:
    ended = under_atheris("courier_packets", "--runs=3000")
    assert "stat::number_of_executed_units" in ended


@needs_atheris
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_under_atheris() -> None:
    """Each target; a table."""
    print(under_atheris("all", f"--seconds={os.environ.get('FUZZ_SECONDS', '60')}"))


def under_atheris(name: str, *words: str) -> str:
    command = [sys.executable, "-m", "tests.fuzz", name, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr
