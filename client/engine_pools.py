"""Pools of a worker's own, which it registers with a daemon of `--pool engine`."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvferry import flags
from kvferry.client.rank_pools import RankPools
from kvferry.proto import common_pb2, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import rank_storages
from kvferry.transfer.geometry.rank_lanes import check_ranks, rank_geometry
from kvferry.transfer.geometry.registration import (
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
    tensors_of,
)
from kvferry.transfer.mapping.segment import Segment

_log = logging.getLogger(__name__)

STORAGES = {
    "page": StorageOrder.PAGE_MAJOR,
    "layer": StorageOrder.LAYER_MAJOR,
    "layer-blocks": StorageOrder.LAYER_BLOCKS,
}


class PoolSpec(NamedTuple):
    """The size, order and place of what a worker allocates."""

    pages: int
    page_size: int  # tokens
    order: StorageOrder
    devices: tuple[int, ...]  # a GPU for each rank; (): files in `shm_dir`
    ranks: int
    shm_dir: str

    def geometry(self, geometry: common_pb2.Geometry) -> KVGeometry:
        """The model's, with this page size. ValueError: it cannot be, or so many ranks cannot share the heads."""
        complete = common_pb2.Geometry()
        complete.CopyFrom(geometry)
        complete.page_size = self.page_size
        found = KVGeometry.from_proto(complete)
        check_ranks(found, self.ranks)
        return found


def parse_devices(text: str) -> tuple[int, ...]:
    """GPU ids by rank, as `flags.devices` reads them. ValueError."""
    try:
        return flags.devices(text)
    except ValueError as error:
        raise ValueError(f"--pool-device {error}") from error


class EnginePools:
    """The worker's memory, and what it says of it. Files are made here and mapped by the daemon under their names; the
    names go as soon as it has."""

    def __init__(self, pools: RankPools, registration: Registration, files: list[Segment]) -> None:
        self.pools = pools
        self._registration = registration
        self._files = files

    @property
    def message(self) -> worker_pb2.EnginePool:
        return self._registration.to_proto()

    def stows(self) -> None:
        """Before it is registered: prompts that a prefill engine has computed into it may be moved out of it."""
        self._registration = replace(self._registration, stows=True)

    def mapped(self) -> None:
        """The daemon has mapped it, or has refused to. Idempotent."""
        for file in self._files:
            file.unlink()

    def close(self) -> None:
        """Lets the memory go: the daemon has unmapped it, or never had it. Raises what a device says, behind that.
        Idempotent."""
        self._close(self.pools.release)

    def close_mapped(self) -> None:
        """Closes like `close` where the daemon may still have the memory mapped: what is on GPUs stays to the end of
        this process."""
        self._close(self.pools.release_mapped)

    def let_go(self) -> None:
        """Closes it where no session came about, and the daemon may be about to map it. Waits for its devices."""
        try:
            self.close_mapped()
        except Exception as error:
            _log.error("a device of the pool does not settle: %s", error)

    def _close(self, release: Callable[[], None]) -> None:
        self.mapped()
        try:
            release()
        finally:
            for file in self._files:
                with contextlib.suppress(BufferError):  # as in Attachment: the mapping goes with the last view
                    file.close()
            self._files.clear()


MakePools = Callable[[], EnginePools]


def make_files(spec: PoolSpec, geometry: KVGeometry) -> EnginePools:
    """Allocates the pool in shared memory, a file for each rank. OSError where there is too little."""
    pages = spec.pages
    own = rank_geometry(geometry, spec.ranks)
    tensors: list[RegisteredTensor] = []
    for number, storage in enumerate(rank_storages(own, spec.order, pages)):
        count, page_bytes = tensors_of(storage.geometry, spec.order)
        each = len(storage.bases) // count  # K and V tensors in one that is registered
        places = zip(storage.bases[::each].tolist(), storage.page_strides[::each].tolist(), strict=True)
        tensors += [RegisteredTensor(0, base, stride, page_bytes, number) for base, stride in places]
    files = make_rank_files(spec.shm_dir, spec.ranks, own.page_bytes * pages)
    memories = [np.frombuffer(file.buffer, np.uint8) for file in files]
    registration = Registration(pages, spec.order, ranks_of(files, tuple(tensors)))
    return EnginePools(RankPools(geometry, spec.order, pages, memories), registration, files)


def make_rank_files(shm_dir: str, ranks: int, nbytes: int) -> list[Segment]:
    """Makes a file of so many bytes for each rank. OSError where there is too little, and none is left."""
    stem = f"kvferry-engine-{os.getpid()}-{secrets.token_hex(8)}"
    files: list[Segment] = []
    try:
        for rank in range(ranks):
            files.append(Segment.create(shm_dir, f"{stem}-{rank}", nbytes))
    except BaseException:
        for file in files:
            file.unlink()
            file.close()
        raise
    return files


def ranks_of(files: Sequence[Segment], tensors: tuple[RegisteredTensor, ...]) -> tuple[RegisteredRank, ...]:
    """Ranks that have these tensors, each in a file of its own."""
    memories = [RegisteredMemory(SharedFile(os.path.basename(file.path)), file.nbytes) for file in files]
    return tuple(RegisteredRank((memory,), tensors) for memory in memories)
