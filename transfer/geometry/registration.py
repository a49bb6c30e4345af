"""An engine's own memory as it names it to a daemon: for each rank the memories that its tensors lie in, and where the
pages of each tensor lie, or the blocks of which the engine makes pages. No I/O: who maps the memories gives their
addresses.

Every field is judged before anything is mapped: how many tensors there are and how long a page is follow from the
geometry and the storage; a tensor's pages must lie in its memory, and no two pages may share a byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.layouts import BlockStorage, Int64s, RankStorage, Storages
from kvferry.transfer.geometry.rank_lanes import rank_geometry

MAX_TENSORS = 1 << 14  # of blocks
MAX_BLOCKS = 1 << 24
MAX_BLOCKS_A_PAGE = 256  # kMostBlocksAPage of csrc/copies/page_layout.h: a launch names a page by all of them
IPC_HANDLE_BYTES = 64
DEVICE_UUID_BYTES = 16
MAX_PAGES = (1 << 31) - 1
MAX_BYTES = 1 << 48  # of a memory
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
DAEMONS_FILE = re.compile(r"kvferry-[0-9a-f]{32}-")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file in the daemon's folder of shared memory."""

    name: str


@dataclass(frozen=True, slots=True)
class GpuAllocation:
    ipc_handle: bytes  # of the whole allocation
    device_uuid: bytes


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    source: SharedFile | GpuAllocation
    nbytes: int  # from its beginning


@dataclass(frozen=True, slots=True)
class RegisteredTensor:
    """Page p has `page_bytes` bytes from byte offset + p * page_stride of its memory on."""

    memory: int  # index
    offset: int
    page_stride: int
    page_bytes: int
    cache: int = 0  # of the geometry's caches

    def extent(self, pages: int) -> int:
        """Bytes from its first page to the end of its last."""
        return (pages - 1) * self.page_stride + self.page_bytes


@dataclass(frozen=True, slots=True)
class RegisteredRank:
    memories: tuple[RegisteredMemory, ...]
    tensors: tuple[RegisteredTensor, ...]

    def pages(self, cache: KVGeometry, number: int, pages: int, addresses: Sequence[int]) -> RankStorage:
        """The place of one of the rank's caches, which has this geometry of its own and this number. `addresses`: where
        each memory begins."""
        starts, strides = self._places(number, addresses)
        inside = cache.layers * cache.tensors // len(starts)  # K and V tensors of a layer in each
        size = cache.page_bytes // (cache.layers * cache.tensors)
        bases = (starts[:, None] + np.arange(inside, dtype=np.int64) * size).ravel()
        return RankStorage(cache, bases, np.repeat(strides, inside), pages)

    def blocks(
        self, cache: KVGeometry, number: int, per_page: int, blocks: int, addresses: Sequence[int]
    ) -> BlockStorage:
        """Likewise where it registered `blocks` blocks, `per_page` of them a page."""
        starts, strides = self._places(number, addresses)
        return BlockStorage(cache, starts, strides, self.of_cache(number)[0].page_bytes, blocks, per_page)

    def of_cache(self, number: int) -> list[RegisteredTensor]:
        """The tensors of one cache."""
        return [tensor for tensor in self.tensors if tensor.cache == number]

    def _places(self, number: int, addresses: Sequence[int]) -> tuple[Int64s, Int64s]:
        """Where the cache's tensors begin, and their strides."""
        tensors = self.of_cache(number)
        starts = np.array([addresses[tensor.memory] + tensor.offset for tensor in tensors], np.int64)
        return starts, np.array([tensor.page_stride for tensor in tensors], np.int64)


class TensorShape(NamedTuple):
    """The tensors that a rank is to register of a cache: how many and why, and what a page (or block) has in each."""

    tensors: int
    counted: str
    page_bytes: int
    sized: str


