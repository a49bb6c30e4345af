"""An engine's KV blocks without the engine: one array a layer, as vLLM's CPU attention has them."""

import numpy as np
from numpy.typing import NDArray

from kvferry.connectors.blocks import BlockMap

LAYERS, HEADS, HEAD_DIM, BLOCK = 2, 1, 4, 8
BLOCK_BYTES = HEADS * BLOCK * 2 * HEAD_DIM * 4
# as a kernel may have it: of keys all tokens' first elements, then all second ones; values token by token
ORDER = np.concatenate([np.tile(np.arange(BLOCK), HEAD_DIM), np.repeat(np.arange(BLOCK), HEAD_DIM)]).astype(np.int32)
ORDER = np.repeat(np.tile(ORDER, HEADS), 4)


class EngineMemory:
    def __init__(self, blocks: int, blocks_per_page: int = 1, gap: int = 0, seed: int = 0) -> None:
        """`gap`: bytes between blocks that are nobody's."""
        random = np.random.default_rng(seed)
        self.layers: list[NDArray[np.uint8]] = [
            random.integers(0, 255, (blocks, BLOCK_BYTES + gap), dtype=np.uint8) for _ in range(LAYERS)
        ]
        self.map = BlockMap(
            np.array([layer.__array_interface__["data"][0] for layer in self.layers], dtype=np.int64),
            np.full(LAYERS, BLOCK_BYTES + gap, dtype=np.int64),
            BLOCK_BYTES,
            blocks,
            BLOCK,
            blocks_per_page,
            ORDER,
        )

    def block(self, number: int) -> bytes:
        return b"".join(layer[number, :BLOCK_BYTES].tobytes() for layer in self.layers)

    def beginning(self, number: int, tokens: int) -> bytes:
        """The block with the first `tokens` tokens, zeros behind them."""
        return b"".join(np.where(tokens > ORDER, layer[number, :BLOCK_BYTES], 0).tobytes() for layer in self.layers)

    def page(self, numbers: list[int]) -> bytes:
        """As Layout.ENGINE has it: layer by layer, its blocks."""
        return b"".join(layer[n, :BLOCK_BYTES].tobytes() for layer in self.layers for n in numbers)
