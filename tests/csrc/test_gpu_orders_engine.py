"""Operations of an engine, as the fake device's judge of orders knows them; and ends of copies that come late."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import pytest

from kvferry._core import GpuCopy, GpuCopyEngine, GpuError, GpuWaiter, PinnedBuffer
from kvferry.transfer.host_tier.copy_plan import Strategy
from tests.csrc.gpu_orders import Orders

FRAGMENT, PAGES = 256, 8
NOT_SUPPORTED = 801


class World:
    """Pages of two fragments, rows, a slot: a copy is of two of the pages."""

    def __init__(self, library: str, api: Literal["cuda", "hip"] = "cuda") -> None:
        engine = self.engine = GpuCopyEngine(0, library, api)
        self.memory = engine.allocate(2 * PAGES * FRAGMENT + 64)
        self.slot = engine.allocate(8 * FRAGMENT)
        bases = self.memory.address + 32 + np.arange(2) * PAGES * FRAGMENT
        self.pages = engine.pages(bases, np.full(2, FRAGMENT), FRAGMENT, PAGES)
        self.rows = np.zeros((6, 2 * FRAGMENT + 32), np.uint8)
        self.pinned = PinnedBuffer(engine, self.rows)
        ids, row_ids = np.array([2, 5]), np.array([1, 3])
        self.places = {
            "pages": [int(base + page * FRAGMENT) for base in bases for page in ids],
            "rows": [self.rows[row].ctypes.data + i * FRAGMENT for row in row_ids for i in range(2)],
            "slot": [self.slot.address + 32 + i * FRAGMENT for i in range(4)],
        }
        copy = (self.pages, ids, self.rows, self.rows.strides[0], row_ids)
        part = (self.pages, ids, 0, 4 * FRAGMENT, self.slot.address + 32)
        on_device, on_host, sizes = *map(np.array, (self.places["pages"], self.places["rows"])), np.full(4, FRAGMENT)
        self.issues: dict[str, Callable[..., GpuCopy]] = {
            "spill": lambda how: engine.copy_pages_to_host(*copy, strategy=how),
            "restore": lambda how: engine.copy_pages_from_host(*copy, strategy=how),
            "list to host": lambda how: engine.copy_list_to_host(on_host, on_device, sizes, strategy=how),
            "list from host": lambda how: engine.copy_list_from_host(on_device, on_host, sizes, strategy=how),
            "gather": lambda: engine.gather_part(*part),
            "gather and add up": lambda: engine.gather_part_summed(*part),
            "scatter": lambda: engine.scatter_part(*part),
            "scatter and add up": lambda: engine.scatter_part_summed(*part),
            "add up": lambda: engine.add_up(part[-1], part[-2]),
            "clear": lambda: engine.zero_pages(self.pages, ids),
            "clear the ends": lambda: engine.zero_page_from(self.pages, 2, 100),
            "clear another": lambda: engine.zero_pages(self.pages, np.array([7])),
        }
        self.many = engine.pages(np.array([self.memory.address]), np.array([1]), 1, 2 * PAGES * FRAGMENT)

    def others_have_the_pages(self, orders: Orders) -> None:
        orders.tells("a worker")
        orders.writes("a worker", self.memory.address, len(self.memory))
        orders.told_by("a worker")


class Touching(NamedTuple):
    what: str
    how: str  # its strategy, if it has one
    reads: dict[str, str]  # where, and by which call
    writes: dict[str, str]
    without: tuple[str, ...] = ()  # what the driver does not support
    api: Literal["cuda", "hip"] = "cuda"


TO_HOST = {"batch": "copy_batch", "loop": "copy_to_host", "kernel": "copy_pages_16", "pitched": "copy_pitched_batch"}
FROM_HOST = {**TO_HOST, "loop": "copy_to_device"}
LISTS = {"batch": "copy_batch", "kernel": "copy_list_16"}
BATCHES, COPIES = ("module_load",), ("module_load", "copy_batch")

OPERATIONS = [
    *(Touching("spill", how, {"pages": call}, {"rows": call}) for how, call in TO_HOST.items()),
    *(Touching("restore", how, {"rows": call}, {"pages": call}) for how, call in FROM_HOST.items()),
    Touching("spill", "staged", {"pages": "copy_pages_16"}, {"rows": "copy_batch"}),
    Touching("restore", "staged", {"rows": "copy_batch"}, {"pages": "copy_pages_16"}),
    Touching("spill", "pitched", {"pages": "copy_pitched"}, {"rows": "copy_pitched"}, api="hip"),
    Touching("restore", "pitched", {"rows": "copy_pitched"}, {"pages": "copy_pitched"}, api="hip"),
    *(Touching("list to host", how, {"pages": call}, {"rows": call}) for how, call in LISTS.items()),
    *(Touching("list from host", how, {"rows": call}, {"pages": call}) for how, call in LISTS.items()),
    Touching("gather", "", {"pages": "copy_part_16"}, {"slot": "copy_part_16"}),
    Touching("gather", "", {"pages": "copy_batch"}, {"slot": "copy_batch"}, BATCHES),
    Touching("gather", "", {"pages": "copy_on_device"}, {"slot": "copy_on_device"}, COPIES),
    Touching("gather and add up", "", {"pages": "copy_part_summed_16"}, {"slot": "copy_part_summed_16"}),
    Touching("scatter", "", {"slot": "copy_part_16"}, {"pages": "copy_part_16"}),
    Touching("scatter", "", {"slot": "copy_batch"}, {"pages": "copy_batch"}, BATCHES),
    Touching("scatter and add up", "", {"slot": "copy_part_summed_16"}, {"pages": "copy_part_summed_16"}),
    Touching("add up", "", {"slot": "sum_part"}, {}),
    Touching("clear", "", {}, {"pages": "zero_pages_16"}),
    Touching("clear", "", {}, {"pages": "set_bytes"}, BATCHES),
]


@pytest.mark.parametrize("case", OPERATIONS, ids=lambda case: " ".join((case.what, case.how, *case.without, case.api)))
def test_what_an_operation_reads_and_writes(orders: Orders, fake: ctypes.CDLL, library: str, case: Touching) -> None:
    """To its first and last byte, and no byte more: a stranger would be in order with the others."""
    for call in case.without:
        fake.fake_answer(call.encode(), NOT_SUPPORTED)
    world = World(library, case.api)
    copy = world.issues[case.what](*filter(None, [case.how]))
    for where, call in (case.reads | case.writes).items():
        for begin in world.places[where]:
            for at in (begin, begin + FRAGMENT - 1):
                orders.reads("a stranger", at, 1)
                found = orders.take()
                assert len(found) == (where in case.writes)
                orders.writes("a stranger", at, 1)
                (found,) = orders.take()
                assert f"which {call} on stream" in found
    for begin in world.places["pages"]:
        for at in (begin - 1, begin + FRAGMENT):
            orders.writes("a stranger", at, 1)
    for where in world.places.keys() - case.reads.keys() - case.writes.keys():
        orders.writes("a stranger", world.places[where][0], 4 * FRAGMENT)
    assert orders.take() == []
    copy.wait()


def test_the_end_of_a_page_alone_is_cleared(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    world = World(library)
    copy = world.issues["clear the ends"]()
    for begin in world.places["pages"][::2]:
        orders.reads("a stranger", begin, 100)
        assert orders.take() == []
        orders.reads("a stranger", begin + 100, 1)
        orders.reads("a stranger", begin + FRAGMENT - 1, 1)
        assert len(orders.take()) == 2
    copy.wait()


# -- what an engine orders


@pytest.mark.parametrize("strategy", ["batch", "loop", "kernel", "staged", "pitched"])
def test_copies_of_pages_are_ordered_on_the_callers_stream(
    orders: Orders, fake: ctypes.CDLL, library: str, strategy: Strategy
) -> None:
    """Behind what the stream was given before, and before what it is given then: also where others do a part of it."""
    orders.hold()  # so that a pitched copy follows another, and goes in part by fragments
    fragment, pages = 8 << 10, 8
    engine = GpuCopyEngine(0, library, buffer_bytes=4 * fragment, buffers=2, small_bytes=2 * fragment)
    memory, stream, ids = engine.allocate(2 * pages * fragment), engine.gather_stream, np.arange(pages)
    layout = engine.pages(memory.address + np.arange(2) * pages * fragment, np.full(2, fragment), fragment, pages)
    rows = np.zeros((2, pages, 2 * fragment), np.uint8)
    pinned = PinnedBuffer(engine, rows)
    for _ in range(3):
        engine.zero_pages(layout, ids, stream)
        spill = engine.copy_pages_to_host(layout, ids, rows[0], 2 * fragment, ids, stream, strategy)
        engine.zero_pages(layout, ids, stream)
        restore = engine.copy_pages_from_host(layout, ids, rows[1], 2 * fragment, ids, stream, strategy)
    assert spill.strategy == restore.strategy == strategy
    last = engine.zero_pages(layout, ids, stream)
    last.wait()
    del pinned


def test_a_copy_that_fails_halfway_is_over(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    """Who is told of no copy gives the pages to others."""
    world = World(library)
    fake.fake_answer(b"copy_batch", 700)
    with pytest.raises(GpuError, match="batch of copies"):
        world.issues["spill"]("staged")  # it was gathered
    world.others_have_the_pages(orders)
    many = np.arange(1000)  # for two launches
    for issue in (
        lambda: world.engine.zero_pages(world.many, many),
        lambda: world.engine.gather_part(world.many, many, 0, 1000, world.slot.address),
    ):
        fake.fake_answer(b"launches_left", 1)
        with pytest.raises(GpuError, match="kernel"):
            issue()
        world.others_have_the_pages(orders)


def test_a_restore_that_fails_halfway_is_over(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    """What came first was scattered on a stream that is not the caller's."""
    world = World(library)
    engine = GpuCopyEngine(0, library, buffer_bytes=2 * FRAGMENT, small_bytes=2 * FRAGMENT, buffers=2)
    fake.fake_answer(b"launches_left", 1)
    ids, rows = np.array([2, 5]), (world.rows, world.rows.strides[0], np.array([1, 3]))
    with pytest.raises(GpuError, match="kernel"):
        engine.copy_pages_from_host(world.pages, ids, *rows, strategy="staged")
    world.others_have_the_pages(orders)


