"""Eviction policies: which unlocked leaf goes first."""

from __future__ import annotations

import hashlib

import pytest

from kvferry.radix.pool import PagePool
from kvferry.radix.tree import OUTPUT, PROMPT, Clock, PagedRadixTree, Policy, policy_names


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class World:
    """Trees of one-page leaves over one pool, with one policy and clock."""

    def __init__(self, policy: str, *, trees: int = 1, evict_output_first: bool = False) -> None:
        self.pool = PagePool(64)
        self.policy, self.clock = Policy(policy, evict_output_first), Clock()
        self.trees = [PagedRadixTree(self.pool, policy=self.policy, clock=self.clock) for _ in range(trees)]
        self.names: dict[int, str] = {}

    def put(self, name: str, *, tree: int = 0, kind: int = PROMPT, priority: int = 0) -> None:
        (page,) = self.pool.allocate(1)
        self.names[page] = name
        self.trees[tree].insert(digest(name), [page], kind=kind, priority=priority)

    def use(self, name: str, times: int = 1, *, tree: int = 0, priority: int = 0) -> None:
        for _ in range(times):
            it = self.trees[tree]
            it.unlock(it.lock(it.match(digest(name)), priority))

    def order(self) -> str:
        """The names in the order in which they go, compared over all trees."""
        gone = ""
        while candidates := [(key, tree) for tree in self.trees if (key := tree.oldest()) is not None]:
            tree = min(candidates, key=lambda pair: pair[0])[1]
            for other in self.trees:
                other.check()
            (page,) = tree.evict(1).freed
            gone += self.names[page]
        return gone


def test_names() -> None:
    assert policy_names()[0] == "lru"
    assert {"lru", "lfu", "fifo", "priority"} <= set(policy_names())
    policy = Policy("lfu", evict_output_first=True)
    assert (policy.name, policy.evict_output_first) == ("lfu", True)


def test_unknown_names_and_parameters() -> None:
    with pytest.raises(ValueError, match="policy: 'mru', must be one of: lru, lfu, fifo, priority"):
        Policy("mru")
    with pytest.raises(ValueError, match="policy lru has no parameter 'window'; it has: none"):
        Policy("lru", window=3)


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", "bdac"), ("lfu", "bdca"), ("fifo", "abcd"), ("priority", "bdac")]
)
@pytest.mark.parametrize("trees", [1, 2])
def test_order(policy: str, order: str, trees: int) -> None:
    world = World(policy, trees=trees)
    for i, name in enumerate("abcd"):
        world.put(name, tree=i % trees)
    world.use("a", 2, tree=0)
    world.use("c", tree=0)
    assert world.order() == order


def test_least_frequently_used_falls_back_to_recency() -> None:
    world = World("lfu", trees=2)
    for i, name in enumerate("abcd"):
        world.put(name, tree=i % 2)
    for name, times in (("a", 300), ("b", 300), ("c", 299), ("d", 1)):
        world.use(name, times, tree="abcd".index(name) % 2)
    assert world.order() == "dcab"


def test_least_important_goes_first() -> None:
    world = World("priority")
    for name, priority in (("a", 5), ("b", -5), ("c", 0), ("d", 5), ("e", 2_000_000_000)):
        world.put(name, priority=priority)
    world.use("a", priority=9)  # a lock never makes it less important
    assert world.order() == "edacb"


def test_a_lock_makes_more_important() -> None:
    world = World("priority")
    world.put("a", priority=5)
    world.put("b", priority=4)
    world.use("a", priority=1)
    assert world.order() == "ba"


def test_output_first() -> None:
    world = World("lru", evict_output_first=True)
    for name, kind in (("a", PROMPT), ("b", OUTPUT), ("c", PROMPT), ("d", OUTPUT)):
        world.put(name, kind=kind)
    assert world.order() == "bdac"
    world = World("lru")
    for name, kind in (("a", PROMPT), ("b", OUTPUT)):
        world.put(name, kind=kind)
    assert world.order() == "ab"


def test_clock_is_shared_and_settable() -> None:
    world = World("lru", trees=2)
    world.clock.now = 12.5
    before = world.clock.tick
    world.put("a", tree=0)
    world.put("b", tree=1)
    world.use("a", tree=0)
    assert world.clock.tick == before + 4
    assert world.trees[0].dump(1)[0].accessed_s == 12.5
