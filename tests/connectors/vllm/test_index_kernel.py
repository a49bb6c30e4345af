"""Where vLLM's own kernel writes an indexer's keys and scales, against where the connector takes them to be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvferry.connectors.blocks import BlockMap, PoolPages
from kvferry.connectors.gpu_mover import GpuMover
from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.facts import block_map, facts_of, orders_of
from tests.connectors.vllm.test_caches import LATENT, LATENTS, TALL, engine, indexed
from tests.support.devices import need

pytestmark = pytest.mark.gpu
KEY, ROW = 128, 132  # elements of a key; its bytes with their scale, by vLLM's name for the cache's head size
BLOCKS = 5


@pytest.fixture
def config() -> SimpleNamespace:
    need(0)
    found = engine()
    found.cache_config.cache_dtype = "fp8"
    return found


def written(keys: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(blocks, tokens, 132) uint8, as the kernel leaves empty blocks."""
    ops = pytest.importorskip("vllm._custom_ops", reason="needs a compiled vLLM")
    cache = torch.zeros((BLOCKS, TALL, ROW), dtype=torch.uint8, device=keys.device)
    ops.indexer_k_quant_and_cache(keys, cache, slots, KEY, "ue8m0")
    return cache


def map_of(config: SimpleNamespace, cache: torch.Tensor) -> BlockMap:
    """Of one layer's keys beside one layer's latents."""
    group = indexed(replace(LATENTS, dtype=torch.uint8, head_size=2 * LATENT), 1)
    latents = torch.zeros((BLOCKS, TALL, 2 * LATENT), dtype=torch.uint8, device=cache.device)
    caches, shape = {"attention.0": latents, "indexer.0": cache}, Shape(TALL, 2)
    geometry = facts_of(config, group, shape, Settings("/s", revision="1")).geometry
    return block_map(caches, group, shape, geometry, orders_of(config, group, caches))


@pytest.mark.parametrize("end", [TALL + 1, TALL + 6, 2 * TALL - 1, 2 * TALL])
def test_a_prompts_part_of_a_block_is_what_the_kernel_writes_of_it(config: SimpleNamespace, end: int) -> None:
    """`end` tokens of two blocks go to a page and from there into blocks that held others. These then hold what the
    kernel writes into empty blocks when it is given these tokens alone."""
    blocks, device = [3, 1], torch.device("cuda:0")
    keys = torch.randn((2 * TALL, KEY), device=device).to(torch.bfloat16)
    slots = torch.cat([torch.arange(TALL, device=device) + block * TALL for block in blocks])
    source, target = written(keys, slots), torch.full((BLOCKS, TALL, ROW), 0x5A, dtype=torch.uint8, device=device)
    there, back = map_of(config, source), map_of(config, target)
    memory = torch.full((there.page_bytes,), 0xEE, dtype=torch.uint8, device=device)
    pool = PoolPages.of(memory, 1)
    sends, takes = GpuMover(there, device), GpuMover(back, device)
    sends.to_pages(pool, there.places(pool, [0], blocks, 0, end), sends.moment(), there.tail([0], end))
    takes.to_blocks(pool, back.places(pool, [0], blocks, 0, end), takes.moment())
    wanted = written(keys[:end], slots[:end])
    assert torch.equal(target[blocks], wanted[blocks])
    assert torch.equal(target[[0, 2, 4]], torch.full_like(target[[0, 2, 4]], 0x5A)), "nobody's block"


def test_a_token_is_where_the_order_of_bytes_says(config: SimpleNamespace) -> None:
    """One token alone, and every byte that it changes."""
    keys = torch.randn((1, KEY), device="cuda:0").to(torch.bfloat16)
    for token in (0, 1, 31, TALL - 1):
        cache = written(keys, torch.tensor([2 * TALL + token], device="cuda:0"))
        _, values, scales = map_of(config, cache).caches
        flat, start = cache.cpu().numpy().reshape(-1), cache.data_ptr()
        told = np.zeros(len(flat), dtype=bool)
        for part in (values, scales):
            begin = int(part.bases[0] + 2 * part.strides[0]) - start
            told[begin : begin + part.block_bytes] = part.order == token
        assert flat[told].any() and not flat[~told].any()
        scale = flat[told][-4:].view(np.float32)[0]
        found = torch.from_numpy(flat[told][:KEY].copy()).view(torch.float8_e4m3fn).float() * float(scale)
        assert torch.allclose(found, keys[0].float().cpu(), rtol=0.07, atol=float(scale) / 128)
