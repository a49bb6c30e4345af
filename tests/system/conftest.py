"""Whole systems as processes; a failed test shows what they said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stacks import running_stack

from kvferry.daemon.stack import Stack

# For tiny_models: pytest's importlib mode leaves sys.path alone.
sys.path.append(str(Path(__file__).parents[1] / "workers"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when != "call" or not report.failed:
        return
    for value in getattr(item, "funcargs", {}).values():
        stack = value if isinstance(value, Stack) else getattr(value, "stack", None)
        if isinstance(stack, Stack):
            for process in stack.processes:
                report.sections.append((process.name, process.tail(40)))


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack
