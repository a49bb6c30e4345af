# Made from csrc/bindings: make stub
"""kvferry's C++ core: digests, copies, page pools and the radix tree"""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy
from numpy.typing import NDArray
from typing_extensions import Buffer

Sha256: TypeAlias = Literal["auto", "sha-ni", "portable"]
CopyStrategy: TypeAlias = Literal["batch", "loop", "kernel", "staged", "pitched"]
Ids: TypeAlias = (
    Sequence[int] | NDArray[numpy.int64] | NDArray[numpy.uint64] | NDArray[numpy.int32] | NDArray[numpy.uint32]
)
Pages: TypeAlias = (
    Iterable[int] | NDArray[numpy.int64] | NDArray[numpy.uint64] | NDArray[numpy.int32] | NDArray[numpy.uint32]
)
Digests: TypeAlias = bytes | bytearray | memoryview | NDArray[numpy.uint8]

def end_process_later(milliseconds: int, signal: int) -> None:
    """
    For good: after so long a thread that needs nothing of the interpreter raises the signal, whose handler may say
    something, and ends the process with status 1. A standstill of the process counts for an eighth of it at most.
    """

MAX_PAGE_SIZE: int = 65536

def sha256_implementations() -> list[str]:
    """Names of the SHA-256 forms this processor can run, fastest first."""

def sha256(data: Buffer, implementation: Sha256 = "auto") -> bytes:
    """
    The digest (32 bytes). ValueError: an implementation that this processor lacks.
    """

class TokenView:
    """
    A caller's tokens as they are: a buffer, held as long as this lives, or a copy of a list's or tuple's items.
    """

    @staticmethod
    def of(tokens: object) -> TokenView | None:
        """
        None: not a one-dimensional contiguous buffer of native 32 or 64-bit integers, nor a list or tuple of
        ints in [0, 2**32).
        """

    def __len__(self) -> int: ...
    def narrow(self, begin: int, end: int) -> bytes:
        """
        Tokens [begin, end) as uint32. ValueError names the first that is not in [0, 2**32).
        """

    def common(self, begin: int, held: Buffer) -> int:
        """
        How many tokens from `begin` on are the same as those of `held` (uint32, aligned); a bad one never is.
        """

def chain_digests(
    tokens: TokenView,
    partial: bytes,
    page_size: int,
    parent: bytes,
    extra: bytes,
    page_extras: dict[int, bytes],
    first_page: int,
    implementation: Sha256 = "auto",
) -> tuple[bytes, bytes]:
    """
    Digests (32 bytes each) of the full pages of partial + tokens, and the tokens behind the last of them.

    partial, and what is returned: uint32 in the machine's order. extra: third item of each page, encoded as CBOR;
    page_extras: the same for single pages, where this call's first page has index first_page. The GIL is released
    when the tokens are many. ValueError: bad token, page_size or parent out of bounds, implementation that this
    processor lacks.
    """

def page_digest(tokens: bytes, parent: bytes, extra: bytes) -> bytes:
    """
    Digest of one page of 1 to MAX_PAGE_SIZE tokens (uint32 in the machine's order).
    """

def gather_pages(
    dst: Buffer,
    dst_offset: int,
    src: Buffer,
    page_ids: Ids,
    page_bytes: int,
    byte_offset: int,
    nbytes: int,
    threads: int = 1,
) -> None:
    """
    Pool to slot: the pages of `src` named by page_ids, one behind the other, are a virtual byte string; its
    [byte_offset, byte_offset + nbytes) goes to dst[dst_offset:]. GIL released.

    IndexError (page id) or ValueError (any other bound, or dst overlaps a page) before a byte has moved.
    """

def scatter_pages(
    dst: Buffer,
    page_ids: Ids,
    page_bytes: int,
    byte_offset: int,
    src: Buffer,
    src_offset: int,
    nbytes: int,
    threads: int = 1,
) -> None:
    """
    Slot to pool, the reverse of `gather_pages`; a page named twice is a ValueError as well.
    """

def gather_pages_summed(
    dst: Buffer,
    dst_offset: int,
    src: Buffer,
    page_ids: Ids,
    page_bytes: int,
    byte_offset: int,
    nbytes: int,
    threads: int = 1,
) -> int:
    """
    `gather_pages`, and the `part_checksum` of what it gathered, made on the way: nearly as fast where page_bytes and
    byte_offset are multiples of 8.
    """

def scatter_pages_summed(
    dst: Buffer,
    page_ids: Ids,
    page_bytes: int,
    byte_offset: int,
    src: Buffer,
    src_offset: int,
    nbytes: int,
    threads: int = 1,
) -> int:
    """
    `scatter_pages`, and the `part_checksum` of what it scattered. The bytes are in the pages when it is known.
    """

def copy_list(
    dst_addresses: NDArray[numpy.int64],
    src_addresses: NDArray[numpy.int64],
    sizes: NDArray[numpy.int64],
    threads: int = 1,
) -> None:
    """
    Copies sizes[i] bytes from src_addresses[i] to dst_addresses[i]; GIL released. Addresses are the caller's word.

    No item may overlap another item's destination. ValueError: lengths differ, negative size, an item over itself.
    """

def zero_ranges(dst: Buffer, offset: int, fragments: int, stride: int, fragment_bytes: int, start: int) -> None:
    """
    Zeroes bytes [start, fragment_bytes) of each fragment; fragment f begins at offset + f * stride. GIL released.
    """

class GpuUnavailable(RuntimeError):
    """No driver, a driver that lacks what is needed, or no device."""

class GpuError(RuntimeError):
    """
    A call of the driver failed; no copy of the call that raised it runs on.
    """

class GpuPages:
    """
    Where the fragments of pages lie on the device; see `GpuCopyEngine.pages`. Its end may wait for the device; GIL
    released.
    """

    @property
    def fragments(self) -> int:
        """Fragments of a page."""

    @property
    def fragment_bytes(self) -> int: ...
    @property
    def runs(self) -> int:
        """Copies of a page by `pitched`; 0: its fragments lie too far apart."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def pages(self) -> int:
        """Ids are 0 to pages - 1; of blocks, in blocks."""

    @property
    def ids_a_page(self) -> int:
        """Ids that name a page: 1, or in blocks the number of them."""

class GpuCopy:
    """
    A copy that was issued. Hold it until it is done: it keeps alive what the copy uses.
    """

    @property
    def strategy(self) -> CopyStrategy:
        """
        The strategy that moves the bytes, which may be another than was asked for.
        """

    def done(self) -> bool:
        """GpuError: the copy, or anything on the device before it, failed."""

    def wait(self) -> None:
        """The thread sleeps, without the GIL, until it is done."""

    def wait_for(self, seconds: float) -> bool:
        """
        False: it was not done after so long. Looks for some microseconds, then sleeps in between; GIL released.
        """

    def checksum(self) -> int:
        """
        The `part_checksum` of a `_summed` part or of `add_up`. ValueError: another copy, or not done.
        """

    def hold(self, stream: int) -> None:
        """
        What is issued to `stream` (0: the default one) from now on runs after the copy.
        """

class GpuCopyEngine:
    """
    Copies between one device and host memory that is pinned (other memory works, slowly and not asynchronously).

    A stream is a handle of the driver's; None: the engine's own; the default streams are refused. Each copy runs
    after what was issued to its stream before it, but for copies of pages of order `none`: only who waits for one, or
    `hold`s a stream until its end, knows that it is done.
    Copies issue in microseconds and never wait for the device, GIL released.
    A copy from the host may read its source before the stream gets there: nothing may be writing to it any more.
    A stream of another device is a GpuError, pages of another device's engine a ValueError; nothing has moved then.
    What the driver does not support, or does not take, goes by other ways, and is counted: `statistics`. Which
    strategy suits a layout: `kvferry.transfer.host_tier.copy_plan`.
    """

    def __init__(
        self,
        device: int = 0,
        library: str = "libcuda.so.1",
        api: Literal["cuda", "hip"] = "cuda",
        *,
        buffer_bytes: int = 16777216,
        buffers: int = 4,
        deep_buffers: int = 8,
        deep_piece_bytes: int = 196608,
        small_bytes: int = 2097152,
        growth: int = 4,
        staging_blocks: int = 4096,
        bus_blocks: int = 4,
        batch_descriptors: int = 4096,
        batch_flags: int = 0,
        apart_percent: int = 50,
        pitched_bytes: int = 786432,
        part_blocks: int = 1056,
        part_threads: int = 256,
    ) -> None:
        """
        GpuUnavailable or GpuError. The numbers are those of CopyTuning in csrc/cuda/engine.h and of PartTuning in
        csrc/cuda/parts.h.
        """

    def pages(
        self,
        bases: NDArray[numpy.int64],
        strides: NDArray[numpy.int64],
        fragment_bytes: int,
        pages: int,
        pieces: int = 1,
        piece_stride: int = 0,
        in_blocks: bool = False,
    ) -> GpuPages:
        """
        A pool of `pages` pages: fragment tensor * pieces + piece of page p is the fragment_bytes at bases[tensor] +
        p * strides[tensor] + piece * piece_stride. In a row a page's fragments follow each other. in_blocks: as of
        `HostPages`. The addresses are the caller's word. Waits for the device, which writes its table, behind no other
        copy; GIL released.
        """

    def copy_pages_to_host(
        self,
        pages: GpuPages,
        page_ids: NDArray[numpy.int64],
        rows: Buffer,
        row_stride: int,
        row_ids: NDArray[numpy.int64],
        stream: int | None = None,
        strategy: CopyStrategy = "staged",
        order: Literal["stream", "none"] = "stream",
    ) -> GpuCopy:
        """
        Page page_ids[i], in blocks that of the i-th `ids_a_page` ids, to the row that begins at row_ids[i] *
        row_stride. order `none`, of a copy without a stream: in no order with what is not done yet, so that it overlaps
        copies before it. IndexError: an id out of bounds, or a block that is not there; ValueError: any other bound, or
        a row named twice; nothing has moved then.
        """

    def copy_pages_from_host(
        self,
        pages: GpuPages,
        page_ids: NDArray[numpy.int64],
        rows: Buffer,
        row_stride: int,
        row_ids: NDArray[numpy.int64],
        stream: int | None = None,
        strategy: CopyStrategy = "staged",
        order: Literal["stream", "none"] = "stream",
    ) -> GpuCopy:
        """
        The reverse of `copy_pages_to_host`, without blocks that are not there (-1); an id named twice is a
        ValueError.
        """

    def copy_list_to_host(
        self,
        dst_addresses: NDArray[numpy.int64],
        src_addresses: NDArray[numpy.int64],
        sizes: NDArray[numpy.int64],
        stream: int | None = None,
        strategy: Literal["batch", "loop", "kernel"] = "batch",
    ) -> GpuCopy:
        """
        sizes[i] bytes from src_addresses[i] to dst_addresses[i]. The addresses are the caller's word. No item may
        overlap another item's destination; nobody checks it. `kernel` reads or writes pinned host memory itself: from
        an item on that is not pinned, what is left goes by `batch`.
        """

    def copy_list_from_host(
        self,
        dst_addresses: NDArray[numpy.int64],
        src_addresses: NDArray[numpy.int64],
        sizes: NDArray[numpy.int64],
        stream: int | None = None,
        strategy: Literal["batch", "loop", "kernel"] = "batch",
    ) -> GpuCopy:
        """The reverse of `copy_list_to_host`."""

    def can(self, strategy: CopyStrategy) -> bool:
        """Whether the driver takes this strategy."""

    @property
    def mps(self) -> bool:
        """
        Whether CUDA's MPS runs this process's kernels beside other processes'; without it they have the GPU by turns.
        """

    def busy(self) -> bool:
        """
        Whether a kernel would have to wait now for others to end. Takes some microseconds, at most about 30.
        """

    @property
    def under_way_to_host(self) -> int:
        """
        Bytes of copies of pages that were issued and have not ended; of 256 at most.
        """

    @property
    def under_way_from_host(self) -> int: ...
    @property
    def stream(self) -> int:
        """The stream of the engine's own."""

    def statistics(self) -> dict[str, dict[str, int]]:
        """
        By strategy that was used: copies, descriptors, bytes; under `gathered` and `scattered`: parts, launches,
        bytes; under `zeroed`: pages; under `fallbacks`, how often for what reason.
        """

    def allocate(self, nbytes: int) -> GpuMemory:
        """
        Whole blocks of 2 MiB, of which nobody else has a part: their handle shows others nothing else.
        """

    def export_memory(self, address: int, nbytes: int) -> tuple[bytes, int]:
        """
        The handle of the allocation that these bytes lie in, whoever made it, and their offset in it: others open
        offset + nbytes of it. ValueError: not in one allocation. GpuError: one that cannot be exported (mapped piece
        by piece, as torch's expandable segments are).
        """

    def open_ipc(self, handle: bytes, nbytes: int) -> GpuMapping:
        """
        The first nbytes of another process's allocation, on any device that this one's can reach. GpuError: fewer
        bytes, a handle of this process, or one whose memory or process is gone.
        """

    def address_range(self, address: int) -> tuple[int, int]:
        """
        Base and size of the allocation, or of the mapping, that it lies in. GpuError: in none.
        """

    def check_range(self, address: int, nbytes: int) -> None:
        """ValueError: the bytes do not lie in one allocation, which is named."""

    def check_pages(self, pages: GpuPages) -> None:
        """`check_range` of every tensor: bases[t] to the end of its last page."""

    def device_uuid(self) -> bytes:
        """16 bytes, the same in every process."""

    def device_memory_info(self) -> tuple[int, int]:
        """Bytes free on the device, and all it has."""

    def read(self, address: int, nbytes: int) -> bytes:
        """
        At most 4096 bytes of the device, at once: it waits for nothing that was issued before. GpuError: not done in
        10 s. GIL released. The address is the caller's word.
        """

    def gather_part(
        self,
        pages: GpuPages,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot_address: int,
        stream: int | None = None,
        header: Buffer = b"",
        last_bytes: int | None = None,
    ) -> GpuCopy:
        """
        Pool to slot on one device, or devices that reach each other: the rows of page_ids laid end to end; their
        [byte_offset, byte_offset + nbytes), which touches every page named (so byte_offset < row_bytes), goes to
        slot_address, and the header, at most 64 bytes, right before it. A block that is not there is zeros, and so is
        of each tensor of the last page what lies behind its first last_bytes (None: nothing): nobody reads it. stream
        None: `gather_stream`. Fast where all addresses and sizes are multiples of 16.

        IndexError (page id) or ValueError (any other bound) before a byte has moved.
        """

    def gather_part_summed(
        self,
        pages: GpuPages,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot_address: int,
        stream: int | None = None,
        header: Buffer = b"",
        last_bytes: int | None = None,
    ) -> GpuCopy:
        """
        `gather_part`, and adds up what is in the slot: `GpuCopy.checksum`, which is also added to the last 8 bytes of a
        header, a little-endian number. GpuError: the driver takes no kernels, or 1024 sums are held.
        """

    def scatter_part(
        self,
        pages: GpuPages,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot_address: int,
        stream: int | None = None,
    ) -> GpuCopy:
        """
        The reverse of `gather_part`, without blocks that are not there, on `scatter_stream`; an id named twice is a
        ValueError as well.
        """

    def scatter_part_summed(
        self,
        pages: GpuPages,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot_address: int,
        stream: int | None = None,
    ) -> GpuCopy:
        """
        `scatter_part`, and adds up what is in the slot: `GpuCopy.checksum`. GpuError as of `gather_part_summed`.
        """

    def add_up(self, address: int, nbytes: int, stream: int | None = None) -> GpuCopy:
        """
        The `part_checksum` of device memory, as `GpuCopy.checksum`; on `scatter_stream`.
        """

    def move_pages(
        self,
        source: GpuPages,
        source_ids: NDArray[numpy.int64],
        target: GpuPages,
        target_ids: NDArray[numpy.int64],
        stream: int | None = None,
    ) -> GpuCopy:
        """
        The pages source_ids of one pool into the pages target_ids of another of the same shape, neither in blocks, on
        one device; their bytes do not overlap. On `scatter_stream`. ValueError or IndexError before a byte has moved.
        """

    def zero_pages(self, pages: GpuPages, page_ids: NDArray[numpy.int64], stream: int | None = None) -> GpuCopy:
        """
        All bytes of these pages become zero; on `scatter_stream`. ValueError: pages in blocks.
        """

    def zero_page_from(
        self, pages: GpuPages, page_id: int, start: int, first_piece: int = 0, stream: int | None = None
    ) -> GpuCopy:
        """
        In the fragments of pieces [first_piece, pieces) of a page: bytes [start, fragment_bytes) become zero; on
        `scatter_stream`. ValueError: pages in blocks.
        """

    def prepare_sums(self) -> None:
        """
        Makes the places of sums, so that no `_summed` part does: it may wait for the device; GIL released. GpuError:
        the driver takes no kernels, or memory cannot be had or pinned. Idempotent.
        """

    @property
    def has_kernels(self) -> bool:
        """
        Otherwise parts move by the driver's copies, which is slow, and nothing is added up.
        """

    @property
    def gather_stream(self) -> int: ...
    @property
    def scatter_stream(self) -> int: ...

