"""CUDA's driver by ctypes, as much as the proofs need: memory, sharing by IPC, copies, fills, and two kernels that look
at memory which others write.

A process that calls nothing else starts in half a second, holds one context, and can be killed at any time: which
is what the proofs do with it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

LIBRARY = os.environ.get("KVFERRY_CUDA_LIBRARY", "libcuda.so.1")
IPC_HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
NOT_READY = 600
BLOCKS, THREADS = 1056, 256

# count_other(words, n, stride, want, total): total += how many of words[0], words[stride], ... are not `want`.
# changes(words, n, stride, seen, total): total += how many differ from seen[0], seen[1], ..., which are set to them.
# The loads are volatile: another GPU may write the words meanwhile.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry count_other(
  .param .u64 a_words,
  .param .u64 a_n,
  .param .u64 a_stride,
  .param .u64 a_want,
  .param .u64 a_total)
{
  .reg .pred %p<3>;
  .reg .b32 %r<10>;
  .reg .b64 %rd<16>;
  ld.param.u64 %rd1, [a_words];
  ld.param.u64 %rd2, [a_n];
  ld.param.u64 %rd3, [a_stride];
  ld.param.u64 %rd4, [a_want];
  ld.param.u64 %rd5, [a_total];
  cvt.u32.u64 %r1, %rd4;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mov.u32 %r5, %nctaid.x;
  cvt.u64.u32 %rd6, %r4;
  mad.wide.u32 %rd7, %r2, %r3, %rd6;
  mul.wide.u32 %rd8, %r5, %r3;
  shl.b64 %rd9, %rd3, 2;
  mov.u32 %r6, 0;
NEXT:
  setp.ge.u64 %p1, %rd7, %rd2;
  @%p1 bra ENDED;
  mad.lo.u64 %rd10, %rd7, %rd9, %rd1;
  ld.volatile.global.u32 %r7, [%rd10];
  setp.ne.u32 %p2, %r7, %r1;
  @%p2 add.u32 %r6, %r6, 1;
  add.u64 %rd7, %rd7, %rd8;
  bra NEXT;
ENDED:
  setp.eq.u32 %p1, %r6, 0;
  @%p1 bra NONE;
  red.global.add.u32 [%rd5], %r6;
NONE:
  ret;
}

.visible .entry changes(
  .param .u64 a_words,
  .param .u64 a_n,
  .param .u64 a_stride,
  .param .u64 a_seen,
  .param .u64 a_total)
{
  .reg .pred %p<3>;
  .reg .b32 %r<10>;
  .reg .b64 %rd<16>;
  ld.param.u64 %rd1, [a_words];
  ld.param.u64 %rd2, [a_n];
  ld.param.u64 %rd3, [a_stride];
  ld.param.u64 %rd4, [a_seen];
  ld.param.u64 %rd5, [a_total];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mov.u32 %r5, %nctaid.x;
  cvt.u64.u32 %rd6, %r4;
  mad.wide.u32 %rd7, %r2, %r3, %rd6;
  mul.wide.u32 %rd8, %r5, %r3;
  shl.b64 %rd9, %rd3, 2;
  mov.u32 %r6, 0;
NEXT:
  setp.ge.u64 %p1, %rd7, %rd2;
  @%p1 bra ENDED;
  mad.lo.u64 %rd10, %rd7, %rd9, %rd1;
  shl.b64 %rd11, %rd7, 2;
  add.u64 %rd12, %rd4, %rd11;
  ld.volatile.global.u32 %r7, [%rd10];
  ld.global.u32 %r8, [%rd12];
  setp.eq.u32 %p2, %r7, %r8;
  @%p2 bra SAME;
  st.global.u32 [%rd12], %r7;
  add.u32 %r6, %r6, 1;
SAME:
  add.u64 %rd7, %rd7, %rd8;
  bra NEXT;
ENDED:
  setp.eq.u32 %p1, %r6, 0;
  @%p1 bra NONE;
  red.global.add.u32 [%rd5], %r6;
NONE:
  ret;
}
"""


