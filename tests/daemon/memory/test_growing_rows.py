"""Rows that come chunk by chunk: where chunks end, what is pinned, and what stays when one cannot be had."""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.memory import growing_rows
from kvferry.daemon.memory.growing_rows import Found, GrowingRows
from kvferry.daemon.memory.interface import Pinner
from kvferry.transfer.host_tier.index import DropReason, RecoveryReport
from kvferry.transfer.host_tier.rows import SPARED
from kvferry.transfer.mapping import memory_room
from kvferry.transfer.mapping.memory_room import MemoryRoom

ROW, ROWS = 4096, 8


class Rows:
    """They note what is asked of them. `lack`: why rows from byte `lacking` on cannot be."""

    def __init__(self, *, in_memory: bool = True) -> None:
        self.buffer = memoryview(bytearray(ROWS * ROW))
        self.in_memory = in_memory
        self.lacking, self.lack = ROWS * ROW, ""
        self.made: list[tuple[int, int]] = []
        self.near: list[Collection[int]] = []
        self.recovered: list[tuple[int, int]] = []
        self.let_go: list[tuple[int, int]] = []
        self.closed = False

    def lacks(self, start: int, end: int) -> str:
        return self.lack if end > self.lacking else ""

    def make(self, start: int, end: int, cpus: Collection[int]) -> None:
        self.made.append((start, end))
        self.near.append(cpus)

    def unmake(self, start: int, end: int) -> None:
        self.let_go.append((start, end))

    def recover(self, first: int, last: int) -> None:
        self.recovered.append((first, last))

    def close(self) -> None:
        self.closed = True


class Pin:
    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        pins.held += 1

    def __del__(self) -> None:
        self._pins.held -= 1


class Pins:
    """`good`: how many can be had."""

    def __init__(self, good: int = 1 << 20) -> None:
        self.good, self.held, self.asked = good, 0, list[int]()

    def pin(self, memory: memoryview) -> Pin:
        self.asked.append(len(memory))
        if len(self.asked) > self.good:
            raise OSError("not pinned: injected")
        return Pin(self)


def growing(rows: Rows, pinner: Pinner | None = None, near: list[frozenset[int]] | None = None) -> GrowingRows:
    return GrowingRows(rows, ROWS, ROW, pinner, near or [])


@pytest.fixture(autouse=True)
def chunks_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_rows, "CHUNK_BYTES", 2 * ROW)
    monkeypatch.setattr(memory_room, "to_lock", lambda: None)


# -- chunks ----------------------------------------------------------------------------------------------------------


SIZES = st.one_of(st.integers(1, 1 << 12), st.integers(0, 40).map(lambda bits: 1 << bits), st.integers(1, 1 << 40))


@given(SIZES, st.integers(1, 1 << 24), st.sampled_from([1 << 12, 1 << 21, 1 << 30]))
def test_chunks_follow_each_other_and_end_where_rows_and_pages_do(row: int, asked: int, size: int) -> None:
    buffer: Any = range(min(row * asked, (1 << 63) - 1) // asked * asked)  # it has a length, and is not there
    row = len(buffer) // asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing_rows, "CHUNK_BYTES", size)
        anything: Any = SimpleNamespace(buffer=buffer)
        chunks = GrowingRows(anything, asked, row, None, []).chunks()
        behind = 0
        for _ in range(20):
            if (chunk := next(chunks, None)) is None:
                break
            first, last = chunk
            assert behind == first < last <= asked
            behind = last
            if last == asked:
                assert next(chunks, None) is None
                break
            assert last * row % mmap.PAGESIZE == 0
            assert (last - first) * row <= size, "only rows that share pages with all others are more at a time"
            assert row * growing_rows.HUGE_PAGE_BYTES > size or last * row % growing_rows.HUGE_PAGE_BYTES == 0


def test_rows_are_made_in_order_near_one_device_behind_the_other() -> None:
    rows, near = Rows(), [frozenset({1, 2}), frozenset({5})]
    there = growing(rows, Pins(), near)
    assert len(there.buffer) == 0
    for first, last in there.chunks():
        there.make(first, last)
        assert there.pages == last and len(there.buffer) == last * ROW
    assert rows.made == [(at * ROW, (at + 2) * ROW) for at in range(0, ROWS, 2)]
    assert rows.recovered == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert rows.near == [near[0], near[1]] * 2
    with pytest.raises(AssertionError, match="rows from 2 on, 8 are there"):
        there.make(2, 4)


# -- what cannot be had ----------------------------------------------------------------------------------------------


def test_a_chunk_without_room_is_not_made_and_those_before_stay(caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows()
    rows.lacking, rows.lack = 4 * ROW, "a cgroup leaves 5"
    there = growing(rows, pins := Pins())
    there.warn()
    (record,) = caplog.records
    assert record.getMessage() == f"host tier of {ROWS * ROW} bytes: a cgroup leaves 5; it grows as far as that"
    there.make(0, 2)
    there.make(2, 4)
    with pytest.raises(OSError, match="rows 4 to 5: a cgroup leaves 5"):
        there.make(4, 6)
    assert (there.pages, pins.held, rows.made) == (4, 2, [(0, 2 * ROW), (2 * ROW, 4 * ROW)])
    there.close()
    assert rows.let_go == [], "it was not made"


def test_what_may_not_be_locked_is_said_before_it_is_pinned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_room, "to_lock", lambda: MemoryRoom("RLIMIT_MEMLOCK (9)", 7))
    growing(Rows()).warn()
    assert not caplog.records, "nothing of it is to be pinned"
    growing(Rows(), Pins()).warn()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"host tier of {ROWS * ROW} bytes, which are to be pinned: {ROWS * ROW} bytes are wanted, RLIMIT_MEMLOCK (9) "
        "leaves 7; a driver that keeps to it pins no more (ulimit -l)"
    )
    monkeypatch.setattr(memory_room, "to_lock", lambda: None)
    growing(Rows(), Pins()).warn()
    assert len(caplog.records) == 1