class GpuMemory:
    """
    A plain allocation on the device, freed with this object. What it holds at first is anything.
    `torch.as_tensor(memory, device=...)` is a tensor of uint8 over it, which keeps it.
    """

    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    def leave(self) -> None:
        """
        It stays until this process ends, also without this object. Others that were given its handle may have it
        mapped, and under them it must not be freed. Idempotent.
        """

    def ipc_handle(self) -> bytes:
        """
        64 bytes by which other processes map it (`GpuCopyEngine.open_ipc`), as long as it is here.
        """

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """uint8, one dimension, version 3."""

class GpuMapping:
    """
    Memory of another process, mapped until it is closed or this object ends. The exporter's end does not end it.
    """

    @property
    def address(self) -> int:
        """ValueError: it is closed."""

    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int:
        """As many bytes as were asked for."""

    def close(self) -> None:
        """
        Nobody may use the address any more: no copy under way, no tensor over it.
        """

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """As that of GpuMemory."""

class PinnedBuffer:
    """
    A writable buffer, pinned and exported as long as this lives: anonymous or shared memory (/dev/shm, memfd).
    GpuError says why it cannot be pinned. To pin and to unpin takes up to seconds; GIL released.
    """

    def __init__(self, engine: GpuCopyEngine, buffer: Buffer) -> None: ...

