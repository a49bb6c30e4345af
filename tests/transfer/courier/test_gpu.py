"""Couriers with slots on GPUs: real NIXL over CUDA IPC, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from kvferry import _core
from kvferry.transfer.courier.link import CourierConfig, CourierError, CourierLink
from kvferry.transfer.courier.messages import (
    Connected,
    CourierDied,
    CourierEvent,
    MessageError,
    Notification,
    PostDone,
)
from kvferry.transfer.protocol.slots import HEADER_BYTES, PartNotice

SLOT = 1 << 16
PORTS = (21600, 21663)
SECONDS = 60.0
POISON = b"\xa5" * 4096

T = TypeVar("T")


def gpus() -> int:
    try:
        return _core.gpu_device_count()
    except RuntimeError:
        return 0


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() == 0, reason="needs a CUDA device"),
]


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, 150))


class End:
    """A link, its slots' bytes, and what it said."""

    def __init__(self, **fields: Any) -> None:
        values: dict[str, Any] = {"slot_bytes": SLOT, "receive_slots": 4, "send_slots": 4, "port_range": PORTS}
        self.config = CourierConfig(**{**values, **fields})
        self.events: asyncio.Queue[CourierEvent] = asyncio.Queue()
        self.link: CourierLink

    async def start(self) -> None:
        self.link = await CourierLink.start(self.config, self.events.put_nowait, SECONDS)

    def connect(self, other: End) -> None:
        link, config = other.link, other.config
        self.link.connect(
            link.metadata, link.receive_address, config.receive_slots, config.slot_bytes, link.receive_ranks
        )

    async def next(self) -> CourierEvent:
        return await asyncio.wait_for(self.events.get(), SECONDS)

    def engine(self, rank: int) -> _core.GpuCopyEngine:
        return _core.GpuCopyEngine(self.config.devices[rank])

    def write(self, slot: int, data: bytes) -> None:
        """To a send slot."""
        for offset in range(0, len(data), 4096):
            piece = data[offset : offset + 4096]
            if self.config.devices:
                place = self.link.gpu_slots.send_slot(slot)
                put(self.engine(place.rank), place.address + offset, piece)
            else:
                self.link.host_slots.send_slot(slot)[offset : offset + len(piece)] = piece

    def poison(self, slot: int) -> None:
        for offset in range(0, SLOT, 4096):
            if self.config.devices:
                place = self.link.gpu_slots.receive_slot(slot)
                put(self.engine(place.rank), place.address + offset, POISON)
            else:
                self.link.host_slots.receive_slot(slot)[offset : offset + 4096] = POISON

    def read(self, slot: int) -> bytes:
        if not self.config.devices:
            return bytes(self.link.host_slots.receive_slot(slot))
        place = self.link.gpu_slots.receive_slot(slot)
        of = self.engine(place.rank)
        return b"".join(of.read(place.address + offset, 4096) for offset in range(0, SLOT, 4096))


def put(engine: _core.GpuCopyEngine, address: int, data: bytes) -> None:
    """They are there when it returns."""
    source = np.frombuffer(data, np.uint8)
    where = np.array([address]), np.array([source.ctypes.data]), np.array([len(source)])
    engine.copy_list_from_host(*where, strategy="loop").wait()


@contextlib.asynccontextmanager
async def ends(first: dict[str, Any], second: dict[str, Any]) -> AsyncIterator[tuple[End, End]]:
    pair = (End(**first), End(**second))
    try:
        await asyncio.gather(*(end.start() for end in pair))
        for end, other in (pair, pair[::-1]):
            end.connect(other)
        for end in pair:
            assert await end.next() == Connected()
        yield pair
    finally:
        for end in pair:
            if hasattr(end, "link"):
                await end.link.stop(SECONDS)