def test_one_that_has_room_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    growing(Rows()).warn()
    assert not caplog.records


def test_a_tier_that_cannot_be_pinned_at_all_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    there = growing(rows := Rows(), pins := Pins(good=0))
    for chunk in there.chunks():
        there.make(*chunk)
    assert (there.pages, len(rows.made), len(pins.asked), pins.held) == (ROWS, 4, 1, 0), "it is asked for once"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("the host tier is not pinned, its copies will be slow: not pinned: injected")
    assert "memlock limit" in record.getMessage()


def test_a_later_chunk_that_cannot_be_pinned_is_not_used() -> None:
    there = growing(rows := Rows(), pins := Pins(good=2))
    there.make(0, 2)
    there.make(2, 4)
    with pytest.raises(OSError, match=r"not pinned: injected \(memlock limit: "):
        there.make(4, 6)
    assert (there.pages, pins.held, rows.recovered) == (4, 2, [(0, 2), (2, 4)])
    assert rows.let_go == [(6 * ROW, 8 * ROW), (4 * ROW, 6 * ROW)], "memory is short, and nobody uses it"


def test_what_there_is_of_a_chunk_that_fails_is_let_go_whatever_the_error() -> None:
    there = growing(rows := Rows())
    there.make(0, 2)

    def without_threads(start: int, end: int, cpus: Collection[int]) -> None:
        raise RuntimeError("can't start new thread")

    rows.make = without_threads  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        there.make(2, 4)
    assert (there.pages, rows.let_go) == (2, [(2 * ROW, 4 * ROW)])


def test_a_chunk_is_made_while_the_one_before_it_is_pinned() -> None:
    rows, pins = Rows(), Pins()
    there, made, pin = growing(rows, pins), threading.Event(), pins.pin

    def pinned(memory: memoryview) -> Pin:
        if len(pins.asked) < ROWS // 2 - 1:  # behind the last there is none
            assert made.wait(10), "the next chunk waits for the pin"
        made.clear()
        return pin(memory)

    def make(start: int, end: int, cpus: Collection[int]) -> None:
        rows.made.append((start, end))
        if start:
            made.set()

    rows.make, pins.pin = make, pinned  # type: ignore[method-assign]
    for chunk in there.chunks():
        there.make(*chunk)
    assert rows.made == [(at * ROW, (at + 2) * ROW) for at in range(0, ROWS, 2)], "each once, in order"
    there.close()


def test_a_chunk_that_was_made_ahead_of_one_that_fails_is_let_go() -> None:
    there = growing(rows := Rows(), Pins(good=1))
    there.make(0, 2)
    with pytest.raises(OSError, match="not pinned"):
        there.make(2, 4)
    assert rows.let_go == [(4 * ROW, 6 * ROW), (2 * ROW, 4 * ROW)]
    assert rows.recovered == [(0, 2)]
    there.close()
    assert len(rows.let_go) == 2, "it is not let go twice"


