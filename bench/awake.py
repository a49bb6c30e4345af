"""Processors of a virtual machine that are kept from being halted while a benchmark runs: see delta.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextlib.contextmanager
def awake() -> Iterator[str]:
    """Half of the processors for this thread and the processes that it starts, kept from being halted; says so."""
    before = os.sched_getaffinity(0)
    taken = set(sorted(before)[: max(1, len(before) // 2)])
    with contextlib.ExitStack() as ended:
        groups = ended.enter_context(without_autogroup())
        os.sched_setaffinity(0, taken)
        ended.callback(os.sched_setaffinity, 0, before)
        for processor in taken:
            ended.callback(halt, spinner(processor))
        yield f"{len(taken)} of {len(before)} processors, kept from being halted{groups}"


@contextlib.contextmanager
def without_autogroup() -> Iterator[str]:
    try:
        before = AUTOGROUP.read_text()
        AUTOGROUP.write_text(before)  # whether it can be
    except OSError as error:
        yield f" (autogroup is as it was: {error.strerror})"
        return
    try:
        AUTOGROUP.write_text("0")
        yield ""
    finally:
        AUTOGROUP.write_text(before)


def spinner(processor: int) -> subprocess.Popen[bytes]:
    """A process that takes what nobody else wants of a processor, until this one ends."""
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    spin = f"while os.getppid() == {os.getpid()}:\n    for _ in range(10**6): pass"
    code = f"import os\n{idle}\nos.sched_setaffinity(0, {{{processor}}})\n{spin}"
    return subprocess.Popen([sys.executable, "-c", code])


def halt(spinning: subprocess.Popen[bytes]) -> None:
    if spinning.poll() is not None:
        print(f"a process that was to spin has ended with status {spinning.returncode}", file=sys.stderr)
    spinning.kill()
    spinning.wait()