class GpuPinner:
    """
    Pins memory for an engine's device, whose context stays as long as this and what it has pinned.
    """

    def __init__(self, engine: GpuCopyEngine) -> None: ...
    def pin(self, buffer: Buffer) -> PinnedBuffer:
        """See `PinnedBuffer`."""

def gpu_device_count(library: str = "libcuda.so.1", api: Literal["cuda", "hip"] = "cuda") -> int:
    """GpuUnavailable: no driver, or no device."""

def gpu_device_uuid(ordinal: int, library: str = "libcuda.so.1", api: Literal["cuda", "hip"] = "cuda") -> bytes:
    """16 bytes, the same in every process, whatever devices it sees."""

def gpu_spare_stacks() -> None:
    """
    This process's contexts have no memory for kernels' stacks: 264 MiB less on an H200. Before the first of them, in a
    process of kvferry's own: another's kernel that recurses would find no stack.
    """

def gpu_device_ordinal(uuid: bytes, library: str = "libcuda.so.1", api: Literal["cuda", "hip"] = "cuda") -> int:
    """
    Number of the device in this process. ValueError: this process does not see it.
    """

class GpuWaiter:
    """
    One thread waits for many copies: it sleeps while there are none, and learns of an end within some 20 us.
    """

    def __init__(self) -> None: ...
    def add(self, copy: GpuCopy) -> None:
        """
        From any thread; a `wait` that runs includes it. ValueError: 65536 are waited for already.
        """

    def wait(self, seconds: float) -> list[GpuCopy]:
        """
        Those that ended, well or not (`done` tells), at least one unless the time is up or `wake` was called; no
        other `wait` returns them. GIL released.
        """

    def wake(self) -> None:
        """The `wait` that runs, or else the next one, returns at once."""

    def __len__(self) -> int:
        """Copies that no `wait` has returned."""

