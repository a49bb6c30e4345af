"""The fake device's judge of orders: each rule with the order that it asks for, and without."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry._core import GpuCopyEngine, PinnedBuffer
from tests.csrc.gpu_orders import HOST, Orders

NBYTES = 64
NOT_READY = 600


class Device:
    """The driver's own calls, and one piece of memory."""

    def __init__(self, fake: ctypes.CDLL, library: str, orders: Orders) -> None:
        self._fake, self.library, self.orders = fake, library, orders
        self.page = self.allocate()
        self.kept: list[object] = []  # until the test ends

    def call(self, name: str, *arguments: int) -> int:
        return int(self._fake[name](*map(ctypes.c_uint64, arguments)))

    def _made(self, name: str, *arguments: int) -> int:
        made = ctypes.c_uint64()
        assert self.call(name, ctypes.addressof(made), *arguments) == 0
        return made.value

    def stream(self) -> int:
        return self._made("hipStreamCreateWithPriority", 1, 0)

    def event(self) -> int:
        return self._made("hipEventCreateWithFlags", 0)

    def allocate(self, nbytes: int = 4096) -> int:
        return self._made("hipMalloc", nbytes)

    def foreign(self, nbytes: int = 4096) -> int:
        """Memory of another process."""
        return int(self._fake.fake_foreign(nbytes))

    def write(self, stream: int, at: int = 0, nbytes: int = NBYTES) -> None:
        assert self.call("hipMemsetD8Async", self.page + at, 7, nbytes, stream) == 0

    def read(self, stream: int, at: int = 0, nbytes: int = NBYTES) -> None:
        assert self.call("hipMemcpyDtoDAsync", self.allocate(), self.page + at, nbytes, stream) == 0

    def record(self, stream: int) -> int:
        """The event."""
        event = self.event()
        assert self.call("hipEventRecord", event, stream) == 0
        return event

    def waits(self, stream: int, event: int) -> None:
        assert self.call("hipStreamWaitEvent", stream, event, 0) == 0

    def query(self, event: int) -> bool:
        status = self.call("hipEventQuery", event)
        assert status in (0, NOT_READY)
        return status == 0

    def elapsed(self, begin: int, end: int) -> bool:
        return self.call("hipEventElapsedTime", ctypes.addressof(ctypes.c_float()), begin, end) == 0


@pytest.fixture
def device(fake: ctypes.CDLL, library: str, orders: Orders) -> Iterator[Device]:
    made = Device(fake, library, orders)
    yield made
    orders.take()


# -- within this process: a rule is what it is asked to find where there is no order


def same_stream(device: Device, order: bool) -> str:
    first = device.stream()
    device.write(first)
    device.read(first if order else device.stream())
    return r"copy_on_device on stream \d+ reads 64 bytes at 0x\w+, which set_bytes on .* wrote: stream \d+ waits for"


def wait_of_a_stream(device: Device, order: bool) -> str:
    first, second = device.stream(), device.stream()
    device.write(first)
    event = device.record(first)
    if order:
        device.waits(second, event)
    device.write(second)
    return r"set_bytes on stream \d+ writes 64 bytes .*waits for no event behind this, and the host has not seen"


def an_event_behind_it(device: Device, order: bool) -> str:
    first, second = device.stream(), device.stream()
    early = device.record(first)
    device.write(first)
    device.waits(second, device.record(first) if order else early)
    device.write(second)
    return "waits for no event behind this"


def a_wait_after_the_record(device: Device, order: bool) -> str:
    first, second, event = device.stream(), device.stream(), device.event()
    device.write(first)
    if not order:
        device.waits(second, event)  # never recorded: no wait
    assert device.call("hipEventRecord", event, first) == 0
    if order:
        device.waits(second, event)
    device.write(second)
    return "waits for no event behind this"


def a_chain(device: Device, order: bool) -> str:
    streams = [device.stream() for _ in range(3)]
    device.write(streams[0])
    event = device.record(streams[0])
    if order:
        device.waits(streams[1], event)
    device.waits(streams[2], device.record(streams[1]))
    device.write(streams[2])
    return "waits for no event behind this"


def wait_of_the_host(device: Device, order: bool) -> str:
    first, second = device.stream(), device.stream()
    device.write(first)
    event = device.record(first)
    if order:
        assert device.call("hipEventSynchronize", event) == 0
    device.read(second)
    return "waits for no event behind this"


def wait_for_a_stream(device: Device, order: bool) -> str:
    first, second = device.stream(), device.stream()
    device.write(first)
    assert device.call("hipStreamSynchronize", first if order else second) == 0
    device.read(second)
    return "waits for no event behind this"


def a_query_that_succeeds(device: Device, order: bool) -> str:
    first, second = device.stream(), device.stream()
    device.orders.lag(2)
    device.write(first)
    event = device.record(first)
    assert [device.query(event) for _ in range(2)] == [False, False]
    if order:
        assert device.query(event)
    device.read(second)
    return "waits for no event behind this"


