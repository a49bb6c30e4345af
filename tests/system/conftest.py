"""Whole systems as processes; a failed test shows what they said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.daemon.stack import Stack


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    stack = getattr(item, "funcargs", {}).get("stack")
    if report.when == "call" and report.failed and isinstance(stack, Stack):
        for process in stack.processes:
            report.sections.append((process.name, process.tail(40)))


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running
        ended_before = {process.name for process in running.processes if process.popen.poll() is not None}
        statuses = running.close()
    # A worker whose daemon is gone ends with an error, as it should.
    excused = ended_before | {f"{name}-worker" for name in ended_before}
    ended_badly = {name: status for name, status in statuses.items() if status != 0 and name not in excused}
    assert not ended_badly, f"processes ended badly: {ended_badly}"
