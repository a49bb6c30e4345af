"""A stack of processes for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.daemon.cli.stack import Stack
from tests.support.stacks import running_stack


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack
