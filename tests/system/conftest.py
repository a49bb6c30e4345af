"""Whole systems as processes; a failed test shows what they said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.daemon.cli.stack import Stack
from tests.support.stacks import running_stack


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
