"""Lets these tests be imported as `tests.simulation`, as `python -m tests.simulation` has them."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The daemons of a simulation warn of every fault."""
    log = logging.getLogger("kvferry")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)
