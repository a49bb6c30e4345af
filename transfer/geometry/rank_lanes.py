"""Tensor parallelism: which rank holds which heads, and the lanes by which pages get from some ranks to others.

Ranks share the heads evenly. Where there are more ranks than KV heads, each head is held by as many ranks as follow
each other, as in engines; where K and V are one (MLA, an indexer's keys), every rank holds the whole cache.

A lane carries the same heads of one cache of every page from one rank of the sender to one of the receiver. Each head
of each receiving rank is in exactly one lane, so a page has arrived when its row has on all of them. Both ends compute
the same lanes from the geometry and both numbers of ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout

MAX_RANKS = 64
MAX_LANES = 255  # a receiver counts those that a page waits for in a byte


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads [first, first + count) of the model."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Lane:
    """A way of some heads from a sending to a receiving rank. Its number is its place in the list that `lanes_of`
    gives."""

    sender: int  # rank
    receiver: int  # rank
    heads: Heads  # of the model
    sender_head: int  # the first of them, counted on the sending rank
    receiver_head: int  # likewise on the receiving one
    row_bytes: int  # of a page's row on this lane
    cache: int = 0  # of the geometry's caches


class Shard(NamedTuple):
    """A distinct range of a cache's heads, and the ranks that hold it."""

    heads: Heads
    ranks: tuple[int, ...]


def check_ranks(geometry: KVGeometry, ranks: int) -> None:
    """ValueError where so many ranks cannot share the heads of each cache."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks is {ranks}; it must be 1 to {MAX_RANKS}")
    for number, cache in enumerate(geometry.caches):
        heads = cache.kv_heads
        if cache.tensors > 1 and heads % ranks and ranks % heads:
            field = f"geometry.further[{number - 1}].kv_heads" if number else "geometry.kv_heads"
            raise ValueError(f"ranks is {ranks}; it must divide {field} = {heads}, or be a multiple of it")


def shards_of(cache: KVGeometry, ranks: int) -> list[Shard]:
    """The distinct ranges of one cache's heads, ascending. ValueError as for `check_ranks`."""
    assert not cache.further, "each cache has shards of its own"
    check_ranks(cache, ranks)
    shards = 1 if cache.tensors == 1 else min(ranks, cache.kv_heads)
    count, copies = cache.kv_heads // shards, ranks // shards
    return [Shard(Heads(i * count, count), tuple(range(i * copies, (i + 1) * copies))) for i in range(shards)]


def heads_of(cache: KVGeometry, ranks: int, rank: int) -> Heads:
    """The heads of one cache that a rank holds. ValueError as for `check_ranks`."""
    for shard in shards_of(cache, ranks):
        if rank in shard.ranks:
            return shard.heads
    raise ValueError(f"rank is {rank}; it must be 0 to {ranks - 1}")


def rank_geometry(geometry: KVGeometry, ranks: int) -> KVGeometry:
    """The shape of one rank's part. ValueError as for `check_ranks`."""
    check_ranks(geometry, ranks)
    first, *others = (heads_of(cache, ranks, 0).count for cache in geometry.caches)
    pairs = zip(geometry.further, others, strict=True)
    further = tuple(dataclasses.replace(cache, kv_heads=count) for cache, count in pairs)
    return dataclasses.replace(geometry, kv_heads=first, further=further)


def lanes_of(geometry: KVGeometry, senders: int, receivers: int) -> list[Lane]:
    """The lanes, by receiving rank, then by cache and head. Where several ranks could send a range, receivers take
    different ones. ValueError as for `check_ranks`, where pages would be cut whose heads only the engine finds, and
    where there are more than MAX_LANES."""
    check_ranks(geometry, senders)
    check_ranks(geometry, receivers)
    lanes = [
        lane for number, cache in enumerate(geometry.caches) for lane in _lanes_of(number, cache, senders, receivers)
    ]
    if len(lanes) > MAX_LANES:
        raise ValueError(
            f"ranks is {senders} of prefill and {receivers} of decode, which with {len(geometry.caches)} caches are "
            f"{len(lanes)} lanes; there can be at most {MAX_LANES}"
        )
    lanes.sort(key=lambda lane: (lane.receiver, lane.cache, lane.heads.first))
    return lanes


def _lanes_of(number: int, cache: KVGeometry, senders: int, receivers: int) -> list[Lane]:
    """The lanes of one cache."""
    sending, receiving = shards_of(cache, senders), shards_of(cache, receivers)
    if cache.layout is Layout.ENGINE and not cache.head_runs and len(sending) != len(receiving):
        raise ValueError(
            f"ranks is {senders} of prefill and {receivers} of decode, and geometry.head_runs is 0: in this engine "
            "layout a token's heads lie side by side, or nobody says that they do not, so that pages go whole from "
            "rank to rank; give both engines as many ranks, or heads outermost in a block "
            "(vLLM: VLLM_KV_CACHE_LAYOUT=HND, and on CPUs pages of its --block-size)"
        )
    head_bytes = cache.page_bytes // cache.kv_heads
    lanes: list[Lane] = []
    for target in receiving:
        for receiver in target.ranks:
            for source in sending:
                first = max(source.heads.first, target.heads.first)
                end = min(source.heads.end, target.heads.end)
                if first >= end:
                    continue
                lanes.append(
                    Lane(
                        sender=source.ranks[receiver % len(source.ranks)],
                        receiver=receiver,
                        heads=Heads(first, end - first),
                        sender_head=first - source.heads.first,
                        receiver_head=first - target.heads.first,
                        row_bytes=(end - first) * head_bytes,
                        cache=number,
                    )
                )
    return lanes
