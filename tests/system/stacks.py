"""A stack that must end well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from devices import DeviceStack

from kvferry.daemon.stack import Stack


@contextmanager
def running_stack() -> Iterator[Stack]:
    """Asserts in the end that every process that was not ended by the test ended with status 0."""
    with DeviceStack() as running:
        yield running
        ended_before = {process.name for process in running.processes if process.popen.poll() is not None}
        statuses = running.close()
    # A worker whose daemon is gone ends with an error, as it should.
    excused = ended_before | {f"{name}-worker" for name in ended_before}
    ended_badly = {name: status for name, status in statuses.items() if status != 0 and name not in excused}
    assert not ended_badly, f"processes ended badly: {ended_badly}"
