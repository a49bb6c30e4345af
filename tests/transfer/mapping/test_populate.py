"""Memory that is made before it is used: it is there, it keeps its bytes, and what stands beside it does, too."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.transfer.mapping import populate as populating
from kvferry.transfer.mapping.populate import POPULATE_READ, cpus_near, let_go, populate, reserve

PAGE = mmap.PAGESIZE
PAGES = 64


def there(memory: mmap.mmap) -> list[bool]:
    """Of each page: whether this process has it mapped to memory."""
    at = np.frombuffer(memory, np.uint8).ctypes.data
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(at // PAGE * 8)
        words = np.frombuffer(file.read(len(memory) // PAGE * 8), np.uint64)
    return [bool(word >> np.uint64(63)) for word in words]


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> mmap.mmap:
    memory = reserve(PAGES * PAGE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def can_populate() -> bool:
    """Linux 5.14."""
    if not os.path.exists("/proc/self/pagemap"):
        return False
    memory = mmap.mmap(-1, PAGE)
    return populating._libc.madvise(np.frombuffer(memory, np.uint8).ctypes.data, PAGE, POPULATE_READ) == 0


def test_of_reserved_memory_what_is_populated_is_there(small_pages: mmap.mmap) -> None:
    if not can_populate():
        pytest.skip("this kernel populates nothing, or does not tell")
    assert not any(there(small_pages))
    populate(memoryview(small_pages)[8 * PAGE : 20 * PAGE])
    assert there(small_pages) == [8 <= page < 20 for page in range(PAGES)]
    populate(memoryview(small_pages)[30 * PAGE + 1 : 31 * PAGE + 1])
    assert [page for page, is_there in enumerate(there(small_pages)) if is_there] == [*range(8, 20), 30, 31]
    assert small_pages[:] == bytes(PAGES * PAGE)


def test_pieces_are_made_to_the_last_byte(small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "PIECE_BYTES", 3 * PAGE)
    asked: list[tuple[int, int]] = []
    start = np.frombuffer(small_pages, np.uint8).ctypes.data
    libc: Any = type("Libc", (), {"madvise": lambda self, at, length, how: asked.append((at - start, length)) or 0})
    monkeypatch.setattr(populating, "_libc", libc())
    populate(memoryview(small_pages)[2 * PAGE + 5 : 9 * PAGE + 1])
    assert sorted(asked) == [(2 * PAGE, 3 * PAGE), (5 * PAGE, 3 * PAGE), (8 * PAGE, 2 * PAGE)]


def test_bytes_that_are_there_stay_what_they_are(small_pages: mmap.mmap) -> None:
    small_pages[5 * PAGE : 5 * PAGE + 3] = b"abc"
    populate(memoryview(small_pages))
    assert small_pages[5 * PAGE : 5 * PAGE + 4] == b"abc\0"


def test_a_file_keeps_its_bytes(tmp_path: Path) -> None:
    path, data = tmp_path / "rows", os.urandom(PAGES * PAGE)
    path.write_bytes(data)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), PAGES * PAGE)
    before = path.stat().st_mtime_ns
    populate(memoryview(memory)[PAGE + 7 :], how=POPULATE_READ)
    assert memory[:] == data == path.read_bytes()
    assert path.stat().st_mtime_ns == before, "it was not written"


def test_it_is_touched_on_the_cpus_that_are_near(small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = os.sched_getaffinity(0), set[frozenset[int]]()
    chosen = frozenset([min(own)])

    class Libc:
        def madvise(self, *_: int) -> int:
            seen.add(frozenset(os.sched_getaffinity(0)))
            return 0

    monkeypatch.setattr(populating, "_libc", Libc())
    populate(memoryview(small_pages), chosen)
    assert seen == {chosen}
    assert os.sched_getaffinity(0) == own, "this thread's are what they were"
    populate(memoryview(small_pages), {1 << 20})  # one that is not there is no harm
    assert seen == {chosen, frozenset(own)}


class Failing:
    """Each of these answers once, then all is well."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.lock = list(answers), threading.Lock()

    def madvise(self, *_: int) -> int:
        with self.lock:
            error = self.answers.pop(0) if self.answers else 0
        ctypes.set_errno(error)
        return -1 if error else 0


def test_memory_that_cannot_be_had_is_an_error(small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (errno.ENOMEM, errno.EFAULT):
        monkeypatch.setattr(populating, "_libc", Failing(error))
        with pytest.raises(OSError, match=f"{PAGES * PAGE} bytes of memory cannot be had") as caught:
            populate(memoryview(small_pages))
        assert caught.value.errno == error


def test_behind_an_error_nothing_more_is_made(small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(populating, "THREADS", 1)
    libc = Failing(0, errno.ENOMEM, errno.EFAULT)
    monkeypatch.setattr(populating, "_libc", libc)
    with pytest.raises(OSError) as caught:
        populate(memoryview(small_pages))
    assert caught.value.errno == errno.ENOMEM and libc.answers == [errno.EFAULT]


def test_no_call_runs_while_a_thread_starts(small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the call, and others for it."""
    monkeypatch.setattr(populating, "PIECE_BYTES", 4 * PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    there: list[int] = []

    class Libc:
        def madvise(self, *_: int) -> int:
            there.append(sum(thread.name.startswith("kvferry-populate") for thread in threading.enumerate()))
            return 0

    monkeypatch.setattr(populating, "_libc", Libc())
    populate(memoryview(small_pages))
    assert there[0] == 8 and len(there) == PAGES // 4


def test_where_no_more_threads_can_be_had_those_that_there_are_do_it(
    small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populating, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    start, begun = threading.Thread.start, []

    def few(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    populate(memoryview(small_pages))
    monkeypatch.undo()
    assert len(begun) == 2
    if can_populate():
        assert all(there(small_pages))


def test_one_that_is_interrupted_goes_on(small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Failing(errno.EINTR, errno.EINTR)
    monkeypatch.setattr(populating, "_libc", libc)
    populate(memoryview(small_pages))
    assert not libc.answers


def test_a_kernel_that_cannot_do_it_does_it_later(small_pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "_libc", Failing(errno.EINVAL))
    populate(memoryview(small_pages))


def test_more_addresses_than_there_are_cannot_be_reserved() -> None:
    for nbytes, told in (
        (1 << 62, f"{1 << 62} bytes of addresses are wanted: .*; RLIMIT_AS is "),
        (1 << 70, "more than"),
    ):
        with pytest.raises(OSError, match=told):
            reserve(nbytes)


def test_whole_pages_are_let_go() -> None:
    memory = reserve(PAGES * PAGE)
    view = memoryview(memory)
    view[:] = b"x" * len(view)
    let_go(view[1 : 3 * PAGE + 1])
    assert (view[0], view[PAGE - 1], view[3 * PAGE]) == (120, 120, 120)
    assert bytes(view[PAGE : 3 * PAGE]) == bytes(2 * PAGE)
    let_go(view[5:5])
    with pytest.raises(OSError, match=f"{PAGE} bytes of memory cannot be let go"):
        let_go(view[:PAGE], 0x7FFF)
    view.release()
    memory.close()


def test_cpus_near_a_node_are_this_processs_own() -> None:
    assert cpus_near(0) <= os.sched_getaffinity(0)
    assert cpus_near(1 << 20) == frozenset()