def a_time_that_is_known(device: Device, order: bool) -> str:
    first, second = device.stream(), device.stream()
    begin = device.record(first)
    device.write(first)
    end = device.record(first)
    if not order:
        device.orders.hold(first)
        device.write(first, 2 * NBYTES)
        end = device.record(first)
    assert device.elapsed(begin, end) == order
    device.read(second)
    return "waits for no event behind this"


def reads_beside_reads(device: Device, order: bool) -> str:
    streams = [device.stream() for _ in range(3)]
    for stream in streams:
        device.read(stream)
    if not order:
        device.write(streams[1])
    return r"set_bytes on stream \d+ writes 64 bytes .*, which copy_on_device on stream \d+ reads"


def neighbours(device: Device, order: bool) -> str:
    first, second = device.stream(), device.stream()
    device.write(first, NBYTES, NBYTES)
    device.write(second, 2 * NBYTES, NBYTES)
    device.write(second, 0, NBYTES if order else NBYTES + 1)
    return "writes 1 bytes at "


def a_stream_anew(device: Device, order: bool) -> str:
    first = device.stream()
    device.write(first)
    if order:
        device.call("hipEventSynchronize", device.record(first))
    device.call("hipStreamDestroy", first)  # which waits for nothing
    device.write(device.stream())
    return "waits for no event behind this"


def a_stream_anew_that_waits(device: Device, order: bool) -> str:
    """What one that is gone has waited for is not waited for by the next."""
    first, gone = device.stream(), device.stream()
    device.write(first)
    event = device.record(first)
    device.waits(gone, event)
    device.call("hipStreamDestroy", gone)
    second = device.stream()
    if order:
        device.waits(second, event)
    device.write(second)
    return "waits for no event behind this"


def parts_of_a_batch(device: Device, order: bool) -> str:
    """The driver may do them in any order."""
    targets, sources, sizes = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)(32, 32)
    for i in range(2):
        targets[i] = device.page + i * (32 if order else 31)
        sources[i] = device.page + 1024
    attributes, first, failed = (ctypes.c_int * 6)(1), ctypes.c_uint64(0), ctypes.c_uint64()
    places = [ctypes.addressof(array) for array in (targets, sources, sizes)]
    rest = [ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed), device.stream()]
    assert device.call("hipMemcpyBatchAsync", *places, 2, *rest) == 0
    return r"copy_batch on stream \d+ writes 1 bytes at 0x\w+ that it also uses otherwise: its parts are in no order"


RULES: list[Callable[[Device, bool], str]] = [
    *(same_stream, wait_of_a_stream, an_event_behind_it, a_wait_after_the_record, a_chain),
    *(wait_of_the_host, wait_for_a_stream, a_query_that_succeeds, a_time_that_is_known),
    *(reads_beside_reads, neighbours, a_stream_anew, a_stream_anew_that_waits, parts_of_a_batch),
]


# -- host memory, memory that goes, other processes


def a_row_that_may_be_read_early(device: Device, order: bool) -> str:
    """A batch's sources are read from its issue on: that its stream has a write before it does not help."""
    engine = GpuCopyEngine(0, device.library)
    rows = np.zeros(2 * NBYTES, np.uint8)
    at, row = device.page + np.array([0, 2 * NBYTES]), rows.ctypes.data + np.array([0, NBYTES])
    sizes = np.array([NBYTES, NBYTES])
    written = engine.copy_list_to_host(row, at, sizes, strategy="loop")
    if order:
        written.wait()
    engine.copy_list_from_host(at + 1024, row, sizes, strategy="batch").wait()
    return r"copy_batch on stream \d+ reads .*, which copy_to_host on .*: it may do so at any time from its issue on"


def a_row_that_is_read_in_order(device: Device, order: bool) -> str:
    engine = GpuCopyEngine(0, device.library)
    row = np.zeros(NBYTES, np.uint8)
    page, address, size = np.array([device.page]), np.array([row.ctypes.data]), np.array([NBYTES])
    engine.copy_list_to_host(address, page, size, strategy="loop")
    stream = engine.stream if order else engine.gather_stream
    engine.copy_list_from_host(page + 1024, address, size, stream, strategy="loop").wait()
    return "copy_to_device on .* reads .* which copy_to_host on .* wrote: .* waits for no event behind this"


def a_row_that_the_host_writes(device: Device, order: bool) -> str:
    engine = GpuCopyEngine(0, device.library)
    rows = np.zeros(2 * NBYTES, np.uint8)
    at, row = device.page + np.array([0, 2 * NBYTES]), rows.ctypes.data + np.array([0, NBYTES])
    device.orders.writes(HOST, rows.ctypes.data, rows.nbytes)
    copy = engine.copy_list_from_host(at, row, np.array([NBYTES, NBYTES]))
    if order:
        copy.wait()
    device.orders.writes(HOST, rows.ctypes.data + 5, 1)
    return "an access by the host writes 1 bytes .* which copy_batch on .* reads: the host has not seen the end of this"