@dataclass(frozen=True, slots=True)
class Registration:
    """`block_tokens` 0: pages, which the daemon gives out. Else the `pages` are blocks of so many tokens, which the
    engine names, and tensors are of blocks. `stows`: computed prompts may be moved out of them."""

    pages: int
    order: StorageOrder
    ranks: tuple[RegisteredRank, ...]
    block_tokens: int = 0
    stows: bool = False

    def storages(self, rank: int, geometry: KVGeometry, addresses: Sequence[int]) -> Storages:
        """The places of a rank's caches, which has this geometry of its own. `addresses`: where each of its memories
        begins."""
        registered, caches = self.ranks[rank], enumerate(geometry.caches)
        if self.block_tokens:
            per_page = geometry.page_size // self.block_tokens
            return tuple(registered.blocks(cache, i, per_page, self.pages, addresses) for i, cache in caches)
        return tuple(registered.pages(cache, i, self.pages, addresses) for i, cache in caches)

    @property
    def on_gpus(self) -> bool:
        return isinstance(self.ranks[0].memories[0].source, GpuAllocation)

    @staticmethod
    def from_proto(message: wire.EnginePool, geometry: KVGeometry, ranks: int) -> Registration:
        """Reads the registration of a pool of the model's `geometry` over so many ranks. ValueError: field, its value
        and the bound."""
        storage = message.storage or common.STORAGE_PAGE_MAJOR
        if int(storage) not in {int(order) for order in StorageOrder}:
            raise ValueError(f"pool.storage is {storage}; it must be one of {[int(order) for order in StorageOrder]}")
        order = StorageOrder(storage)
        _bound("pool.pages", message.pages, 1, MAX_PAGES)
        if len(message.ranks) != ranks:
            raise ValueError(f"pool.ranks has {len(message.ranks)} entries; this daemon's --ranks is {ranks}")
        caches = rank_geometry(geometry, ranks).caches
        found = tuple(
            _rank(f"pool.ranks[{i}]", each, _shapes(f"pool.ranks[{i}]", each, caches, order, message), message.pages)
            for i, each in enumerate(message.ranks)
        )
        _check_sources(found)
        return Registration(message.pages, order, found, message.block_tokens, message.stows)

    def to_proto(self) -> wire.EnginePool:
        message = wire.EnginePool(
            pages=self.pages,
            storage=common.Storage.Name(int(self.order)),
            block_tokens=self.block_tokens,
            stows=self.stows,
        )
        for rank in self.ranks:
            to = message.ranks.add()
            for memory in rank.memories:
                entry = to.memories.add(nbytes=memory.nbytes)
                if isinstance(memory.source, SharedFile):
                    entry.file.name = memory.source.name
                else:
                    entry.gpu.ipc_handle = memory.source.ipc_handle
                    entry.gpu.device_uuid = memory.source.device_uuid
            for tensor in rank.tensors:
                to.tensors.add(
                    memory=tensor.memory,
                    offset=tensor.offset,
                    page_stride=tensor.page_stride,
                    page_bytes=tensor.page_bytes,
                    cache=tensor.cache,
                )
        return message


def tensors_of(cache: KVGeometry, order: StorageOrder) -> tuple[int, int]:
    """(how many a rank registers of a cache of this geometry, bytes of a page in each)."""
    planes = cache.layers * cache.tensors
    count = {StorageOrder.PAGE_MAJOR: 1, StorageOrder.LAYER_BLOCKS: cache.layers}.get(order, planes)
    return count, cache.page_bytes // count


def _bound(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field} is {value}; it must be {low} to {high}")


def _shapes(
    field: str, message: wire.EngineRank, caches: Sequence[KVGeometry], order: StorageOrder, pool: wire.EnginePool
) -> list[TensorShape]:
    """The tensors that a rank with these caches is to register, of each."""
    if pool.block_tokens:
        _check_blocks(field, message, caches[0], order, pool)
        return [_block_shape(field, number, cache, pool) for number, cache in enumerate(caches)]
    return [_page_shape(cache, order) for cache in caches]


def _page_shape(cache: KVGeometry, order: StorageOrder) -> TensorShape:
    count, page_bytes = tensors_of(cache, order)
    planes = f"{cache.layers} layers of {cache.tensors} tensors in storage {order.name}"
    page = f"a page of {cache.page_size} tokens, {cache.kv_heads} heads of {cache.head_dim} {cache.dtype}"
    return TensorShape(count, f"{planes} have {count}", page_bytes, f"{page} has {page_bytes} there")