class HostPages:
    """
    Pages in a buffer of host memory: fragment tensor * pieces + piece of page p is the fragment_bytes at
    offsets[tensor] + p * strides[tensor] + piece * piece_stride; a page's row is its fragments one behind the other.

    So page-major pools are one tensor of one piece, layer-major ones a tensor for each layer's K and V, and a range of
    heads of NHD pages is pieces = tokens, piece_stride = a token's bytes, fragment_bytes = those of the heads.

    in_blocks: a page is of `pieces` blocks of an engine, each wherever it is, and named by their ids, `pieces` a page
    and -1 for one that is not there. Block b is the fragment_bytes at offsets[tensor] + b * strides[tensor];
    piece_stride is 0, `pages` counts blocks, and a page's row is what it is otherwise: tensor for tensor its blocks.

    The buffer is writable, and stays exported until `close`. ValueError, names the field: the buffer is too small, or
    any other bound.
    """

    def __init__(
        self,
        buffer: Buffer,
        offsets: NDArray[numpy.int64],
        strides: NDArray[numpy.int64],
        pieces: int,
        piece_stride: int,
        fragment_bytes: int,
        pages: int,
        in_blocks: bool = False,
    ) -> None: ...
    @property
    def fragments(self) -> int:
        """Fragments of a page."""

    @property
    def fragment_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def pages(self) -> int:
        """Ids are 0 to pages - 1; of blocks, in blocks."""

    @property
    def ids_a_page(self) -> int:
        """Ids that name a page: 1, or in blocks the number of them."""

    def gather_part(
        self,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot: Buffer,
        slot_offset: int = 0,
        threads: int = 1,
        last_bytes: int | None = None,
    ) -> None:
        """
        The rows of page_ids laid end to end; their [byte_offset, byte_offset + nbytes), which touches every page
        named (so byte_offset < row_bytes), goes to slot[slot_offset:]. A block that is not there is zeros, and so is
        of each tensor of the last page what lies behind its first last_bytes (None: nothing): nobody reads it. GIL
        released.

        IndexError (page id) or ValueError (any other bound, or the slot lies in the pages) before a byte has
        moved.
        """

    def gather_part_summed(
        self,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot: Buffer,
        slot_offset: int = 0,
        threads: int = 1,
        last_bytes: int | None = None,
    ) -> int:
        """`gather_part`, and the `part_checksum` of what is in the slot."""

    def scatter_part(
        self,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot: Buffer,
        slot_offset: int = 0,
        threads: int = 1,
    ) -> None:
        """
        The reverse of `gather_part`, without blocks that are not there; an id named twice is a ValueError as well.
        """

    def scatter_part_summed(
        self,
        page_ids: NDArray[numpy.int64],
        byte_offset: int,
        nbytes: int,
        slot: Buffer,
        slot_offset: int = 0,
        threads: int = 1,
    ) -> int:
        """`scatter_part`, and the `part_checksum` of what is in the slot."""

    def zero_page_from(self, page_id: int, start: int, first_piece: int = 0) -> None:
        """
        In the fragments of pieces [first_piece, pieces) of a page: bytes [start, fragment_bytes) become zero.
        ValueError: pages in blocks.
        """

    def close(self) -> None:
        """
        Lets go of the buffer; later calls are ValueErrors. ValueError: a call is running in another thread.
        """

def part_checksum(buffer: Buffer) -> int:
    """
    A 64-bit sum over the bytes, the same that the `_summed` copies make of a part here and on a GPU. GIL released.

    Finds every change within one aligned group of 4 bytes; anything else is missed with a chance near 2**-64 as
    long as nobody looks for bytes with the same sum (csrc/copies/part_sum.h has the details): accidents, not
    attacks.
    """

class HeldIndex:
    """
    The digests whose pages are readable, in memory that other processes map: see csrc/radix/held_index.h. This end
    writes; the memory is empty from now on.
    """

    def __init__(self, memory: Buffer) -> None:
        """ValueError: of less than `bytes_for(1)`, or not aligned to 64."""

    @staticmethod
    def bytes_for(pages: int) -> int:
        """Bytes of an index for so many pages of all tiers."""

    def beat(self, now: int) -> None:
        """
        Says that the writer lives, in nanoseconds of CLOCK_MONOTONIC; 0: it has ended.
        """

    def close(self) -> None:
        """Lets the memory go. No pool may publish to it any more. Idempotent."""

