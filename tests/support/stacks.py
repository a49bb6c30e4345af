"""A stack that must end well, and what a test starts on it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import SystemSpec
from tests.support.devices import DeviceStack

POOL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SmallSystem(SystemSpec):
    """A system for a test's few requests: a daemon writes all of its pool before it serves."""

    decode_pool_bytes: int = POOL_BYTES
    prefill_pool_bytes: int = POOL_BYTES


def shm_dir_of(stack: Stack) -> str:
    """A name for a folder of shared memory of this stack's own; whoever uses it makes it."""
    return os.path.join("/dev/shm", os.path.basename(stack.folder))


@contextmanager
def running_stack() -> Iterator[Stack]:
    """Asserts in the end that every process that was not ended by the test ended with status 0."""
    with DeviceStack() as running:
        shared = shm_dir_of(running)
        try:
            yield running
        except BaseException:
            running.close()
            shutil.rmtree(shared, ignore_errors=True)
            raise
        ended_before = {process.name for process in running.processes if process.popen.poll() is not None}
        starting = {process.name for process in running.processes if "ready: " not in process.tail(1 << 20)}
        statuses = running.close()
        left = os.listdir(shared) if os.path.isdir(shared) else []
        shutil.rmtree(shared, ignore_errors=True)
    assert not left, f"shared memory was left: {left}"
    # A worker whose daemon is gone ends with an error, as it should; one that was starting, by the signal itself.
    excused = ended_before | {f"{name}-worker" for name in ended_before}
    excused |= {name for name in starting if statuses[name] == -signal.SIGTERM}
    ended_badly = {name: status for name, status in statuses.items() if status != 0 and name not in excused}
    assert not ended_badly, f"processes ended badly: {ended_badly}"