def _check_blocks(
    field: str, message: wire.EngineRank, geometry: KVGeometry, order: StorageOrder, pool: wire.EnginePool
) -> None:
    if geometry.layout is not Layout.ENGINE or order is not StorageOrder.PAGE_MAJOR:
        raise ValueError(
            f"pool.block_tokens is {pool.block_tokens}, in layout {geometry.layout.name} and storage {order.name}; "
            "blocks take layout ENGINE and storage PAGE_MAJOR"
        )
    if geometry.page_size % pool.block_tokens:
        raise ValueError(
            f"pool.block_tokens is {pool.block_tokens}; a page of {geometry.page_size} tokens is no whole "
            "number of such blocks"
        )
    if geometry.page_size // pool.block_tokens > MAX_BLOCKS_A_PAGE:
        raise ValueError(
            f"pool.block_tokens is {pool.block_tokens}; a page of {geometry.page_size} tokens has at most "
            f"{MAX_BLOCKS_A_PAGE} blocks"
        )
    _bound("pool.pages", pool.pages, 1, MAX_BLOCKS)
    _bound(f"{field}.tensors, the number of entries,", len(message.tensors), 1, MAX_TENSORS)


def _block_shape(field: str, number: int, cache: KVGeometry, pool: wire.EnginePool) -> TensorShape:
    count, counted = _tensors_of(pool.ranks[0], number), "those of pool.ranks[0]"
    if runs := cache.head_runs:
        count = cache.layers * runs * cache.kv_heads
        counted = f"{cache.layers} layers of {cache.kv_heads} heads with geometry.head_runs {runs}"
    per_page = cache.page_size // pool.block_tokens
    if not count or cache.page_bytes % (count * per_page * pool.block_tokens):
        raise ValueError(
            f"{_tensors(field, number)} has {count} entries; a page of {cache.page_bytes} bytes in {per_page} blocks "
            f"of {pool.block_tokens} tokens cannot have equal parts in so many"
        )
    block_bytes = cache.page_bytes // (count * per_page)
    sized = f"a block of {pool.block_tokens} tokens in {count} tensors has {block_bytes} there"
    return TensorShape(count, f"{counted} have {count}", block_bytes, sized)


def _tensors_of(message: wire.EngineRank, number: int) -> int:
    return sum(tensor.cache == number for tensor in message.tensors)


def _tensors(field: str, number: int) -> str:
    return f"{field}.tensors of cache {number}" if number else f"{field}.tensors"


def _rank(field: str, message: wire.EngineRank, shapes: Sequence[TensorShape], pages: int) -> RegisteredRank:
    for number, shape in enumerate(shapes):
        if (count := _tensors_of(message, number)) != shape.tensors:
            raise ValueError(f"{_tensors(field, number)} has {count} entries; {shape.counted}")
    total = sum(shape.tensors for shape in shapes)
    if len(message.tensors) != total:
        other = next(tensor.cache for tensor in message.tensors if tensor.cache >= len(shapes))
        raise ValueError(f"{field}.tensors[].cache is {other}; it must be 0 to {len(shapes) - 1}")
    if not 1 <= len(message.memories) <= total:
        raise ValueError(f"{field}.memories has {len(message.memories)} entries; it must have 1 to {total}")
    memories = tuple(_memory(f"{field}.memories[{i}]", each) for i, each in enumerate(message.memories))
    tensors = tuple(RegisteredTensor(t.memory, t.offset, t.page_stride, t.page_bytes, t.cache) for t in message.tensors)
    for i, tensor in enumerate(tensors):
        name, shape = f"{field}.tensors[{i}]", shapes[tensor.cache]
        _bound(f"{name}.memory", tensor.memory, 0, len(memories) - 1)
        if tensor.page_bytes != shape.page_bytes:
            raise ValueError(f"{name}.page_bytes is {tensor.page_bytes}; {shape.sized}")
        _bound(f"{name}.page_stride", tensor.page_stride, shape.page_bytes, MAX_BYTES)
        nbytes = memories[tensor.memory].nbytes
        if tensor.offset + tensor.extent(pages) > nbytes:
            raise ValueError(
                f"{name} ends at byte {tensor.offset + tensor.extent(pages)} (offset {tensor.offset}, {pages} pages of "
                f"stride {tensor.page_stride}); {field}.memories[{tensor.memory}] has {nbytes} bytes"
            )
    inside: dict[int, list[tuple[int, RegisteredTensor]]] = {i: [] for i in range(len(memories))}
    for k, tensor in enumerate(tensors):
        inside[tensor.memory].append((k, tensor))
    for i, those in inside.items():
        if not those:
            raise ValueError(f"{field}.memories[{i}] has no tensor in it")
        _check_apart(field, those, pages)
    return RegisteredRank(memories, tensors)


