"""What a process of the proofs can do, by name, in its own CUDA context and with its own NIXL agent.

Three roles, as in a deployment: the owner (the receiving courier: it allocates memory and registers it), the writer
(the sending courier), and the watcher (the daemon: it maps the owner's memory by CUDA IPC, and looks at it all the
time). Stamps and flags are on a board of words that all share.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from driver import Gpu, Memory

MIB = 1 << 20
STOP, STAMP, COUNT, ERROR, SEQUENCE, ACKNOWLEDGED = range(6)  # words of the board; times are monotonic nanoseconds
HOST = -1  # in place of a GPU's number
MEMORY_TYPE = os.environ.get("KVFERRY_PROOFS_MEMORY", "VRAM")
SAMPLES = 1 << 14  # words that a watcher compares each time
MAX_LOOKS = 1 << 17

now = time.monotonic_ns


@dataclass(frozen=True)
class Target:
    """Registered memory of another agent."""

    address: int
    nbytes: int
    device: int


def clear(board: Any) -> None:
    for index in range(len(board)):
        board[index] = 0


def memory_type(device: int) -> str:
    return "DRAM" if device == HOST else MEMORY_TYPE


@dataclass(frozen=True)
class Look:
    """Words that changed between the launch of one look at the memory and the end of the next, in nanoseconds."""

    begun: int
    ended: int
    changed: int


@dataclass(frozen=True)
class Watched:
    looks: int
    changed: list[Look]

    def last(self) -> Look | None:
        return self.changed[-1] if self.changed else None


@dataclass
class Actor:
    """What a node can do; its methods are called by name from the controlling process."""

    board: Any
    ordinals: tuple[int, ...]
    gpus: dict[int, Gpu] = field(default_factory=dict)
    memories: dict[str, tuple[Memory, int]] = field(default_factory=dict)
    hosts: dict[str, mmap.mmap] = field(default_factory=dict)
    agent: Any = None
    remote: str = ""

    def start(self) -> int:
        for ordinal in reversed(self.ordinals):  # the first one stays current
            self.gpus[ordinal] = Gpu(ordinal)
        return os.getpid()

    def last_gpu(self) -> int:
        """The number of the machine's last GPU."""
        count = ctypes.c_int()
        self.gpus[self.ordinals[0]].call("cuDeviceGetCount", ctypes.byref(count))
        return count.value - 1

    # -- memory --------------------------------------------------------------------------------------------------

    def allocate(self, name: str, nbytes: int, ordinal: int) -> tuple[Target, bytes]:
        gpu = self.gpus[ordinal]
        gpu.use()
        memory = gpu.allocate(nbytes)
        self.memories[name] = (memory, ordinal)
        return Target(memory.address, nbytes, ordinal), gpu.share(memory)

    def allocate_host(self, name: str, nbytes: int) -> Target:
        self.hosts[name] = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.hosts[name]))
        self.memories[name] = (Memory(address, nbytes), HOST)
        return Target(address, nbytes, HOST)

    def map(self, name: str, handle: bytes, nbytes: int, ordinal: int) -> None:
        self.gpus[ordinal].use()
        self.memories[name] = (self.gpus[ordinal].map(handle, nbytes), ordinal)

    def share(self, name: str) -> bytes:
        memory, ordinal = self.memories[name]
        return self.gpus[ordinal].share(memory)

    def unmap(self, name: str) -> None:
        memory, ordinal = self.memories.pop(name)
        self.gpus[ordinal].unmap(memory)

    def free(self, name: str) -> None:
        memory, ordinal = self.memories.pop(name)
        self.gpus[ordinal].free(memory)

    def free_bytes(self) -> int:
        return self.gpus[self.ordinals[0]].free_bytes()

    def fill(self, name: str, word: int, first: int = 0, nbytes: int | None = None) -> None:
        memory, ordinal = self.memories[name]
        if ordinal == HOST:
            np.frombuffer(self.hosts[name], np.uint32)[:] = word
            return
        gpu = self.gpus[ordinal]
        gpu.use()
        gpu.fill(Memory(memory.address + first, memory.nbytes - first if nbytes is None else nbytes), word)
        gpu.sync()

    def count_other(self, name: str, want: int, stride_words: int = 1) -> int:
        memory, ordinal = self.memories[name]
        if ordinal == HOST:
            return int(np.count_nonzero(np.frombuffer(self.hosts[name], np.uint32)[::stride_words] != want))
        self.gpus[ordinal].use()
        return self.gpus[ordinal].count_other(memory, want, stride_words)

    def watch(self, name: str) -> Watched:
        """Looks at the memory until the board says stop."""
        memory, ordinal = self.memories[name]
        gpu = self.gpus[ordinal]
        stride = max(1, memory.nbytes // 4 // SAMPLES)
        seen, totals = gpu.allocate(4 * SAMPLES), gpu.allocate(4 * MAX_LOOKS)
        gpu.fill(totals, 0)
        gpu.changes(memory, stride, seen, totals.address)
        gpu.fill(Memory(totals.address, 4), 0)
        gpu.sync()
        begun = [now()]
        ended = [now()]
        self.board[ACKNOWLEDGED] = 1
        while not self.board[STOP] and len(begun) < MAX_LOOKS:
            begun.append(now())
            gpu.changes(memory, stride, seen, totals.address + 4 * (len(begun) - 1))
            ended.append(now())
        counts = gpu.words(totals.address, len(begun))
        gpu.free(seen)
        gpu.free(totals)
        changed = [Look(begun[i - 1], ended[i], count) for i, count in enumerate(counts) if count]
        return Watched(len(begun), changed)

    # -- NIXL ----------------------------------------------------------------------------------------------------

    def agent_up(self, names: list[str]) -> bytes:
        from kvferry_nixl.nixl_cu13._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=[], sync_mode=strict)
        self.agent = nixl_agent(f"node-{os.getpid()}-{os.urandom(8).hex()}", config)
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        for name in names:
            memory, device = self.memories[name]
            self.agent.register_memory([(memory.address, memory.nbytes, max(device, 0), "")], memory_type(device))
        return self.agent.get_agent_metadata()

    def connect(self, metadata: bytes) -> None:
        self.remote = self.agent.add_remote_agent(metadata).decode()

    def make(self, name: str, offset: int, target: Target, target_offset: int, nbytes: int, notification: bytes) -> Any:
        memory, device = self.memories[name]
        to = target.device
        local = self.agent.get_xfer_descs([(memory.address + offset, nbytes, max(device, 0))], memory_type(device))
        remote = self.agent.get_xfer_descs([(target.address + target_offset, nbytes, max(to, 0))], memory_type(to))
        return self.agent.initialize_xfer("WRITE", local, remote, self.remote, notification)

    def drain(self, handles: list[Any]) -> None:
        """Polls until all are done, and releases them."""
        while handles:
            handles = [handle for handle in handles if not self._over(handle)]

    def _over(self, handle: Any) -> bool:
        if self.agent.check_xfer_state(handle) != "DONE":
            return False
        self.agent.release_xfer_handle(handle)
        return True

    def poll(self, seconds: float) -> int:
        """Polls for notifications, as a courier does; how many came."""
        end, count = now() + int(seconds * 1e9), 0
        while now() < end and not self.board[STOP]:
            count += sum(len(payloads) for payloads in self.agent.get_new_notifs().values())
        return count

    def write(self, name: str, target: Target, chunk: int, posts: int) -> float:
        """Writes posts x chunk bytes from the memory's start, all posted at once; seconds until all are done."""
        handles = [self.make(name, i * chunk, target, i * chunk, chunk, b"n") for i in range(posts)]
        begin = now()
        for handle in handles:
            self.agent.transfer(handle)
        self.drain(handles)
        return (now() - begin) / 1e9

    def write_then(self, name: str, target: Target, chunk: int, posts: int, canary: int, drained: bool) -> str:
        """As `write`; then stamps the board and overwrites the source. Not drained: the handles are released as soon as
        they are posted. What release raised."""
        handles = [self.make(name, i * chunk, target, i * chunk, chunk, b"n") for i in range(posts)]
        memory, ordinal = self.memories[name]
        refused = ""
        for handle in handles:
            self.agent.transfer(handle)
        if drained:
            self.drain(handles)
        else:
            for handle in handles:
                try:
                    self.agent.release_xfer_handle(handle)
                except Exception as error:  # NIXL's classes have no common base
                    refused = f"{type(error).__name__}: {error}"
        self.board[STAMP] = now()
        gpu = self.gpus[ordinal]
        gpu.fill(Memory(memory.address, chunk * posts), canary)
        gpu.sync()
        return refused

    def train(self, name: str, target: Target, chunk: int, in_flight: int) -> str:
        """Writes without end, halves of the memory in turn so that each write changes the target. What ended it."""
        half = self.memories[name][0].nbytes // 2
        places = min(half, target.nbytes) // chunk
        handles: list[Any] = []
        number = 0
        try:
            while not self.board[STOP]:
                while len(handles) < in_flight:
                    offset = number % places * chunk
                    handle = self.make(name, number // places % 2 * half + offset, target, offset, chunk, b"n")
                    self.agent.transfer(handle)
                    handles.append(handle)
                    number += 1
                handles = [handle for handle in handles if not self._over(handle)]
                self.board[COUNT] = number - len(handles)
            self.drain(handles)
        except Exception as error:
            self.board[ERROR] = now()
            return f"{type(error).__name__}: {error}"
        return ""

    def raw_train(self, name: str, mapped: str) -> str:
        """As `train`, by plain copies to memory that this process maps itself."""
        source, ordinal = self.memories[name]
        target, _ = self.memories[mapped]
        gpu = self.gpus[ordinal]
        half = min(source.nbytes // 2, target.nbytes)
        number = 0
        try:
            while not self.board[STOP]:
                gpu.copy(Memory(target.address, half), Memory(source.address + number % 2 * half, half))
                gpu.sync()
                number += 1
                self.board[COUNT] = number
        except Exception as error:
            self.board[ERROR] = now()
            return f"{type(error).__name__}: {error}"
        return ""

    def lock(self, path: str, number: int) -> None:
        """Takes a file's lock as a worker does, by this descriptor."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.dup2(fd, number)
        os.close(fd)

    def queue_copies(self, name: str, mapped: str) -> None:
        """As `raw_train`, but what is queued is not waited for, up to the driver's bound."""
        source, ordinal = self.memories[name]
        target, _ = self.memories[mapped]
        half = min(source.nbytes // 2, target.nbytes)
        while not self.board[STOP]:
            turn = self.board[COUNT] % 2
            self.gpus[ordinal].copy(Memory(target.address, half), Memory(source.address + turn * half, half))
            self.board[COUNT] += 1

    # -- order: the writer writes, the owner passes each notification on, the watcher looks at every byte -----------

    def order_writer(self, name: str, target: Target, chunk: int, posts: int, rounds: int) -> None:
        for number in range(1, rounds + 1):
            self.fill(name, number)
            handles = [self.make(name, i * chunk, target, i * chunk, chunk, b"%d" % number) for i in range(posts)]
            for handle in handles:
                self.agent.transfer(handle)
            self.drain(handles)
            while self.board[ACKNOWLEDGED] < number and not self.board[STOP]:
                pass

    def order_owner(self, posts: int, rounds: int) -> None:
        for number in range(1, rounds + 1):
            count = 0
            while count < posts and not self.board[STOP]:
                for payloads in self.agent.get_new_notifs().values():
                    assert all(payload == b"%d" % number for payload in payloads)
                    count += len(payloads)
            self.board[SEQUENCE] = number

    def order_watcher(self, name: str, rounds: int) -> tuple[int, int]:
        """Rounds in which a kernel, a copy saw an old word."""
        memory, ordinal = self.memories[name]
        gpu = self.gpus[ordinal]
        private = gpu.allocate(memory.nbytes)
        stale = [0, 0]
        for number in range(1, rounds + 1):
            while self.board[SEQUENCE] < number and not self.board[STOP]:
                pass
            by_copy = number % 2
            if by_copy:
                gpu.copy(private, memory)
            stale[by_copy] += gpu.count_other(private if by_copy else memory, number) > 0
            self.board[ACKNOWLEDGED] = number
        gpu.free(private)
        return stale[0], stale[1]
