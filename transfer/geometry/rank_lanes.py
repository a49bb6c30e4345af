"""Tensor parallelism: which rank holds which heads, and the lanes by which pages get from some ranks to others.

Ranks share the heads evenly. Where there are more ranks than KV heads, each head is held by as many ranks as follow
each other, as in engines; where K and V are one (MLA), every rank holds the whole page.

A lane carries the same heads of every page from one rank of the sender to one of the receiver. Each head of each
receiving rank is in exactly one lane, so a page has arrived when its row has on all of them. Both ends compute the
same lanes from the geometry and both numbers of ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout

MAX_RANKS = 64


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


class Shard(NamedTuple):
    """A distinct range of heads, and the ranks that hold it."""

    heads: Heads
    ranks: tuple[int, ...]


def check_ranks(geometry: KVGeometry, ranks: int) -> None:
    """ValueError where so many ranks cannot share the heads."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks is {ranks}; it must be 1 to {MAX_RANKS}")
    heads = geometry.kv_heads
    if geometry.tensors > 1 and heads % ranks and ranks % heads:
        raise ValueError(f"ranks is {ranks}; it must divide geometry.kv_heads = {heads}, or be a multiple of it")


def shards_of(geometry: KVGeometry, ranks: int) -> list[Shard]:
    """The distinct ranges of heads, ascending. ValueError as for `check_ranks`."""
    check_ranks(geometry, ranks)
    shards = 1 if geometry.tensors == 1 else min(ranks, geometry.kv_heads)
    count, copies = geometry.kv_heads // shards, ranks // shards
    return [Shard(Heads(i * count, count), tuple(range(i * copies, (i + 1) * copies))) for i in range(shards)]


def heads_of(geometry: KVGeometry, ranks: int, rank: int) -> Heads:
    """The heads that a rank holds. ValueError as for `check_ranks`."""
    for shard in shards_of(geometry, ranks):
        if rank in shard.ranks:
            return shard.heads
    raise ValueError(f"rank is {rank}; it must be 0 to {ranks - 1}")


def rank_geometry(geometry: KVGeometry, ranks: int) -> KVGeometry:
    """The shape of one rank's part. ValueError as for `check_ranks`."""
    return dataclasses.replace(geometry, kv_heads=heads_of(geometry, ranks, 0).count)


def lanes_of(geometry: KVGeometry, senders: int, receivers: int) -> list[Lane]:
    """The lanes, by receiving rank, then by head. Where several ranks could send a range, receivers take different
    ones. ValueError as for `check_ranks`, and where pages would be cut whose heads only the engine finds."""
    sending, receiving = shards_of(geometry, senders), shards_of(geometry, receivers)
    if geometry.layout is Layout.ENGINE and not geometry.head_runs and len(sending) != len(receiving):
        raise ValueError(
            f"ranks is {senders} of prefill and {receivers} of decode, and geometry.head_runs is 0: in this engine "
            "layout a token's heads lie side by side, or nobody says that they do not, so that pages go whole from "
            "rank to rank; give both engines as many ranks, or heads outermost in a block "
            "(vLLM: VLLM_KV_CACHE_LAYOUT=HND)"
        )
    head_bytes = geometry.page_bytes // geometry.kv_heads
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
                    )
                )
    lanes.sort(key=lambda lane: (lane.receiver, lane.heads.first))
    return lanes
