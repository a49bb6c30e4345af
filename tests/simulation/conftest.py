"""Keeps the daemons of a simulation silent: they warn of every fault."""

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
