"""SGLang's pool of KV on a CPU, in a file that a daemon can map, and what a model would compute into it."""

from __future__ import annotations

import hashlib
import os
import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass
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
LAYERS, HEADS, HEAD_DIM, ROPE = 2, 2, 8, 4
TOKEN_BYTES = 2 * HEADS * HEAD_DIM  # of one tensor


@dataclass(frozen=True)
class Rank:
    """A tensor-parallel rank of so many."""

    rank: int
    ranks: int

    def share_of(self, size: int) -> slice:
        return slice(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)


ONE = Rank(0, 1)


class SharedKV:
    """SGLang's pool of KV with its tensors in a file that a daemon can map: all heads, or a rank's share of them, or
    what keys and values have in common (`latent`), which every rank has whole."""

    def __init__(self, tokens: int, rank: Rank = ONE, *, latent: bool = False) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

        common = {"size": tokens, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": LAYERS, "device": "cpu"}
        self.own = slice(None) if latent else rank.share_of(TOKEN_BYTES)
        self.tensors = LAYERS if latent else 2 * LAYERS
        if latent:
            sizes = {"kv_lora_rank": HEADS * HEAD_DIM - ROPE, "qk_rope_head_dim": ROPE}
            self.pool = MLATokenToKVPool(**common, **sizes, enable_memory_saver=False)
            places = [self.pool.kv_buffer]
        else:
            sizes = {"head_num": HEADS // rank.ranks, "head_dim": HEAD_DIM}
            self.pool = MHATokenToKVPool(**common, **sizes, enable_memory_saver=False)
            places = [self.pool.k_buffer, self.pool.v_buffer]
        tensors = [tensor for buffers in places for tensor in buffers]
        self.each = tensors[0].nbytes
        name = f"kvferry-engine-{os.getpid()}-{secrets.token_hex(8)}"
        self.file = Segment.create("/dev/shm", name, self.each * len(tensors))
        self.bytes = np.frombuffer(self.file.buffer, np.uint8).reshape(len(tensors), -1)
        self.bytes[:] = 0xCA
        shared = [torch.from_numpy(row).view(torch.bfloat16).view(tensors[0].shape) for row in self.bytes]
        for buffers in places:
            buffers[:], shared = shared[:LAYERS], shared[LAYERS:]
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
        by_slot = self.bytes.reshape(len(self.bytes), -1, self.each // (self.pool.size + PAGE))
        return by_slot[:, np.asarray(slots)].copy()

    def kv_of(self, tokens: Any, start: int, end: int) -> np.ndarray[Any, Any]:
        """What of a model's KV is in this pool."""
        return np.ascontiguousarray(kv_of(tokens, start, end)[: self.tensors, :, self.own])

    def write(self, slots: Any, content: np.ndarray[Any, Any]) -> None:
        by_slot = self.bytes.reshape(len(self.bytes), -1, content.shape[-1])
        by_slot[:, np.asarray(slots)] = content


def kv_of(tokens: Any, start: int, end: int) -> np.ndarray[Any, Any]:
    """What a model would compute for tokens [start, end) of a prompt: bytes that depend on all tokens before."""
    made = np.empty((2 * LAYERS, end - start, TOKEN_BYTES), np.uint8)
    for index in range(start, end):
        seed = hashlib.sha256(array("q", tokens[: index + 1]).tobytes()).digest()
        content = hashlib.shake_128(seed).digest(2 * LAYERS * TOKEN_BYTES)
        made[:, index - start] = np.frombuffer(content, np.uint8).reshape(2 * LAYERS, TOKEN_BYTES)
    return made
