"""Clients of HTTP that are made by the hundred."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import httpx
import pytest


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> Iterator[None]:
    """Each client would read all that are trusted: 60 ms of a core, and most calls here make a client of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield
