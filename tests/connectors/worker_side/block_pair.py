"""A pair of engines whose blocks are their daemons' pools, in shared memory."""

from __future__ import annotations

import os
import secrets

import numpy as np

from kvferry.client.engine_blocks import OwnBlocks
from kvferry.client.engine_pools import EnginePools
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.movers import HostMover
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import connector_of
from kvferry.connectors.worker_side import WorkerSide
from kvferry.proto import common_pb2
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.registration import (
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)
from kvferry.transfer.mapping.segment import Segment
from tests.connectors.engine_memory import BLOCK, BLOCK_BYTES, LAYERS, EngineMemory
from tests.connectors.worker_side.engine_pair import FACTS, PER_PAGE, Pair

BLOCKS = 64
CANARY = 0xCA
ORDER = np.repeat(np.arange(BLOCK, dtype=np.int32), BLOCK_BYTES // BLOCK)


class SharedEngine(EngineMemory):
    """Blocks in a file of shared memory, tokens one behind the other in each layer's."""

    def __init__(self, seed: int) -> None:
        super().__init__(BLOCKS, PER_PAGE, seed=seed)
        size = LAYERS * BLOCKS * BLOCK_BYTES
        self.file = Segment.create("/dev/shm", f"kvferry-engine-{os.getpid()}-{secrets.token_hex(8)}", size)
        memory = np.frombuffer(self.file.buffer, np.uint8).reshape(LAYERS, BLOCKS, BLOCK_BYTES)
        memory[:] = np.random.default_rng(seed).integers(0, 255, memory.shape, dtype=np.uint8)
        self.memory = memory
        self.layers = list(memory)
        bases = np.array([layer.ctypes.data for layer in self.layers], np.int64)
        self.map = BlockMap(bases, self.map.strides, BLOCK_BYTES, BLOCKS, BLOCK, PER_PAGE, ORDER)
        self.mover = HostMover(self.map)
        assert self.map.in_token_order

    def own(self) -> EnginePools:
        """Registers the blocks; each time anew."""
        each = BLOCKS * BLOCK_BYTES
        tensors = tuple(RegisteredTensor(0, i * each, BLOCK_BYTES, BLOCK_BYTES) for i in range(LAYERS))
        memory = RegisteredMemory(SharedFile(os.path.basename(self.file.path)), self.file.nbytes)
        ranks = (RegisteredRank((memory,), tensors),)
        registration = Registration(BLOCKS, StorageOrder.PAGE_MAJOR, ranks, BLOCK)
        return EnginePools(OwnBlocks(FACTS.geometry, BLOCKS), registration, [])

    def clear(self, *numbers: int) -> None:
        self.memory[:, list(numbers)] = CANARY

    def beginning(self, number: int, tokens: int) -> bytes:
        return b"".join(np.where(tokens > ORDER, self._held(layer, number), 0).tobytes() for layer in self.layers)


class BlockPair(Pair):
    def pool_words(self, role: str) -> list[str]:
        return ["--pool", "engine", "--checksums", "on"]

    def engine(self, role: str, seed: int) -> SharedEngine:
        return SharedEngine(seed)

    def settings(self, role: str) -> Settings:
        seconds = self.deadline_seconds
        return Settings(self.socket(role), pool="engine", deadline_seconds=seconds, store_seconds=5.0)

    def of(self, role: str) -> SharedEngine:
        engine = self.engines[role]
        assert isinstance(engine, SharedEngine)
        return engine

    def side(self, role: str, facts: object = FACTS) -> WorkerSide:
        settings, engine = self.settings(role), self.of(role)
        number = common_pb2.ROLE_PREFILL if role == "prefill" else common_pb2.ROLE_DECODE
        own = engine.own if settings.pool == "engine" else None
        connect = connector_of(settings, number, FACTS.to_proto(), role, engine.mover, own)
        return WorkerSide(settings, engine.map, engine.mover, connect)