def test_a_header_whose_end_cannot_be_marked_is_waited_for(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    world = World(library)
    world.engine.read(world.slot.address, 6)
    fake.fake_answer(b"event_records_left", 0)
    with pytest.raises(GpuError, match="event"):
        world.engine.read(world.slot.address, 6)
    orders.tells("courier")
    orders.writes("courier", world.slot.address, 64)
    orders.told_by("courier")
    fake.fake_answer(b"event_records_left", 1000)
    assert len(world.engine.read(world.slot.address, 6)) == 6


def test_a_sum_is_in_no_header_when_kernels_are_refused_behind_its_part(
    orders: Orders, fake: ctypes.CDLL, library: str
) -> None:
    """By another thread's copy, on another stream: the part fails, since what it says of itself would be wrong."""
    world = World(library)
    ids, header = np.array([2, 5]), bytes(range(64))
    parts: list[GpuCopy] = []
    problems: list[str] = []

    def gather() -> None:
        try:
            slot = world.slot.address + 64
            parts.append(world.engine.gather_part_summed(world.pages, ids, 0, 4 * FRAGMENT, slot, header=header))
        except GpuError as error:
            problems.append(str(error))

    launches = fake.fake_calls(b"launch")
    fake.fake_answer(b"launch_pause_ms", 500)
    gathering = threading.Thread(target=gather)
    gathering.start()
    while fake.fake_calls(b"launch") == launches:
        time.sleep(0.001)
    fake.fake_answer(b"launch", NOT_SUPPORTED)
    world.issues["clear another"]().wait()
    assert not world.engine.has_kernels
    gathering.join(20)
    assert (parts, problems) == ([], ["header: its sum cannot be added, since the driver takes no kernels"])
    world.others_have_the_pages(orders)


def test_the_place_of_a_sum_is_nobody_elses_until_its_end(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    world = World(library)
    orders.hold()
    copies = [world.issues["gather and add up"]()]
    copies.clear()  # its launches may still run
    scattered = world.engine.scatter_part_summed(world.pages, np.array([7]), 0, 2 * FRAGMENT, world.slot.address + 2048)
    scattered.wait()


# -- late ends


def test_an_end_is_asked_for_in_vain_so_often(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    world = World(library)
    orders.lag(3)
    copies = [world.issues[what]() for what in ("gather", "clear another", "gather")]
    assert [copies[0].done() for _ in range(5)] == [False, False, False, True, True]
    assert copies[1].wait_for(20)
    waiter = GpuWaiter()
    waiter.add(copies[2])
    assert waiter.wait(20) == copies[2:]
    orders.lag(0)
    assert world.issues["gather"]().done()
    orders.lag(1000)
    first, second = world.issues["gather"](), world.issues["gather"]()
    second.wait()
    assert first.done(), "it is before one that was waited for"


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 5e-9, 1e-8, 1e-6])
def test_the_shortest_waits_end(orders: Orders, fake: ctypes.CDLL, library: str, seconds: float) -> None:
    world = World(library)
    orders.hold()
    copy = world.issues["gather"]()
    ended = threading.Event()
    waiting = threading.Thread(target=lambda: (copy.wait_for(seconds), ended.set()), daemon=True)
    waiting.start()
    try:
        assert ended.wait(10)
    finally:
        orders.release()
        waiting.join(20)


def test_a_stream_that_is_held(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    world = World(library)
    engine = world.engine
    before = world.issues["gather"]()
    orders.hold(engine.gather_stream)
    beside = world.issues["clear another"]()
    assert not world.issues["gather"]().done()
    held = world.issues["gather"]()
    assert before.done() and not held.done() and not held.wait_for(0.01)
    assert beside.done()
    held.hold(engine.scatter_stream)
    behind = world.issues["scatter"]()
    assert not behind.done(), "its stream waits for the other"
    threading.Timer(0.05, lambda: orders.release(engine.gather_stream)).start()
    assert behind.wait_for(20) and held.done()


def test_all_streams_are_held_but_for_what_the_host_waits_for(orders: Orders, fake: ctypes.CDLL, library: str) -> None:
    orders.hold()
    world = World(library)  # with streams that are made only now
    copies = [world.issues["gather"]() for _ in range(3)]
    assert not any(copy.done() for copy in copies)
    copies[1].wait()
    assert [copy.done() for copy in copies] == [True, True, False]
    orders.release()
    assert copies[2].done()
