"""An engine's KV blocks without the engine: one array a layer, as vLLM's CPU attention has them, or one tensor on a
GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.connectors.blocks import BlockMap, PoolPages
from kvferry.connectors.movers import HostMover, Moment, Mover

LAYERS, HEADS, HEAD_DIM, BLOCK = 2, 1, 4, 8
BLOCK_BYTES = HEADS * BLOCK * 2 * HEAD_DIM * 4
# as a kernel may have it: of keys all tokens' first elements, then all second ones; values token by token
ORDER = np.concatenate([np.tile(np.arange(BLOCK), HEAD_DIM), np.repeat(np.arange(BLOCK), HEAD_DIM)]).astype(np.int32)
ORDER = np.repeat(np.tile(ORDER, HEADS), 4)


class EngineMemory:
    def __init__(
        self, blocks: int, blocks_per_page: int = 1, gap: int = 0, seed: int = 0, device: int | None = None
    ) -> None:
        """`gap`: bytes between blocks that are nobody's. `device`: a GPU's number."""
        random = np.random.default_rng(seed)
        contents = [random.integers(0, 255, (blocks, BLOCK_BYTES + gap), dtype=np.uint8) for _ in range(LAYERS)]
        self.layers: list[Any] = list(contents)
        bases = [layer.__array_interface__["data"][0] for layer in contents]
        if device is not None:
            import torch

            where = torch.device("cuda", device)
            self.layers = [torch.from_numpy(content).to(where) for content in contents]
            bases = [layer.data_ptr() for layer in self.layers]
        self.map = BlockMap(
            np.array(bases, dtype=np.int64),
            np.full(LAYERS, BLOCK_BYTES + gap, dtype=np.int64),
            BLOCK_BYTES,
            blocks,
            BLOCK,
            blocks_per_page,
            ORDER,
        )
        self.mover = HostMover(self.map) if device is None else _gpu_mover(self.map, device)

    def to_pages(
        self, pool: PoolPages, pages: list[int], blocks: list[int], start: int, end: int, after: Moment = None
    ) -> None:
        places = self.map.places(pool, pages, blocks, start, end)
        self.mover.to_pages(pool, places, after or self.mover.moment())

    def to_blocks(
        self, pool: PoolPages, pages: list[int], blocks: list[int], start: int, end: int, after: Moment = None
    ) -> None:
        places = self.map.places(pool, pages, blocks, start, end)
        self.mover.to_blocks(pool, places, after or self.mover.moment())

    def block(self, number: int) -> bytes:
        return b"".join(self._held(layer, number).tobytes() for layer in self.layers)

    def beginning(self, number: int, tokens: int) -> bytes:
        """The block with the first `tokens` tokens, zeros behind them."""
        return b"".join(np.where(tokens > ORDER, self._held(layer, number), 0).tobytes() for layer in self.layers)

    def page(self, numbers: list[int]) -> bytes:
        """As Layout.ENGINE has it: layer by layer, its blocks."""
        return b"".join(self._held(layer, n).tobytes() for layer in self.layers for n in numbers)

    def take_from(self, other: EngineMemory, theirs: int, ours: int) -> None:
        """Another engine's block, byte for byte."""
        for mine, layer in zip(self.layers, other.layers, strict=True):
            mine[ours] = layer[theirs]

    @staticmethod
    def _held(layer: Any, number: int) -> NDArray[np.uint8]:
        return held_bytes(layer[number, :BLOCK_BYTES])


def _gpu_mover(blocks: BlockMap, device: int) -> Mover:
    import torch

    from kvferry.connectors.gpu_mover import GpuMover

    return GpuMover(blocks, torch.device("cuda", device))


def held_bytes(memory: Any) -> NDArray[np.uint8]:
    """A copy, of an array or a tensor."""
    return memory.copy() if isinstance(memory, np.ndarray) else memory.cpu().numpy().copy()
