"""Copies between the tiers: how many run at a time, and for how long the oldest has."""

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.sides.tiers import SideTiers
from kvferry.radix.tree import RESTORE, SPILL
from kvferry.transfer.host_tier.rows import AnonymousRows

ROWS, ROW_BYTES = 8, 4096


class SlowMemory:
    """Each copy lasts until it is let go."""

    def __init__(self, at_once: int) -> None:
        self.tier_copies = at_once
        self.shape = SimpleNamespace(row_bytes=ROW_BYTES)
        self.running: list[int] = []
        self.parts: list[list[int]] = []
        self.gates = {page: threading.Event() for page in range(ROWS)}

    def pinner(self) -> None: ...

    def attach_rows(self, rows: memoryview) -> None: ...

    def detach_rows(self) -> None: ...

    def spill(self, pages: NDArray[np.int64], rows: NDArray[np.int64], parts: Sequence[slice]) -> None:
        page = int(pages[0])
        self.parts += [rows[part].tolist() for part in parts]
        self.running.append(page)
        try:
            assert self.gates[page].wait(20)
        finally:
            self.running.remove(page)

    restore = spill


async def until(true: Any) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not in 10 s")


@pytest.mark.parametrize("kind", [SPILL, RESTORE])
@pytest.mark.parametrize("at_once", [1, 3])
def test_so_many_run_at_a_time_and_end_in_any_order(at_once: int, kind: Any) -> None:
    memory = SlowMemory(at_once)
    anything: Any = memory

    async def story() -> None:
        tier = HostTier(anything, AnonymousRows(ROWS, ROW_BYTES), ROWS, checksums=False)
        assert tier.oldest(time.monotonic()) == 0
        ended: list[int] = []
        for page in range(5):
            copy: Any = SimpleNamespace(
                kind=kind, device=[page], host=[page], digests=bytes(32), parents=bytes(32), outputs=b"\0"
            )
            tier.start(CopyStarted(page, bytes(32), copy), lambda number, *_: ended.append(number))
        await until(lambda: len(memory.running) == at_once)
        assert tier.oldest(time.monotonic()) == 0, "seen for the first time"
        await asyncio.sleep(0.1)
        assert sorted(memory.running) == list(range(at_once))
        assert 0.1 <= tier.oldest(time.monotonic()) < 10
        for page in (at_once - 1, *range(5)):  # the last of those that run is the first to end
            memory.gates[page].set()
            await until(lambda page=page: page in ended)
        assert sorted(ended) == list(range(5)) and ended[0] == at_once - 1
        assert tier.oldest(time.monotonic()) == 0
        await tier.close()

    asyncio.run(story())


@pytest.mark.parametrize("kind", [SPILL, RESTORE])
def test_the_parts_of_a_copy_are_begun_together(kind: Any) -> None:
    """Of rows that were pinned apart: a second part would wait for all that others have begun behind the first."""
    memory = SlowMemory(1)
    anything: Any = memory

    async def story() -> None:
        tier = HostTier(anything, AnonymousRows(ROWS, ROW_BYTES), ROWS, checksums=False)
        tier._there._step = 3
        copy: Any = SimpleNamespace(
            kind=kind, device=[0, 1, 2, 3], host=[1, 2, 3, 4], digests=bytes(128), parents=bytes(128), outputs=bytes(4)
        )
        ended = asyncio.Event()
        tier.start(CopyStarted(0, bytes(32), copy), lambda *_: ended.set())
        await until(lambda: memory.running)
        assert memory.parts == [[1, 2], [3, 4]]
        memory.gates[0].set()
        await asyncio.wait_for(ended.wait(), 20)
        await tier.close()

    asyncio.run(story())


def test_health_sees_them() -> None:
    memory: Any = SlowMemory(4)
    memory.late_copies = lambda now: {"others": 0.0}
    memory.workers = {}

    async def story() -> None:
        tier = HostTier(memory, AnonymousRows(ROWS, ROW_BYTES), ROWS, checksums=False)
        copy: Any = SimpleNamespace(
            kind=SPILL, device=[2], host=[1], digests=bytes(32), parents=bytes(32), outputs=b"\0"
        )
        ended = asyncio.Event()
        tier.start(CopyStarted(0, bytes(32), copy), lambda *_: ended.set())
        await until(lambda: memory.running)
        tiers: Any = SimpleNamespace(_memory=memory, _host=tier)
        assert SideTiers.late_copies(tiers, 70.0) == {"others": 0.0, "oldest copy between the tiers": 0.0}
        assert SideTiers.late_copies(tiers, 100.0) == {"others": 0.0, "oldest copy between the tiers": 30.0}
        tiers._host = None
        assert SideTiers.late_copies(tiers, 0.0) == {"others": 0.0}
        memory.gates[2].set()
        await asyncio.wait_for(ended.wait(), 20)
        await tier.close()

    asyncio.run(story())
