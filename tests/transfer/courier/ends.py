"""Pairs of couriers with real NIXL, in real processes, over loopback, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from kvferry.transfer.courier.link import CourierConfig, CourierLink
from kvferry.transfer.courier.messages import Connected, CourierEvent

SLOT = 1 << 16
PORTS = (21100, 21163)
START_SECONDS = 60.0
SECONDS = 30.0  # for what should take milliseconds, on a busy machine

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, 150))


class End:
    """A link and what it said."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[CourierEvent] = asyncio.Queue()
        self.handler: Callable[[CourierEvent], None] = self.events.put_nowait
        self.link: CourierLink

    async def start(self, **fields: Any) -> End:
        values: dict[str, Any] = {"slot_bytes": SLOT, "receive_slots": 2, "send_slots": 2, "port_range": PORTS}
        config = CourierConfig(**{**values, **fields})
        self.link = await CourierLink.start(config, lambda event: self.handler(event), START_SECONDS)
        self.config = config
        return self

    def connect(self, other: End) -> None:
        self.link.connect(
            other.link.metadata, other.link.receive_address, other.config.receive_slots, other.config.slot_bytes
        )

    async def next(self) -> CourierEvent:
        return await asyncio.wait_for(self.events.get(), SECONDS)


@contextlib.asynccontextmanager
async def ends(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> AsyncIterator[list[End]]:
    """Two connected couriers; neither is left behind."""
    pair = [End(), End()]
    try:
        for end, fields in zip(pair, (first, second), strict=True):
            await end.start(**(fields or {}))
        for end, other in (pair, reversed(pair)):
            end.connect(other)
        for end in pair:
            assert await end.next() == Connected()
        yield pair
    finally:
        for end in pair:
            if hasattr(end, "link"):
                await end.link.stop(SECONDS)
                assert not alive(end.link.pid)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def open_files() -> set[str]:
    """Slots and sockets; a link's file is its name."""
    found: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(path)
            if name.startswith(("/memfd", "socket:")):
                found.add(f"{path.name} {name}")
    return found
