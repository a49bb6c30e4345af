"""The host tier: its rows as bytes, and copies that take their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE
from tests.simulation.clock import Clock, expect
from tests.simulation.memory import Access, Memory
from tests.simulation.parts import SimPoolMemory
from tests.simulation.prompts import GARBAGE, content


class SimTier:
    """The host rows, and copies to and from them that take their time; some fail, wholly or in part."""

    def __init__(self, clock: Clock, memory: Memory, rows: int, failing: float) -> None:
        self._clock, self._memory, self._failing = clock, memory, failing
        self._rows = [GARBAGE] * rows
        self.unverified = 0

    def row(self, row: int) -> bytes:
        return self._rows[row]

    def attach(self, memory: SimPoolMemory) -> None:
        self._memory = memory.memory

    def detach(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows[row] = GARBAGE

    def start(self, started: CopyStarted, done: Callable[[int, Sequence[int], int, float], None]) -> None:
        copy = started.copy
        restore = copy.kind == RESTORE
        what, state = ("a restore", PageState.RESTORING) if restore else ("a spill", PageState.SPILLING)
        access = Access(self._memory, what, copy.device, (state,), writes=restore)
        if not restore:
            self.forget(copy.host)
        self._clock.after(self._clock.between(0.0002, 0.01), self._copied, started, access, done)

    def _copied(
        self, started: CopyStarted, access: Access, done: Callable[[int, Sequence[int], int, float], None]
    ) -> None:
        copy, memory, counts = started.copy, self._memory, self._clock.counts
        access.end()
        restore = copy.kind == RESTORE
        failed: list[int] = []
        if self._clock.chance(self._failing):
            failed = self._clock.random.sample(copy.device, self._clock.random.randint(1, len(copy.device)))
            counts["restores that failed" if restore else "spills that failed"] += 1
        counts["restores" if restore else "spills"] += 1
        for i, (page, row) in enumerate(zip(copy.device, copy.host, strict=True)):
            want = content(copy.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES])
            source = self._rows[row] if restore else memory.read(page)
            expect(source == want, f"{memory.who}: {'row' if restore else 'page'} {row if restore else page} is wrong")
            data = GARBAGE if page in failed else source
            if restore:
                memory.write(page, data)
            else:
                self._rows[row] = data
        done(started.number, failed, 0, 0.001)