class HeldIndexReader:
    """Another process's HeldIndex."""

    def __init__(self, memory: Buffer) -> None:
        """ValueError: it is no index."""

    @property
    def last_beat(self) -> int:
        """
        When the writer last said that it lives, in nanoseconds of CLOCK_MONOTONIC; 0: it has ended.
        """

    def held_pages(self, digests: Digests, namespace_id: bytes) -> int:
        """
        The number of first pages of a prompt that were readable just now, of any tier. They may be gone by the time
        they are asked for.
        """

    def close(self) -> None:
        """Lets the memory go. Idempotent."""

class PoolExhausted(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""

class PagePool:
    """
    See `kvferry.radix.pool.PagePool`, which adds the states' names. Page states are the numbers of PageState.
    """

    def __init__(self, pages: int, tier: str = "device") -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def free(self) -> int:
        """Pages in state FREE."""

    @property
    def log_frees(self) -> bool:
        """
        Whether freed ids are collected for `take_freed`. Off at first; turning it off drops what was
        collected.
        """

    @log_frees.setter
    def log_frees(self, arg: bool, /) -> None: ...
    def take_freed(self) -> list[int]:
        """
        Ids freed since the last call, in that order; one that was freed twice is there twice.
        """

    @property
    def log_readable(self) -> bool:
        """
        Whether changes are collected for `take_readable`. Off at first; turning it off drops what was
        collected.
        """

    @log_readable.setter
    def log_readable(self, arg: bool, /) -> None: ...
    def take_readable(self) -> list[int]:
        """
        Since the last call, in that order: a page that became readable, ~page for one that ceased to be. Readable on
        the device are CACHED and SPILLING pages, on the host CACHED and RESTORING ones.
        """

    def allocate(self, n: int, state: int = 1) -> list[int]:
        """
        `n` page ids, ascending: the smallest run that holds them all, else as few runs as can be. They become
        LEASED, ARRIVING, SPILLING or RESTORING.

        PoolExhausted if fewer are free.
        """

    def claim(self, pages: Pages, state: int) -> None:
        """These FREE pages become LEASED or CACHED."""

    def free_pages(self, pages: Pages) -> None:
        """Any state but FREE -> FREE, with a new generation."""

    def move(self, pages: Pages, source: int, target: int) -> None:
        """
        Each page must be in `source`, and the change one that the life of a page has; use free_pages for FREE.
        """

    def expect(self, pages: int) -> None:
        """Has room for so many, so that to grow up to them moves nothing."""

    def grow(self, pages: int) -> None:
        """So many pages instead of fewer: those that come behind are FREE."""

    def resize(self, pages: int) -> None:
        """
        Another number of pages, all FREE, with generations that none had before. All must be FREE now.
        """

    def states(self, pages: Pages) -> bytes:
        """The state of each page, one byte each."""

    def state_code(self, page: int) -> int: ...
    def generation(self, page: int) -> int: ...
    def count_list(self) -> list[int]:
        """Pages by state, in the states' order."""

    def name_pages(self, pages: Pages, digests: Digests, namespace_id: bytes) -> None:
        """
        Says whose pages these are, before they are readable: 32 bytes for each, and for their namespace.
        """

    def publish(self, index: HeldIndex | None) -> None:
        """
        Has every readable page that has a name in `index`, from now on; None: in none. The index it was in before
        is left as it is.
        """

    def check(self) -> None:
        """Recounts everything; for tests."""

PROMPT: int = 0

OUTPUT: int = 1

SPILL: int = 0

BACKUP: int = 1

RESTORE: int = 2

def policy_names() -> list[str]: ...

class Clock:
    """Shared by the trees of one side."""

    def __init__(self) -> None: ...
    @property
    def now(self) -> float:
        """Seconds; set by the owner. 0.0 at first."""

    @now.setter
    def now(self, arg: float, /) -> None: ...
    @property
    def tick(self) -> int:
        """
        Grows with every lock, unlock and insert of a tree that has this clock: the order of use is exact.
        """

class Policy:
    """
    An eviction policy, to be shared by trees that are compared. ValueError: unknown name or parameter.
    """

    def __init__(self, name: str, evict_output_first: bool = False, **params: float) -> None: ...
    def on_pool(self, pages: int) -> None:
        """
        Pages that its trees are over, in both tiers, where that is more than when they were made.
        """

    @property
    def name(self) -> str: ...
    @property
    def evict_output_first(self) -> bool: ...

class Match:
    """
    The longest held prefix of a list of digests. Good until the tree's next change of structure.
    """

    @property
    def pages(self) -> int:
        """Pages on the device or the host; arriving ones count."""

    @property
    def device_pages(self) -> int:
        """The leading ones that have a page on the device."""

class Lock:
    """Holds a path from the root, `pages` pages long."""

    @property
    def pages(self) -> int: ...
    @property
    def device_pages(self) -> int:
        """
        The leading ones that have a page on the device now: grows when they are restored.
        """

    @property
    def released(self) -> bool: ...
    @property
    def tree(self) -> PagedRadixTree: ...

class InsertResult:
    @property
    def existing(self) -> int:
        """Leading pages of the whole list that had a device page before."""

    @property
    def duplicates(self) -> list[int]:
        """
        Of the caller's pages, those whose digests had one: the caller frees them.
        """

    @property
    def match(self) -> Match:
        """Match of the whole list."""

class Copy:
    """
    What the caller is to copy between the tiers, page by page, and then to end by `finish_copy`.
    """

    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> int:
        """SPILL and BACKUP: device to host. RESTORE: host to device."""

    @property
    def device(self) -> list[int]: ...
    @property
    def host(self) -> list[int]:
        """In the order of `device`."""

    @property
    def digests(self) -> bytes:
        """32 bytes a page."""

    @property
    def parents(self) -> bytes:
        """
        32 bytes a page: the digest of the page before it; zeros for the first of a prompt.
        """

    @property
    def outputs(self) -> bytes:
        """1 byte a page: 1 for output."""

class Evicted:
    @property
    def freed(self) -> list[int]:
        """Device pages, FREE."""

    @property
    def dropped(self) -> int:
        """Of the freed pages, how many had no host page: what they held is lost."""

    @property
    def spill(self) -> Copy | None:
        """
        Device pages that are FREE when this copy has ended, if nobody locks them before.
        """

class Finished:
    @property
    def freed(self) -> list[int]:
        """Device pages that are FREE now."""

    @property
    def readable(self) -> list[int]:
        """Restored device pages."""

    @property
    def lost(self) -> list[int]:
        """Device pages whose restore failed and that others wait for: ARRIVING."""

    @property
    def removed(self) -> list[int]:
        """
        Device pages that left the tree, since theirs or one before them failed and nobody waits for it; in the
        state they have, the caller's to free.
        """

class Flushed:
    @property
    def device(self) -> int:
        """Device pages freed."""

    @property
    def host(self) -> int:
        """Host pages freed."""

    @property
    def skipped(self) -> int:
        """Pages of nodes that stay."""

class Recovered:
    """
    How many of the pages given are in the tree, kept as orphans, and freed.
    """

    @property
    def attached(self) -> int: ...
    @property
    def orphans(self) -> int: ...
    @property
    def dropped(self) -> int: ...

class NodeView:
    @property
    def depth(self) -> int:
        """Pages before it; of an orphan, some of those."""

    @property
    def pages(self) -> int: ...
    @property
    def first_digest(self) -> bytes: ...
    @property
    def last_digest(self) -> bytes: ...
    @property
    def device(self) -> bool: ...
    @property
    def host(self) -> bool: ...
    @property
    def locks(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def output(self) -> bool: ...
    @property
    def orphan(self) -> bool: ...
    @property
    def copying(self) -> bool: ...
    @property
    def accessed_s(self) -> float: ...

class PagedRadixTree:
    """
    One namespace's pages over a device pool and, maybe, a host pool. No policy: LRU. No clock: one of its own. How it
    works as a whole, and what it raises: `kvferry.radix.tree`.

    write_through_hits: locks after which `backups` copies a node to the host; 0: never.
    """

    def __init__(
        self,
        device: PagePool,
        host: PagePool | None = None,
        policy: Policy | None = None,
        clock: Clock | None = None,
        write_through_hits: int = 0,
    ) -> None: ...
    def match(self, digests: Digests) -> Match:
        """The longest held prefix, on either tier. Changes nothing."""

    def match_pages(self, match: Match) -> list[int]:
        """
        Device page ids of the match, in order: `match.device_pages` of them. It must be of this tree as it is now.
        Changes nothing.
        """

    def lock(self, match: Match, priority: int = 0) -> Lock:
        """
        Holds the matched path. The match must be of this tree as it is now. A node's priority is the least given.
        """

    def unlock(self, lock: Lock) -> None:
        """
        Gives a lock up. No page may be ARRIVING that it was the last to hold: that is `prune`.
        """

    def relock(self, lock: Lock, longer: Match) -> None:
        """
        Moves a lock on to a longer match behind its end, such as what its holder inserted. This is no hit.
        """

    def path_pages(self, lock: Lock) -> list[int]:
        """
        Device page ids of the locked path, in order: `lock.device_pages` of them.
        """

    def path_rows(self, lock: Lock) -> list[int]:
        """
        Host page ids of the locked path, in order; an AssertionError where a page of it is not on the host.
        """

    def insert(self, digests: Digests, pages: Pages, start: int = 0, kind: int = 0, priority: int = 0) -> InsertResult:
        """
        pages[i] is of digest start + i; digests before `start` must be held on the device, else ValueError. What is
        held on the device wins; a node that is on the host only takes the page given.

        New LEASED pages become CACHED. New ARRIVING pages stay so, and the caller locks them before anything else
        happens; one for a page that the host holds is an AssertionError: that is `restore`. Duplicates keep their
        state. kind: PROMPT or OUTPUT, of new nodes.
        """

    def insert_host(
        self, digests: Digests, rows: Pages, start: int = 0, kind: int = 0, priority: int = 0
    ) -> InsertResult:
        """
        rows[i], a LEASED page of the host, is of digest start + i: CACHED from now on, and its page on the host alone.
        Digests before `start` must be held, else ValueError. What is held already wins, whatever tier it is in, and
        duplicates stay LEASED. kind: PROMPT or OUTPUT, of new nodes.
        """

    def arrived(self, pages: Pages) -> None:
        """ARRIVING -> CACHED: their bytes are there and verified."""

    def prune(self, lock: Lock, start: int) -> list[int]:
        """
        Releases the lock and takes what only it held, from page index `start` of its path on, out of the tree.

        Returns the device pages, path order first, in the state they had, for the caller to free; those that a copy
        names are freed when it ends. Host copies are freed. No page before `start` may be ARRIVING that this lock
        was the last to hold.
        """

    def evict(self, pages: int, host_room: int | None = None) -> Evicted:
        """
        Up to `pages` device pages of unlocked leaves, in the policy's order, cutting a long leaf at its tail:
        exactly that many if so many can go.

        What has a host copy is freed at once. What has none is spilled if the host has free pages for it, and no
        more than `host_room` are spilled with it; else it is freed at once, with what hangs below.
        """

    def evict_with_room(self, pages: int, host_room: int | None = None) -> Evicted:
        """
        As `evict`, but it ends where a leaf would have to be dropped that more room on the host could save.
        """

    def evict_host(self, pages: int) -> int:
        """
        Frees up to `pages` host pages: first copies of what is on the device, then host leaves. Returns how many.
        """

    def oldest(self) -> tuple[int, float] | None:
        """
        (group, value) of what `evict` would take next: least first among trees of one policy and clock.
        """

    def oldest_host(self) -> tuple[int, float] | None:
        """The same of `evict_host`; group -1 is a copy of what is on the device."""

    def backups(self, pages: int) -> Copy | None:
        """
        Copies to the host what was locked `write_through_hits` times and has no host copy, at most `pages` pages,
        and only into FREE ones.
        """

    def backups_ahead(self, pages: int, ahead: int) -> Copy | None:
        """
        Copies to the host what it lacks of the next `ahead` pages that `evict` would take, at most `pages` pages, and
        only into FREE ones.
        """

    def restore(self, lock: Lock, pages: Pages) -> Copy | None:
        """
        Gives LEASED device pages to the host-only pages of the path, as many as there are. The copy holds the path
        until it ends. None if there are none.
        """

    def finish_copy(self, copy_id: int, failed: Pages = ()) -> Finished:
        """
        The copy has ended. failed: device ids of the copy whose bytes are not right.
        """

    def flush(self) -> Flushed:
        """
        Takes away what is unlocked, not under a copy, and has nothing below that stays.
        """

    def forget_device(self) -> int:
        """
        The device's memory is gone: pages with a host copy are on the host only, others are freed, and what hung
        below those are orphans. Nothing may be locked, arriving or under a copy. Returns how many pages it held.
        """

    def begin_recovery(self) -> None:
        """
        From now on pages are found by their digests, which is what `recover` does. Called of a tree that is empty, this
        costs nothing; the first `recover` does it, too.
        """

    def end_recovery(self) -> None:
        """Lets go of what `recover` finds pages by, some 30 bytes a page."""

    def recover(self, digests: Digests, parents: Digests, host_pages: Pages, outputs: Buffer = b"") -> Recovered:
        """
        LEASED host pages become CACHED ones of the tree. parents: the digest before each page, zeros for the first
        of a prompt. The order is of no matter. What is there already, or has no beginning, is freed.
        """

    def dump(self, limit: int) -> list[NodeView]:
        """At most `limit` nodes, depth first."""

    def check(self) -> None:
        """Recounts everything; for tests."""

    @property
    def device(self) -> PagePool: ...
    @property
    def host(self) -> PagePool | None: ...
    @property
    def write_through_hits(self) -> int: ...
    @property
    def pages(self) -> int:
        """Pages on the device."""

    @property
    def cached(self) -> int:
        """Device pages that are readable."""

    @property
    def arriving(self) -> int: ...
    @property
    def restoring(self) -> int: ...
    @property
    def version(self) -> int:
        """Another one after each change of structure."""

    @property
    def evictable(self) -> int:
        """Device pages of unlocked nodes, also those under a copy."""

    @property
    def spilling(self) -> int:
        """Device pages that would be freed if every spill ended now."""

    @property
    def host_pages(self) -> int: ...
    @property
    def host_evictable(self) -> int:
        """Host pages that `evict_host` could free."""

    @property
    def orphans(self) -> int:
        """Host pages whose parent is not known."""

    @property
    def nodes(self) -> int:
        """Nodes without the root."""

    @property
    def locks(self) -> int:
        """Handles that are not released."""

    @property
    def copies(self) -> int:
        """Copies in flight."""

    @property
    def index_bytes(self) -> int:
        """Memory that the index holds, about."""
