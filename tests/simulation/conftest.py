"""Lets these tests be imported as `tests.simulation`, as `python -m tests.simulation` has them."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The daemons of a simulation warn of every fault."""
    log = logging.getLogger("kvferry")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)