def test_rows_of_a_disk_are_pinned_as_far_as_memory_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pinned, they cannot be dropped from memory any more."""
    room = MemoryRoom("a cgroup", 2 * ROW + 4 * ROW // SPARED)
    monkeypatch.setattr(memory_room, "rooms", lambda: iter([room]))
    unpinned = growing(Rows(in_memory=False))
    unpinned.warn()
    there, before = growing(rows := Rows(in_memory=False), pins := Pins()), growing(Rows(), Pins())
    for chunk in there.chunks():
        unpinned.make(*chunk)
        before.make(*chunk)
    assert (unpinned.pages, before.pages, caplog.messages) == (ROWS, ROWS, [])
    there.warn()
    assert caplog.messages == [
        f"host tier of {ROWS * ROW} bytes: {ROWS * ROW + ROWS * ROW // SPARED} bytes are wanted, a cgroup leaves "
        f"{room.nbytes}; it grows as far as that"
    ]
    there.make(0, 2)
    there.make(2, 4)
    with pytest.raises(OSError, match=f"{2 * ROW + 6 * ROW // SPARED} bytes are wanted, a cgroup leaves {room.nbytes}"):
        there.make(4, 6)
    assert (there.pages, pins.held, len(pins.asked)) == (4, 2, 2)
    assert rows.let_go == [(6 * ROW, 8 * ROW), (4 * ROW, 6 * ROW)]


def test_rows_of_a_disk_that_memory_cannot_have_pinned_at_all_are_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_room, "rooms", lambda: iter([MemoryRoom("a cgroup", 1)]))
    there = growing(Rows(in_memory=False), pins := Pins())
    for chunk in there.chunks():
        there.make(*chunk)
    assert (there.pages, there.can_be_sent, pins.asked) == (ROWS, False, [])
    assert "the host tier is not pinned, its copies will be slow" in caplog.text and "a cgroup leaves 1" in caplog.text


def test_a_chunk_whose_entries_cannot_be_read_is_neither_pinned_nor_there() -> None:
    there = growing(rows := Rows(), pins := Pins())
    there.make(0, 2)

    def unreadable(first: int, last: int) -> None:
        raise MemoryError("injected")

    held_at: list[int] = []
    unmake, rows.recover = rows.unmake, unreadable  # type: ignore[method-assign]
    rows.unmake = lambda start, end: (held_at.append(pins.held), unmake(start, end))[1]  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        there.make(2, 4)
    assert (there.pages, pins.held) == (2, 1)
    assert rows.let_go == [(4 * ROW, 6 * ROW), (2 * ROW, 4 * ROW)]
    assert held_at[1] == 1, "it is unpinned before it goes"
    there.close()
    assert len(rows.let_go) == 2, "nothing is let go twice"


def test_a_tier_that_ends_lets_go_of_the_chunk_that_comes() -> None:
    there = growing(rows := Rows(), Pins())
    there.make(0, 2)
    there.close()
    assert rows.let_go == [(2 * ROW, 4 * ROW)]


def test_pins_go_before_the_rows() -> None:
    there = growing(rows := Rows(), pins := Pins())
    there.make(0, 2)
    assert pins.held == 1
    closed_with: list[int] = []
    rows.close = lambda: closed_with.append(pins.held)  # type: ignore[method-assign]
    there.close()
    assert closed_with == [0]


# -- what was found --------------------------------------------------------------------------------------------------


def test_what_chunks_held_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = Found()
    assert found.tell() == 0
    found.count(RecoveryReport(3, {DropReason.BAD_ENTRY: 1, DropReason.PAGES_DIFFER: 4}))
    found.count(RecoveryReport(2, {DropReason.BAD_ENTRY: 2}))
    assert found.tell() == 7
    first, second = caplog.records
    assert (first.levelno, second.levelno) == (logging.INFO, logging.WARNING)
    assert first.getMessage() == "host tier: 0 entries found again, dropped: none"
    assert second.getMessage() == "host tier: 5 entries found again, dropped: 3 bad_entry, 4 pages_differ"


def test_a_file_whose_header_is_wrong_counts_as_one_entry(caplog: pytest.LogCaptureFixture) -> None:
    found = Found()
    found.count(RecoveryReport(0, {}, DropReason.BAD_HEADER))
    found.count(RecoveryReport(0, {}))
    assert found.tell() == 1
    assert "the file was replaced (bad_header)" in caplog.text


@given(st.lists(st.integers(0, 23), unique=True, max_size=24), st.integers(1, 9))
def test_no_part_of_a_copy_goes_over_the_end_of_a_chunk(rows: list[int], step: int) -> None:
    """Neighbours are copied as one, and drivers refuse one copy of what was pinned apart."""
    growing = GrowingRows(Rows(), ROWS, ROW, None, ())
    growing._step = step
    at = np.array(rows, np.int64)
    parts = [at[part].tolist() for part in growing.parts(at)]
    assert [row for part in parts for row in part] == rows
    borders = [(a, b) for part in parts for a, b in itertools.pairwise(part) if b == a + 1 and b % step == 0]
    assert borders == []
    cuts = sum(b == a + 1 and b % step == 0 for a, b in itertools.pairwise(rows))
    assert len(parts) == cuts + 1
