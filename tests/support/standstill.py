"""Processes that stand still while the clock goes on: this one by its clock alone, another one by SIGSTOP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest

from tests.support.engines import wait_until

StandStill = Callable[[float], None]


def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> StandStill:
    """What makes so many seconds pass at once for asyncio and whoever else asks `time`. In a callback of a loop it is
    as if the process had stood still there: nothing has happened, and every timer that was to expire has."""
    ahead, monotonic = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead[0])

    def stand_still(seconds: float) -> None:
        ahead[0] += seconds

    return stand_still


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def run_with_standstill(program: str, seconds: float, *words: str) -> subprocess.CompletedProcess[str]:
    """A program of Python that stops itself once, and is continued after so long; at most a minute."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            wait_until(lambda: is_stopped(process.pid), 30, "that it stops itself")
            time.sleep(seconds)
            os.kill(process.pid, signal.SIGCONT)
            said, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, said)