def _memory(field: str, message: wire.EngineMemory) -> RegisteredMemory:
    _bound(f"{field}.nbytes", message.nbytes, 1, MAX_BYTES)
    kind = message.WhichOneof("kind")
    if kind == "file":
        name = message.file.name
        if not FILE_NAME.fullmatch(name) or DAEMONS_FILE.match(name):
            raise ValueError(
                f"{field}.file.name is {name[:128]!r}; it must be 1 to 128 letters, digits, '_', '.' or '-', the first "
                "a letter or digit, and no daemon's own"
            )
        return RegisteredMemory(SharedFile(name), message.nbytes)
    if kind == "gpu":
        for what, value, length in (
            ("ipc_handle", message.gpu.ipc_handle, IPC_HANDLE_BYTES),
            ("device_uuid", message.gpu.device_uuid, DEVICE_UUID_BYTES),
        ):
            if len(value) != length:
                raise ValueError(f"{field}.gpu.{what} has {len(value)} bytes; it must have {length}")
        return RegisteredMemory(GpuAllocation(message.gpu.ipc_handle, message.gpu.device_uuid), message.nbytes)
    raise ValueError(f"{field} is neither a file nor a GPU's allocation")


def _check_apart(field: str, tensors: list[tuple[int, RegisteredTensor]], pages: int) -> None:
    """Checks the tensors of one memory. Those whose ranges meet must be interleaved: of one stride, each in a part of
    it of its own."""
    ordered = sorted(tensors, key=lambda each: each[1].offset)
    group: list[tuple[int, RegisteredTensor]] = []
    end = 0
    for each in ordered:
        if group and each[1].offset >= end:
            _check_interleaved(field, group)
            group = []
        group.append(each)
        end = max(end, each[1].offset + each[1].extent(pages))
    _check_interleaved(field, group)


def _check_interleaved(field: str, group: list[tuple[int, RegisteredTensor]]) -> None:
    first, stride = group[0][1].offset, group[0][1].page_stride
    for number, tensor in group:
        if tensor.page_stride != stride:
            raise ValueError(
                f"{field}.tensors[{number}].page_stride is {tensor.page_stride}; its pages overlap the range of tensor "
                f"{group[0][0]}, of stride {stride}"
            )
    places = sorted(((tensor.offset - first) % stride, number, tensor.page_bytes) for number, tensor in group)
    behind = [*places[1:], (stride, places[0][1], 0)]  # the first one, on the next page
    for (place, number, nbytes), (after, other, _) in zip(places, behind, strict=True):
        if place + nbytes > after:
            raise ValueError(
                f"{field}.tensors[{number}] with page_bytes {nbytes} and page_stride {stride} overlaps "
                f"tensors[{other}]: their pages are {after - place} bytes apart"
            )


def _check_sources(ranks: Sequence[RegisteredRank]) -> None:
    """All of one kind, and none named twice."""
    seen: dict[str | bytes, str] = {}
    kinds: set[type] = set()
    for i, rank in enumerate(ranks):
        for k, memory in enumerate(rank.memories):
            source, field = memory.source, f"pool.ranks[{i}].memories[{k}]"
            kinds.add(type(source))
            if len(kinds) > 1:
                raise ValueError(f"{field}: some memories are files and some a GPU's; they must all be of one kind")
            name = source.name if isinstance(source, SharedFile) else source.ipc_handle
            if name in seen:
                raise ValueError(f"{field} names the same memory as {seen[name]}; each is named once")
            seen[name] = field
        sources = [memory.source for memory in rank.memories]
        if isinstance(sources[0], SharedFile) and len(sources) > 1:
            raise ValueError(f"pool.ranks[{i}].memories has {len(sources)} files; shared memory is one file a rank")
        if len({source.device_uuid for source in sources if isinstance(source, GpuAllocation)}) > 1:
            raise ValueError(f"pool.ranks[{i}].memories[].gpu.device_uuid: a rank's memories lie on one GPU")
