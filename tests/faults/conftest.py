"""Lets these tests import their helpers (storm, networks) by name: pytest's importlib mode leaves sys.path alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stacks import running_stack

from kvferry.daemon.stack import Stack

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack
