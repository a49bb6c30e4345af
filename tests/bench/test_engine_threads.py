"""CPU time of an engine core's threads, as bench/vllm/engine_threads.py reads it from the kernel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench.scripts import imported


@pytest.fixture(scope="module")
def threads() -> Iterator[ModuleType]:
    with imported("vllm", ("engine_threads", "cluster", "chat", "versions")) as modules:
        yield modules.engine_threads


def test_a_thread_has_the_time_that_it_computed(threads: ModuleType) -> None:
    go, done = threading.Event(), threading.Event()
    burnt: list[int] = []

    def burn() -> None:
        began = time.thread_time_ns()
        while time.thread_time_ns() - began < 3_000_000:
            pass
        burnt.append(time.thread_time_ns())
        done.set()
        go.wait(10)

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        assert done.wait(10)
        read = {thread.number: ms for thread, ms in threads.thread_ms(os.getpid()).items()}
        slack = 2.0 if Path("/proc/self/schedstat").exists() else 2 * threads.TICK_MS
        assert read[thread.native_id] == pytest.approx(burnt[0] / 1e6, abs=slack)
    finally:
        go.set()
        thread.join(10)


@pytest.mark.parametrize(("exact", "want"), [("1234567 5 6\n", 1.234567), ("0 0 0\n", None), (None, None)])
def test_where_the_kernel_counts_no_nanoseconds_there_are_ticks(
    threads: ModuleType, tmp_path: Path, exact: str | None, want: float | None
) -> None:
    if exact is not None:
        (tmp_path / "schedstat").write_text(exact)
    fields = ["S", *["0"] * 10, "30", "12", "0"]  # as behind the name of a stat: user's and system's ticks
    assert (threads.exact_ms(tmp_path) or threads.ticks_ms(fields)) == (want or 42 * threads.TICK_MS)
