"""Ranks' heads, and lanes: every head of every receiving rank comes once, from a rank that has it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape, page_bytes_of
from kvferry.transfer.geometry.rank_lanes import Heads, check_ranks, heads_of, lanes_of, rank_geometry, shards_of
from tests.support.reshard import heads_of_rank

GEOMETRY = KVGeometry(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16", page_size=16)
MLA = KVGeometry(layers=2, kv_heads=1, head_dim=576, dtype="bfloat16", page_size=16, tensors=1)


def fits(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


@given(st.integers(1, 12), st.integers(1, 16), st.integers(1, 16), st.integers(1, 2))
def test_each_head_of_each_receiver_is_in_one_lane(heads: int, senders: int, receivers: int, tensors: int) -> None:
    geometry = dataclasses.replace(GEOMETRY, kv_heads=heads, tensors=tensors)
    for ranks in (senders, receivers):
        if tensors == 2 and not fits(heads, ranks):
            with pytest.raises(ValueError, match=f"ranks is {ranks}; it must divide geometry.kv_heads = {heads}"):
                check_ranks(geometry, ranks)
            return
    lanes = lanes_of(geometry, senders, receivers)
    assert len(lanes) <= 255
    for receiver in range(receivers):
        wanted = heads_of_rank(geometry, receivers, receiver)
        assert heads_of(geometry, receivers, receiver) == Heads(wanted.start, wanted.stop - wanted.start)
        covered: list[int] = []
        for lane in (lane for lane in lanes if lane.receiver == receiver):
            sent = heads_of_rank(geometry, senders, lane.sender)
            assert sent.start <= lane.heads.first < lane.heads.end <= sent.stop
            assert lane.sender_head == lane.heads.first - sent.start
            assert lane.receiver_head == lane.heads.first - wanted.start
            assert lane.row_bytes * heads == lane.heads.count * geometry.page_bytes
            covered += range(lane.heads.first, lane.heads.end)
        assert covered == list(range(wanted.start, wanted.stop))


def ends(geometry: KVGeometry, senders: int, receivers: int) -> list[tuple[int, int, int, int]]:
    return [
        (lane.sender, lane.receiver, lane.heads.first, lane.heads.count)
        for lane in lanes_of(geometry, senders, receivers)
    ]


def test_the_pairs_of_the_field() -> None:
    assert ends(GEOMETRY, 1, 1) == [(0, 0, 0, 4)]
    assert ends(GEOMETRY, 1, 2) == [(0, 0, 0, 2), (0, 1, 2, 2)]
    assert ends(GEOMETRY, 2, 1) == [(0, 0, 0, 2), (1, 0, 2, 2)]
    assert ends(GEOMETRY, 2, 4) == [(0, 0, 0, 1), (0, 1, 1, 1), (1, 2, 2, 1), (1, 3, 3, 1)]
    assert ends(GEOMETRY, 4, 2) == [(0, 0, 0, 1), (1, 0, 1, 1), (2, 1, 2, 1), (3, 1, 3, 1)]


def test_an_engines_own_layout_is_not_cut() -> None:
    own = dataclasses.replace(GEOMETRY, layout=Layout.ENGINE)
    assert ends(own, 2, 2) == [(0, 0, 0, 2), (1, 1, 2, 2)]
    for senders, receivers in ((1, 2), (2, 1)):
        said = f"ranks is {senders} of prefill and {receivers} of decode, and geometry.head_runs is 0: .*=HND"
        with pytest.raises(ValueError, match=said):
            lanes_of(own, senders, receivers)
    assert len(ends(dataclasses.replace(MLA, layout=Layout.ENGINE), 1, 2)) == 2
    assert len(ends(dataclasses.replace(own, kv_heads=2), 2, 8)) == 8, "as many shares of the heads"


@pytest.mark.parametrize("runs", [1, 2])
def test_an_engines_layout_with_its_heads_apart_is_as_any_other(runs: int) -> None:
    own = dataclasses.replace(GEOMETRY, layout=Layout.ENGINE, head_runs=runs)
    for pair in ((1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8), (8, 8)):
        assert lanes_of(own, *pair) == lanes_of(GEOMETRY, *pair)


def test_held_by_several_ranks_it_comes_from_different_ones() -> None:
    two = dataclasses.replace(GEOMETRY, kv_heads=2)
    assert ends(two, 4, 4) == [(0, 0, 0, 1), (1, 1, 0, 1), (2, 2, 1, 1), (3, 3, 1, 1)]
    assert [lane[:2] for lane in ends(MLA, 4, 4)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [lane[:2] for lane in ends(MLA, 1, 2)] == [(0, 0), (0, 1)]


def test_each_cache_has_lanes_of_its_own() -> None:
    both = dataclasses.replace(GEOMETRY, further=(CacheShape(2, 1, 132, "uint8", 1), CacheShape(3, 2, 4, "uint8")))
    lanes = lanes_of(both, 1, 4)
    assert [(lane.receiver, lane.cache, lane.heads.first) for lane in lanes] == [
        (rank, cache, (rank, 0, rank // 2)[cache]) for rank in range(4) for cache in range(3)
    ]
    for number, cache in enumerate(both.caches):
        alone = [dataclasses.replace(lane, cache=number) for lane in lanes_of(cache, 1, 4)]
        assert [lane for lane in lanes if lane.cache == number] == alone
    own = rank_geometry(both, 4)
    assert [cache.kv_heads for cache in own.caches] == [1, 1, 1]
    assert page_bytes_of(both, 4) == 4 * own.page_bytes


def test_a_further_cache_that_ranks_cannot_share_is_named() -> None:
    odd = dataclasses.replace(GEOMETRY, further=(CacheShape(2, 1, 132, "uint8", 1), CacheShape(2, 3, 4, "uint8")))
    for refuse in (check_ranks, page_bytes_of, lambda geometry, ranks: lanes_of(geometry, 1, ranks)):
        with pytest.raises(ValueError, match=r"ranks is 4; it must divide geometry\.further\[1\]\.kv_heads = 3"):
            refuse(odd, 4)


def test_sizes_over_ranks() -> None:
    assert rank_geometry(GEOMETRY, 2).kv_heads == 2
    assert rank_geometry(MLA, 8) == MLA
    assert page_bytes_of(GEOMETRY, 4) == GEOMETRY.page_bytes
    assert page_bytes_of(GEOMETRY, 8) == 2 * GEOMETRY.page_bytes
    assert page_bytes_of(MLA, 8) == 8 * MLA.page_bytes
    assert [shard.ranks for shard in shards_of(GEOMETRY, 8)] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("geometry", "ranks", "shards"), [(GEOMETRY, 1, 1), (GEOMETRY, 2, 2), (GEOMETRY, 8, 4), (MLA, 4, 1)]
)
def test_a_host_row_has_each_head_once(geometry: KVGeometry, ranks: int, shards: int) -> None:
    shape = PoolShape(geometry, ranks, StorageOrder.LAYER_MAJOR, 3)
    parts = shape.row_shards
    assert len(parts) == shards
    assert [part.start for part in parts] == [i * shape.whole_rows[0][0].row_bytes for i in range(shards)]
    assert shards * shape.whole_rows[0][0].row_bytes == shape.row_bytes == geometry.page_bytes
    assert sorted(rank for part in parts for rank in part.ranks) == list(range(ranks))


@pytest.mark.parametrize("ranks", [0, 65])
def test_too_few_or_too_many_ranks(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks is {ranks}; it must be 1 to 64"):
        PoolShape(GEOMETRY, ranks, StorageOrder.PAGE_MAJOR, 3)
    with pytest.raises(ValueError, match="rank is 2; it must be 0 to 1"):
        heads_of(GEOMETRY, 2, 2)


def test_more_lanes_than_a_receiver_counts_are_refused() -> None:
    four = dataclasses.replace(GEOMETRY, kv_heads=64, further=(CacheShape(1, 1, 8, "uint8", 1),) * 3)
    assert len(lanes_of(four, 64, 32)) < 255
    with pytest.raises(ValueError, match=r"ranks is 64 of prefill and 64 of decode, .* 4 caches are 256 lanes; .* 255"):
        lanes_of(four, 64, 64)
