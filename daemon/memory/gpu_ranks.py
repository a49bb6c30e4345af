"""The parts of a pool on GPUs: each rank's memory, and the engines that copy there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from kvferry._core import GpuCopy, GpuCopyEngine, GpuError, GpuMapping, GpuPages, gpu_device_ordinal
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.layouts import Int64s, RankStorage, RowMap, Storages
from kvferry.transfer.geometry.registration import GpuAllocation, Registration
from kvferry.transfer.host_tier.copy_plan import GpuCopies

# Staging buffers of restores, 16 MiB each (CopyTuning.deep_buffers). Beside a decode engine each is filled once in a
# turn of the GPU, 2.7 ms: on an H100 8 gave 0.87 to 0.90 of the link, 12 gave 0.92 to 0.96. 10 hold more than the link
# moves in that time. With them, those of spills and 1 GiB of slots daemon and courier take 1.8 GiB of the GPU.
RESTORE_BUFFERS = 10
COPY_SECONDS = 60.0  # for a spill or a restore: a device that takes longer is lost

log = logging.getLogger(__name__)


def copiers(ordinal: int) -> tuple[GpuCopies, GpuCopies]:
    """The engines of spills and of restores: two, since an engine has one stream to host memory, and a restore, which a
    request waits for, is not to be behind spills. GpuUnavailable, GpuError."""
    restores = GpuCopyEngine(ordinal, deep_buffers=RESTORE_BUFFERS)
    return GpuCopies(GpuCopyEngine(ordinal), restores=restores), GpuCopies(restores)


class RankMemory:
    """One rank's memory, and the engines that copy there."""

    def __init__(self, storages: Storages, ordinal: int, engines: tuple[GpuCopies, GpuCopies], base: int) -> None:
        """`storages` begin at address `base`."""
        self.ordinal = ordinal
        self.spills, self.restores = engines
        self._base = base
        # Of each cache all heads, and bytes of a token there; none of blocks.
        self._planes: list[tuple[GpuPages, int]] = []
        self._tables: dict[tuple[bytes | int, ...], GpuPages] = {}
        self._making = threading.Lock()
        self.whole = [self.pages(storage.rows()) for storage in storages]
        """The rows of each cache."""
        for storage in storages:
            if isinstance(storage, RankStorage):
                self._planes.append((self.pages(storage.planes()), storage.geometry.fragment_token_bytes))

    @property
    def parts(self) -> GpuCopyEngine:
        """The engine that gathers, scatters and clears."""
        return self.spills.engine

    def pages(self, rows: RowMap) -> GpuPages:
        """These rows of the memory, for all of its device's engines. Their table on the device is made once, which may
        wait for the device, and kept as long as this: to free it would wait, too. There are few, one for each range of
        this rank's heads of a cache that is a rank's of some peer, whose ranks are 64 at most and share the heads
        evenly. From any thread. GpuError."""
        return self._table_of(rows, self._base)

    def tier_pages(self, rows: RowMap, address: int) -> GpuPages:
        """These rows of the host tier, which begins at this address and is pinned: a GPU reads such memory by the
        host's own addresses. As `pages`."""
        return self._table_of(rows, address)

    def _table_of(self, rows: RowMap, base: int) -> GpuPages:
        bases = np.ascontiguousarray(rows.offsets + base)
        strides = np.ascontiguousarray(rows.strides)
        shape = rows.fragment_bytes, rows.pages, rows.pieces, rows.piece_stride, rows.in_blocks
        with self._making:
            table = self._tables.get(key := (bases.tobytes(), strides.tobytes(), *shape))
            if table is None:
                table = self._tables[key] = self.parts.pages(bases, strides, *shape)
            return table

    def zero_tail(self, page: int, tokens: int) -> list[Callable[[], GpuCopy]]:
        """What clears the page's tail, cache by cache, before any gather that is issued later."""
        clear, stream = self.parts.zero_page_from, self.parts.gather_stream
        return [partial(clear, planes, page, tokens * size, 0, stream) for planes, size in self._all_planes()]

    def zero_pages(self, pages: Int64s) -> list[Callable[[], GpuCopy]]:
        """What clears whole pages, cache by cache."""
        return [partial(self.parts.zero_pages, planes, pages) for planes, _ in self._all_planes()]

    def _all_planes(self) -> list[tuple[GpuPages, int]]:
        assert self._planes, "an engine's blocks were to be cleared"
        return self._planes

    def rank_pools(self) -> list[wire.RankPool]:
        """The pools by which workers find the memory; none: they know."""
        return []

    def close(self) -> None:
        """Lets the memory go: no copy of it runs, and none begins any more."""


class OwnRank(RankMemory):
    """An allocation of the daemon. Once workers were told of it, it stays until this process ends: they may have it
    mapped, and to free it under them is undefined by CUDA."""

    def __init__(self, storages: Storages, nbytes: int, ordinal: int) -> None:
        """GpuUnavailable, GpuError."""
        engines = copiers(ordinal)
        self.memory = engines[0].engine.allocate(nbytes)
        engines[0].engine.check_range(self.memory.address, nbytes)
        self._nbytes = nbytes
        super().__init__(storages, ordinal, engines, self.memory.address)

    def rank_pools(self) -> list[wire.RankPool]:
        self.memory.leave()
        nbytes = self._nbytes
        handle, offset = self.parts.export_memory(self.memory.address, nbytes)
        uuid = self.parts.device_uuid()
        return [wire.RankPool(ipc_handle=handle, device=self.ordinal, device_uuid=uuid, nbytes=nbytes, offset=offset)]


class MappedRank(RankMemory):
    """Allocations of an engine. They stay where they are until `close`, whatever becomes of the engine's process."""

    def __init__(self, number: int, registration: Registration, own: KVGeometry, device: int) -> None:
        """`own`: the rank's geometry. GpuUnavailable, GpuError; ValueError where the memory is not what was
        registered."""
        field, rank = f"pool.ranks[{number}]", registration.ranks[number]
        sources = [(memory.source, memory.nbytes) for memory in rank.memories]
        self.mappings: list[GpuMapping] = []
        engines = copiers(device)
        try:
            for i, (source, nbytes) in enumerate(sources):
                assert isinstance(source, GpuAllocation), "a pool on GPUs is of allocations"
                name = f"{field}.memories[{i}]"
                there = gpu_device_ordinal(source.device_uuid)
                if there != device:
                    raise ValueError(f"{name}.gpu.device_uuid is cuda:{there}'s; this rank's is cuda:{device}")
                try:
                    self.mappings.append(engines[0].engine.open_ipc(source.ipc_handle, nbytes))
                except GpuError as error:
                    raise ValueError(f"{name}.gpu.ipc_handle: {error}") from error
            addresses = [mapping.address for mapping in self.mappings]
            for i, tensor in enumerate(rank.tensors):
                try:  # that the driver, too, has it in one allocation
                    start = addresses[tensor.memory] + tensor.offset
                    engines[0].engine.check_range(start, tensor.extent(registration.pages))
                except (GpuError, ValueError) as error:
                    raise ValueError(f"{field}.tensors[{i}]: {error}") from error
            self.storages = registration.storages(number, own, addresses)
            super().__init__(self.storages, device, engines, 0)
        except BaseException:
            self._unmap()
            raise

    def close(self) -> None:
        self._unmap()

    def _unmap(self) -> None:
        while self.mappings:
            self.mappings.pop().close()


def run_all(issues: list[Callable[[], GpuCopy]]) -> None:
    """Runs copies, each issued by one of these calls. Whatever goes wrong: none runs any more, on no device, when this
    returns or raises. OSError: one could not be issued, or failed."""
    copies: list[GpuCopy] = []
    try:
        for begin in issues:
            copies.append(begin())
    except Exception as error:
        _wait_whatever_comes(copies)
        if isinstance(error, (GpuError, IndexError)):
            raise OSError(f"a copy could not be issued: {error}") from error
        raise
    wait_all(copies)


def _wait_whatever_comes(copies: list[GpuCopy]) -> None:
    try:
        wait_all(copies)
    except OSError as error:
        log.error("of the copies before the one that could not be issued: %s", error)


def wait_all(copies: list[GpuCopy]) -> None:
    """Waits for all copies, also when one failed: after that none touches its memory. OSError: one did."""
    problem: GpuError | None = None
    for copy in copies:
        try:
            if not copy.wait_for(COPY_SECONDS):
                log.error("a copy between the tiers takes more than %g s; waiting on", COPY_SECONDS)
                copy.wait()
        except GpuError as error:
            problem = error
    if problem is not None:
        raise OSError(str(problem)) from problem
