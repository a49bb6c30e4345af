"""SGLang's pool of KV on a CPU, in a file that a daemon can map, and what a model would compute into it."""

from __future__ import annotations

import hashlib
import os
import secrets
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvferry.client.engine_blocks import OwnBlocks
from kvferry.client.engine_pools import EnginePools
from kvferry.connectors.blocks import BlockMap
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.registration import (
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)
from kvferry.transfer.mapping.segment import Segment

PAGE = 16
LAYERS, HEADS, HEAD_DIM = 2, 2, 8


class SharedKV:
    """SGLang's pool of KV with its tensors in a file that a daemon can map."""

    def __init__(self, tokens: int) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        self.pool = MHATokenToKVPool(
            size=tokens,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        tensors = [*self.pool.k_buffer, *self.pool.v_buffer]
        self.each = tensors[0].nbytes
        name = f"kvferry-engine-{os.getpid()}-{secrets.token_hex(8)}"
        self.file = Segment.create("/dev/shm", name, self.each * len(tensors))
        self.bytes = np.frombuffer(self.file.buffer, np.uint8).reshape(len(tensors), -1)
        self.bytes[:] = 0xCA
        shared = [torch.from_numpy(row).view(torch.bfloat16).view(tensors[0].shape) for row in self.bytes]
        self.pool.k_buffer[:], self.pool.v_buffer[:] = shared[:LAYERS], shared[LAYERS:]
        self.address = self.bytes.ctypes.data

    def registration(self, blocks: BlockMap, geometry: KVGeometry, device: int) -> Callable[[], EnginePools]:
        """In the place of `facts.registration`, which names allocations of a GPU."""
        tensors = tuple(
            RegisteredTensor(0, base - self.address, stride, blocks.block_bytes)
            for base, stride in zip(blocks.bases.tolist(), blocks.strides.tolist(), strict=True)
        )
        memory = RegisteredMemory(SharedFile(os.path.basename(self.file.path)), self.file.nbytes)
        rank = RegisteredRank((memory,), tensors)
        told = Registration(blocks.blocks, StorageOrder.PAGE_MAJOR, (rank,), blocks.block_tokens)
        return lambda: EnginePools(OwnBlocks(geometry, blocks.blocks), told, [])

    def slots(self, slots: Any) -> np.ndarray[Any, Any]:
        """The bytes of tokens, (tensors, tokens, bytes); a copy."""
        by_slot = self.bytes.reshape(len(self.bytes), -1, self.each // self.pool.k_buffer[0].shape[0])
        return by_slot[:, np.asarray(slots)].copy()

    def write(self, slots: Any, content: np.ndarray[Any, Any]) -> None:
        by_slot = self.bytes.reshape(len(self.bytes), -1, content.shape[-1])
        by_slot[:, np.asarray(slots)] = content


def kv_of(tokens: Any, start: int, end: int) -> np.ndarray[Any, Any]:
    """What a model would compute for tokens [start, end) of a prompt: bytes that depend on all tokens before."""
    size = HEADS * HEAD_DIM * 2
    made = np.empty((2 * LAYERS, end - start, size), np.uint8)
    for index in range(start, end):
        seed = hashlib.sha256(array("q", tokens[: index + 1]).tobytes()).digest()
        made[:, index - start] = np.frombuffer(hashlib.shake_128(seed).digest(2 * LAYERS * size), np.uint8).reshape(
            2 * LAYERS, size
        )
    return made
