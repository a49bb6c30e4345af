"""A worker's view of pages that several ranks share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.client.attachment import Attachment, check_further
from kvferry.client.rank_pools import RankPools
from kvferry.proto import common_pb2, worker_pb2
from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, Layout, StorageOrder
from kvferry.transfer.mapping.segment import FileLock, Segment
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.transformer import loaded
from tests.support.reshard import random_pages, rank_memories, rows
from tests.support.tiny_models import VOCABULARY, plain_tokens, random_model

PAGES = 4
GEOMETRY = KVGeometry(layers=2, kv_heads=4, head_dim=6, dtype="bfloat16", page_size=5)
HEADS_FIRST = KVGeometry(layers=2, kv_heads=2, head_dim=3, dtype="float32", page_size=3, layout=Layout.PAGE_HND)
MLA = KVGeometry(layers=3, kv_heads=1, head_dim=9, dtype="int8", page_size=4, tensors=1)


def filled(geometry: KVGeometry, order: StorageOrder, ranks: int, pages: int = PAGES) -> RankPools:
    memories = rank_memories(geometry, random_pages(geometry, pages, 7), ranks, order)
    return RankPools(geometry, order, pages, memories)


@pytest.mark.parametrize("order", list(StorageOrder))
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("geometry", [GEOMETRY, HEADS_FIRST, MLA])
def test_rows_go_to_the_ranks_and_wrong_bytes_are_found(geometry: KVGeometry, ranks: int, order: StorageOrder) -> None:
    pages = random_pages(geometry, PAGES, 7)
    pools = filled(geometry, order, ranks)
    pages[2] = random_pages(geometry, 1, 8)[0]
    row = rows(pages, geometry)[2]
    assert len(pools.wrong_bytes(2, row)) > 0
    pools.store(2, row)
    for memory, expected in zip(pools.memories, rank_memories(geometry, pages, ranks, order), strict=True):
        assert np.array_equal(memory, expected)
    assert len(pools.wrong_bytes(2, row)) == 0
    for wrong in (0, len(row) // 3, len(row) - 1):
        other = row.copy()
        other[wrong] ^= 0x40
        assert pools.wrong_bytes(2, other).tolist() == [wrong]


def test_a_wrong_byte_on_one_of_the_ranks_that_hold_it_is_found() -> None:
    pools = filled(MLA, StorageOrder.PAGE_MAJOR, 3)
    row = rows(random_pages(MLA, PAGES, 7), MLA)[1]
    assert len(pools.wrong_bytes(1, row)) == 0
    pools.memories[2][MLA.page_bytes + 5] ^= 1
    assert pools.wrong_bytes(1, row).tolist() == [5]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize(
    ("source", "target", "layout"),
    [
        ((1, StorageOrder.PAGE_MAJOR), (2, StorageOrder.LAYER_MAJOR), Layout.PAGE_NHD),
        ((2, StorageOrder.LAYER_BLOCKS), (1, StorageOrder.PAGE_MAJOR), Layout.PAGE_HND),
        ((4, StorageOrder.PAGE_MAJOR), (2, StorageOrder.LAYER_MAJOR), Layout.PAGE_HND),
    ],
)
def test_a_model_over_ranks_says_what_it_says_over_one(
    family: str, source: tuple[int, StorageOrder], target: tuple[int, StorageOrder], layout: Layout
) -> None:
    """Prefill over the pools of some ranks, decode over those of others; the rows go over as lanes bring them."""
    network = random_model(family)
    model = loaded(network, family, "1")
    shape = model.shape
    geometry = KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, shape.dtype, 8, layout)
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, VOCABULARY, 21)]
    spec = Prompt(np.array(prompt, dtype=np.uint32), b"", b"")
    pools = [filled(geometry, order, ranks, pages=6) for ranks, order in (source, target)]

    prefill = model.compute(pools[0]).sequence(spec, [4, 1, 3], Sampling(), shared_tokens=0)
    prefill.resume(0)
    prefill.prompt(0, 16)
    prefill.prompt(16, 21)
    output = [prefill.first_token()]
    for page, to in ((4, 0), (1, 5), (3, 2)):
        pools[1].store(to, row_of(pools[0], page))
    decode = model.compute(pools[1]).sequence(spec, [0, 5, 2], Sampling(), shared_tokens=16)
    decode.resume(21)
    decode.add_pages([3])
    while len(output) < 8:
        output.append(decode.step(output[-1], len(prompt) + len(output) - 1))
    decode.finish()
    assert output == plain_tokens(network, prompt, 8, chunk_tokens=16)


def row_of(pools: RankPools, page: int) -> np.ndarray:
    heads = np.zeros((1, *random_pages(pools.geometry, 1, 0).shape[1:]), np.uint8)
    for memory, held in zip(pools.memories, pools.heads[0], strict=True):
        heads[0, :, :, :, held.first : held.end] = pools.storages[0].view(memory)[page]
    return rows(heads, pools.geometry)[0]


def test_what_a_worker_cannot_map_is_refused(tmp_path: Path) -> None:
    FileLock.create(str(tmp_path / "session")).close()
    segment = Segment.create(str(tmp_path), "pool", GEOMETRY.page_bytes)
    session = str(tmp_path / "session")
    pool = worker_pb2.RankPool(segment=segment.path)
    for changes, message in (
        ({"storage": 9}, "storage is 9; it must be one of"),
        (
            {"rank_pools": [pool, worker_pb2.RankPool(ipc_handle=bytes(64))]},
            "some lie on GPUs, others in shared memory",
        ),
        ({"rank_pools": [pool] * 3}, "ranks is 3; it must divide geometry.kv_heads = 4"),
        ({"pages": 0}, "pages is 0; it must be at least 1"),
        ({"pages": 2}, f"has {GEOMETRY.page_bytes} bytes; {2 * GEOMETRY.page_bytes} are needed"),
        (
            {"rank_pools": [worker_pb2.RankPool(segment=segment.path, offset=1)]},
            f"{GEOMETRY.page_bytes + 1} are needed",
        ),
    ):
        welcome = worker_pb2.Welcome(**{"pages": 1, "segment": segment.path, **changes})
        with pytest.raises(ValueError, match=message):
            Attachment(session, welcome, GEOMETRY)
    welcome = worker_pb2.Welcome(pages=1, segment=segment.path, storage=common_pb2.STORAGE_UNSPECIFIED)
    attachment = Attachment(session, welcome, GEOMETRY)  # no refusal held the lock
    assert attachment.pools.storages[0].rows().end == GEOMETRY.page_bytes
    attachment.close()
    segment.close()


def test_a_daemon_that_leaves_further_caches_out_is_older() -> None:
    both = replace(GEOMETRY, further=(CacheShape(2, 1, 132, "uint8", 1),))
    check_further(both, both.to_proto())
    with pytest.raises(ValueError, match=r"geometry\.further has 0 entries; 1 were said: the daemon is older"):
        check_further(GEOMETRY, both.to_proto())
