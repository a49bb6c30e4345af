"""Memory is made page by page, when it is first touched. Here that is done before it is used: by several threads, near
a device, in huge pages where the system has them, and with an error where there is none instead of a signal later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvferry.transfer.mapping import memory_room

POPULATE_READ, POPULATE_WRITE = 22, 23  # MADV_...: Linux 5.14
MAP_NORESERVE = 0x4000  # not in `mmap` before Python 3.13
THREADS = 16  # one clears some 3 GiB/s
PIECE_BYTES = 4 << 20  # a call holds up whoever changes this process's mappings
START_SECONDS = 5.0  # until all threads are there, or those that are begin

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def reserve(nbytes: int) -> mmap.mmap:
    """So many bytes of addresses, of which nothing is there until it is touched. OSError."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OverflowError:
        raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than a process can have") from None
    except OSError as error:
        bounds = f"{nbytes} bytes of addresses are wanted: {error.strerror}; {memory_room.of_addresses()}"
        raise OSError(error.errno, bounds) from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(memory: memoryview, cpus: Collection[int] = (), *, how: int = POPULATE_WRITE) -> None:
    """Has all of it be there, on the memory node of `cpus`, on which it is touched (none: of any). POPULATE_READ: of a
    file, whose pages are read and stay clean. A kernel that cannot do that does it when they are used. OSError."""
    address, nbytes = np.frombuffer(memory, np.uint8).ctypes.data, len(memory)
    page = mmap.PAGESIZE
    begin, end = address // page * page, -(-(address + nbytes) // page) * page  # neighbours' bytes stay what they are

    pieces = range(begin, end, PIECE_BYTES)
    if not pieces:
        return
    workers, left = min(THREADS, len(os.sched_getaffinity(0)), len(pieces)), iter(pieces)
    # A thread that starts has its stack mapped, which waits for the calls that run, and the next calls for that: with
    # some of the threads not there yet all of them took twice as long.
    started = threading.Barrier(workers, timeout=START_SECONDS)

    def share() -> None:
        if cpus:
            with contextlib.suppress(OSError):  # they may have been taken from this process
                os.sched_setaffinity(0, cpus)
        with contextlib.suppress(threading.BrokenBarrierError):  # not all came in time: it goes on as it is
            started.wait()
        try:
            for start in left:
                piece(start)
        except BaseException:
            deque(left, 0)  # nothing more for the others either
            raise

    def piece(start: int) -> None:
        length = min(PIECE_BYTES, end - start)
        while _libc.madvise(start, length, how) != 0:
            error = ctypes.get_errno()
            if error == errno.EINTR:
                continue
            if error == errno.EINVAL:
                return
            raise OSError(error, f"{length} bytes of memory cannot be had: {os.strerror(error)}")

    with ThreadPoolExecutor(workers, "kvferry-populate") as threads:
        shares: list[Future[None]] = []
        try:
            while len(shares) < workers:
                shares.append(threads.submit(share))
        except RuntimeError:  # no more threads can be had: those that there are do it
            started.abort()
            if not shares:
                raise
        for each in shares:
            each.result()


def let_go(memory: memoryview, how: int = mmap.MADV_DONTNEED) -> None:
    """Gives back what there is of it, in whole pages of memory: it is zeros when it is touched again. MADV_REMOVE: of a
    file, which has a hole then. Python's other threads go on, as they do not beside `mmap.madvise`. OSError."""
    if not len(memory):
        return
    address, page = np.frombuffer(memory, np.uint8).ctypes.data, mmap.PAGESIZE
    begin, end = -(-address // page) * page, (address + len(memory)) // page * page
    for start in range(begin, end, PIECE_BYTES):
        if _libc.madvise(start, min(PIECE_BYTES, end - start), how) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"{len(memory)} bytes of memory cannot be let go: {os.strerror(error)}")


def cpus_near(node: int) -> frozenset[int]:
    """This process's CPUs that are of a memory node; none where that cannot be told."""
    found: set[int] = set()
    try:
        with open(f"/sys/devices/system/node/node{node}/cpulist") as file:
            for part in filter(None, file.read().strip().split(",")):
                first, _, last = part.partition("-")
                found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(found & os.sched_getaffinity(0))