async def check_writes(receiver: End, sender: End) -> None:
    """Every send slot to another receive slot, whole and in part; neighbours stay as they are."""
    slots = receiver.config.receive_slots
    receiver.link.expect(1)
    for round_, nbytes in enumerate((SLOT, 5000, 5000, 5000, 64)):
        data = [os.urandom(nbytes) for _ in range(slots)]
        for slot in range(slots):
            receiver.poison(slot)
            sender.write(slot, data[slot])
        for slot in range(0, slots, 2):
            notice = PartNotice(epoch=1, transfer=slot, slot=slots - 1 - slot, generation=1)
            sender.link.post(round_ * slots + slot, slot, slots - 1 - slot, nbytes, notice.pack())
        for _ in range(0, slots, 2):
            event = await receiver.next()
            assert isinstance(event, Notification)
            slot = PartNotice.unpack(event.payload).transfer
            assert event.header == (data[slot][:HEADER_BYTES] if receiver.config.devices else b"")
            landed = receiver.read(slots - 1 - slot)
            assert landed == data[slot] + (POISON * (SLOT // 4096))[nbytes:]
        done = {await sender.next() for _ in range(0, slots, 2)}
        assert done == {PostDone(round_ * slots + slot) for slot in range(0, slots, 2)}
        for slot in range(1, slots, 2):
            assert receiver.read(slots - 1 - slot) == POISON * (SLOT // 4096)


LAST = gpus() - 1


@pytest.mark.parametrize(
    ("receiving", "sending"),
    [
        ((0,), (LAST,)),
        ((0, LAST), (LAST, 0)),
        ((0, 0), (LAST,)),
        ((0,), ()),
        ((), (0,)),
    ],
    ids=["one rank", "two ranks", "two ranks of one GPU", "host memory to GPU", "GPU to host memory"],
)
def test_bytes_before_notification_and_neighbours_intact(receiving: tuple[int, ...], sending: tuple[int, ...]) -> None:
    async def test() -> None:
        async with ends({"devices": receiving}, {"devices": sending}) as (receiver, sender):
            await check_writes(receiver, sender)
            await check_writes(sender, receiver)

    run(test())


def test_transports_that_take_no_gpu_memory() -> None:
    """NIXL refuses them wherever it sees a GPU, for host memory too."""
    with pytest.raises(CourierError, match=r"did not start.*Invalid UCX_TLS=tcp"):
        run(End(tls="tcp").start())


def test_slots_are_rank_major_and_checked() -> None:
    async def test() -> None:
        async with ends({"devices": (0, LAST)}, {"devices": (0,)}) as (two, _):
            places = [two.link.gpu_slots.receive_slot(slot) for slot in range(4)]
            assert [place.rank for place in places] == [0, 0, 1, 1]
            assert [place.device for place in places] == [0, 0, LAST, LAST]
            assert places[1].address - places[0].address == places[3].address - places[2].address == SLOT
            for bad in (-1, 4):
                with pytest.raises(MessageError, match="receive slot is"):
                    two.link.gpu_slots.receive_slot(bad)
            with pytest.raises(CourierError, match="on GPUs"):
                two.link.host_slots.receive_slot(0)

    run(test())


def test_a_device_that_is_not_there() -> None:
    end = End(devices=(gpus(),))
    with pytest.raises(CourierError, match=r"did not start.*Gpu"):
        run(end.start())


def test_the_memory_of_a_killed_courier_comes_back() -> None:
    of = _core.GpuCopyEngine(0)
    slot_bytes = 256 << 20
    big = {"slot_bytes": slot_bytes, "receive_slots": 1, "send_slots": 1, "devices": (0,)}

    async def test() -> Callable[[], int]:
        async with ends(big, big) as (receiver, sender):
            held, _ = of.device_memory_info()
            os.kill(receiver.link.pid, signal.SIGKILL)
            assert isinstance(await receiver.next(), CourierDied)
            put(of, receiver.link.gpu_slots.receive_slot(0).address, b"mapped still")
            await receiver.link.stop(SECONDS)
            with pytest.raises(CourierError, match="stopped"):
                receiver.link.gpu_slots.receive_slot(0)
            assert sender.link.pid
        return lambda: held

    held = run(test())()
    free, _ = of.device_memory_info()
    assert free - held >= 4 * slot_bytes