def host_memory_that_is_let_go(device: Device, order: bool) -> str:
    engine = GpuCopyEngine(0, device.library)
    row = np.zeros(4096, np.uint8)
    pinned = PinnedBuffer(engine, row)
    ends = np.array([row.ctypes.data]), np.array([device.page]), np.array([NBYTES])
    copy = engine.copy_list_to_host(*ends, strategy="kernel")
    if order:
        copy.wait()
    del pinned
    return "host_unregister by the host ends .*, which copy_list_16 on stream .* wrote: the host has not seen the end"


def a_mapping_that_is_let_go(device: Device, order: bool) -> str:
    engine = GpuCopyEngine(0, device.library)
    address = device.foreign()
    mapping = engine.open_ipc(address.to_bytes(8, "little") + bytes([0x5A] * 56), 4096)
    copy = engine.zero_pages(engine.pages(np.array([address]), np.array([64]), 64, 8), np.array([3]))
    if order:
        copy.wait()
    mapping.close()
    return "ipc_close by the host ends 64 bytes .*, which zero_pages_16 on stream .* wrote"


def memory_that_another_process_uses(device: Device, order: bool) -> str:
    device.write(device.stream())  # that the driver waits for
    device.orders.writes("worker", device.page + 100, 10)
    if order:
        device.orders.told_by("worker")
    device.call("hipFree", device.page)
    return "mem_free by the host ends 10 bytes .* which an access by process 'worker' wrote: process 'worker' has"


def memory_anew(device: Device, order: bool) -> str:
    """What was done there before it was freed is forgotten: the driver has waited for it."""
    device.write(device.stream())
    if order:
        device.call("hipFree", device.page)
    device.orders.writes("worker", device.page, 1)
    return "process 'worker' was told nothing"


def pages_for_another_process(device: Device, order: bool) -> str:
    """They are cleared, and then told to it: behind the end of that, or not."""
    first = device.stream()
    device.write(first)
    event = device.record(first)
    if order:
        assert device.query(event)
    device.orders.tells("worker")
    device.orders.writes("worker", device.page, 1)
    return "an access by process 'worker' writes 1 .* which set_bytes on .* wrote: process 'worker' was told nothing by"


def another_process_is_told(device: Device, order: bool) -> str:
    first = device.stream()
    device.write(first)
    device.call("hipStreamSynchronize", first)
    if order:
        device.orders.tells("worker")
    device.orders.tells("somebody else")
    device.orders.reads("worker", device.page, NBYTES)
    return "an access by process 'worker' reads 64 .*: process 'worker' was told nothing by who knew"


def pages_of_another_process(device: Device, order: bool) -> str:
    device.orders.writes("worker", device.page, 4096)
    if order:
        device.orders.told_by("worker")
    device.read(device.stream())
    return "copy_on_device on stream .* reads .* by process 'worker' wrote: process 'worker' has said nothing since"


def two_other_processes(device: Device, order: bool) -> str:
    device.orders.writes("worker", device.page, 4096)
    device.orders.told_by("worker")
    if order:
        device.orders.tells("courier")
    device.orders.reads("courier", device.page, 10)
    return "an access by process 'courier' reads 10 bytes"


SHARED: list[Callable[[Device, bool], str]] = [
    *(a_row_that_may_be_read_early, a_row_that_is_read_in_order, a_row_that_the_host_writes),
    *(host_memory_that_is_let_go, a_mapping_that_is_let_go, memory_that_another_process_uses, memory_anew),
    *(pages_for_another_process, another_process_is_told, pages_of_another_process, two_other_processes),
]


@pytest.mark.parametrize("order", [True, False], ids=["in order", "in none"])
@pytest.mark.parametrize("rule", RULES + SHARED)
def test_rules(device: Device, rule: Callable[[Device, bool], str], order: bool) -> None:
    message = rule(device, order)
    found = device.orders.take()
    if order:
        assert found == []
    else:
        assert found
        assert all(re.search(message, line) for line in found)


def test_what_is_found_fails_a_test(device: Device) -> None:
    """Once for two operations, and in so many lines."""
    device.orders.check()
    first, second = device.stream(), device.stream()
    for at in (0, 100, 300):
        device.write(first, at)
    device.write(second, 0, 320)
    with pytest.raises(AssertionError, match=r"found:\nset_bytes on stream \d+ writes") as found:
        device.orders.check()
    assert str(found.value).count("set_bytes on") == 6
    device.orders.check()
    for _ in range(80):
        device.write(device.stream())
    assert len(device.orders.take()) == 50