class DriverError(RuntimeError):
    """A call of the driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


@dataclass(frozen=True)
class Memory:
    """`nbytes` of memory at `address`, of this process or mapped from another."""

    address: int
    nbytes: int


class Gpu:
    """One GPU's primary context, current on the thread that made it, and a stream of its own."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._library = ctypes.CDLL(LIBRARY)
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.use()
        self.stream = self.new_stream()
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), PTX + b"\0")
        self._kernels = {}
        for name in (b"count_other", b"changes"):
            kernel = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(kernel), module, name)
            self._kernels[name] = kernel
        self._total = self.allocate(4096)

    def call(self, name: str, *arguments: object) -> None:
        """Raises DriverError unless the driver says success."""
        status: int = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def use(self) -> None:
        """Makes the context current on this thread."""
        self.call("cuCtxSetCurrent", self.context)

    def new_stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    # -- memory --------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Memory:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return Memory(address.value, nbytes)

    def free(self, memory: Memory) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(memory.address))

    def free_bytes(self) -> int:
        """Memory of the device that nobody holds."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def share(self, memory: Memory) -> bytes:
        """The handle by which another process maps it."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory.address))
        return bytes(handle)

    def map(self, handle: bytes, nbytes: int) -> Memory:
        address = ctypes.c_uint64()
        self.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(LAZY_PEER_ACCESS),
        )
        return Memory(address.value, nbytes)

    def unmap(self, memory: Memory) -> None:
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(memory.address))

    # -- work on a stream; `sync` waits for it -------------------------------------------------------------------

    def sync(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def fill(self, memory: Memory, word: int) -> None:
        """Every 4-byte word, asynchronous."""
        self.call(
            "cuMemsetD32Async",
            ctypes.c_uint64(memory.address),
            ctypes.c_uint(word),
            ctypes.c_size_t(memory.nbytes // 4),
            self.stream,
        )

    def copy(self, target: Memory, source: Memory, stream: ctypes.c_void_p | None = None) -> None:
        """Between any two of this process's mappings, asynchronous."""
        self.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target.address),
            ctypes.c_uint64(source.address),
            ctypes.c_size_t(source.nbytes),
            stream or self.stream,
        )

    def word(self, address: int) -> int:
        value = ctypes.c_uint32()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(address), ctypes.c_size_t(4))
        return value.value

    def words(self, address: int, count: int) -> list[int]:
        values = (ctypes.c_uint32 * count)()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(values), ctypes.c_uint64(address), ctypes.c_size_t(4 * count))
        return list(values)

    def _launch(self, kernel: bytes, memory: Memory, stride_words: int, argument: int, total: int) -> None:
        values = [memory.address, memory.nbytes // 4 // stride_words, stride_words, argument, total]
        cells = [ctypes.c_uint64(value) for value in values]
        pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
        blocks = min(BLOCKS, -(-values[1] // THREADS))
        self.call("cuLaunchKernel", self._kernels[kernel], blocks, 1, 1, THREADS, 1, 1, 0, self.stream, pointers, None)

    def count_other(self, memory: Memory, want: int, stride_words: int = 1) -> int:
        """How many of the words, every `stride_words`-th, are not `want` now."""
        self.fill(Memory(self._total.address, 4), 0)
        self._launch(b"count_other", memory, stride_words, want, self._total.address)
        self.sync()
        return self.word(self._total.address)

    def changes(self, memory: Memory, stride_words: int, seen: Memory, total: int) -> None:
        """Adds to the word at address `total` how many words are not as in `seen`, and takes them there. Waits."""
        self._launch(b"changes", memory, stride_words, seen.address, total)
        self.sync()

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds that the stream needs for `work`, by its events."""
        begin, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (begin, end):
            self.call("cuEventCreate", ctypes.byref(event), 0)
        self.call("cuEventRecord", begin, self.stream)
        work()
        self.call("cuEventRecord", end, self.stream)
        self.sync()
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value / 1e3
