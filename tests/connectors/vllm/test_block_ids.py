"""The blocks of requests, as the outputs of vLLM's scheduler tell them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvferry.connectors.vllm.block_ids import BlockIds, is_empty


@dataclass
class New:
    """The part of vLLM's NewRequestData that is read."""

    req_id: str
    block_ids: tuple[list[int], ...]


@dataclass
class Cached:
    """The part of vLLM's CachedRequestData that is read."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class Output:
    """The part of vLLM's SchedulerOutput that is read."""

    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    finished_req_ids: set[str] = field(default_factory=set)


def test_blocks_come_behind_those_that_a_running_request_has() -> None:
    ids, first = BlockIds(), [4, 7]
    ids.follow(Output([New("a", (first,)), New("b", ([1],))]))
    ids.follow(Output(scheduled_cached_reqs=Cached(["a", "b"], [([9],), None])))
    assert ids.of("a") == [4, 7, 9] and ids.of("b") == [1]
    assert first == [4, 7]  # vLLM's own list


def test_a_resumed_request_has_other_blocks() -> None:
    ids = BlockIds()
    ids.follow(Output([New("a", ([4, 7],)), New("b", ([5],))]))
    ids.follow(Output(scheduled_cached_reqs=Cached(["a"], [([2, 3, 8],)], {"a"})))  # the V1 model runner
    ids.follow(Output([New("b", ([6, 1],))]))  # the V2 model runner
    assert ids.of("a") == [2, 3, 8] and ids.of("b") == [6, 1]


def test_a_finished_request_is_forgotten() -> None:
    ids = BlockIds()
    ids.follow(Output([New("a", ([4],)), New("b", ([5],))]))
    ids.follow(Output([New("c", ([4],))], finished_req_ids={"a", "never scheduled"}))
    assert len(ids) == 2 and ids.of("c") == [4]
    with pytest.raises(KeyError):
        ids.of("a")


@pytest.mark.parametrize(("free", "found", "empty"), [(9, 0, True), (8, 0, False), (9, 1, False)])
def test_an_engine_that_holds_or_finds_a_block_is_not_empty(free: int, found: int, empty: bool) -> None:
    pool = SimpleNamespace(
        num_gpu_blocks=10, get_num_free_blocks=lambda: free, cached_block_hash_to_block=[None] * found
    )
    assert is_empty(pool) is empty
