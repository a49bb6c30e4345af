"""The worker's half against real daemons (gRPC, NIXL over TCP): what arrives in the engine's blocks, and what is
reported when daemons fail. With TEST_DEVICES=cuda:0 the engines' blocks and the daemons' pools are on that GPU."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.client.requests import RequestName
from kvferry.connectors.blocks import BlockPlaces, Memory, PoolPages
from kvferry.connectors.lookups import PinLookups
from kvferry.connectors.orders import (
    Begin,
    Cancel,
    Drop,
    Load,
    News,
    Order,
    Orders,
    PromptPages,
    Release,
    Restore,
    Save,
    StorePages,
)
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import DaemonRefused, connector_of, pool_of
from kvferry.connectors.worker_side import WorkerSide
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import cache_pb2, common_pb2
from kvferry.radix.digests import chain_digests, root_digest, tail_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.connectors.engine_memory import BLOCK, HEAD_DIM, HEADS, LAYERS, EngineMemory, held_bytes
from tests.support.devices import DeviceStack, chosen

PER_PAGE = 2
PAGE = PER_PAGE * BLOCK
POOL_PAGES = 24
SECONDS = 20.0
FACTS = NamespaceFacts(
    model="test",
    revision="1",
    geometry=KVGeometry(LAYERS, HEADS, HEAD_DIM, "float32", PAGE, Layout.ENGINE),
    digest_algorithm="sha256_cbor",
    root_digest=root_digest(),
    engine_layout=f"test, blocks of {BLOCK}",
    digest_tokens=BLOCK,
)


class Pair:
    """A prefill and a decode daemon, and an engine's half for each."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.addresses: dict[str, str] = {}
        self.words: dict[str, list[str]] = {}
        self.daemons: dict[str, Process] = {}
        self.start("prefill")
        address = self.addresses["prefill"]
        self.start("decode", "--peer", f"p={address}", "--host-bytes", "64KiB")
        devices = {"prefill": chosen()[:1], "decode": chosen()[-1:]}
        self.engines = {
            role: EngineMemory(64, PER_PAGE, seed=seed, device=next(iter(devices[role]), None))
            for seed, role in enumerate(self.daemons)
        }
        self.sides = {role: self.side(role) for role in self.daemons}
        for side in self.sides.values():
            side.start()

    def start(self, role: str, *more: str) -> None:
        name = "p" if role == "prefill" else "d"
        if role not in self.words:
            self.words[role] = ["serve", "--role", role, "--name", name, "--listen", "127.0.0.1:0", *more]
            self.words[role] += ["--socket", self.socket(role), "--page-size", str(PAGE)]
            self.words[role] += ["--pool-bytes", str(POOL_PAGES * FACTS.geometry.page_bytes)]
            self.words[role] += ["--ucx-ports", "22900-22915" if role == "prefill" else "22916-22931"]
        self.daemons[role] = self.stack.start(f"{role}-daemon", self.words[role])
        self.addresses[role] = self.stack.ready(self.daemons[role])
        if role == "prefill":  # a restarted one is found where it was
            self.words[role][6] = self.addresses[role]

    def socket(self, role: str) -> str:
        return f"{self.stack.folder}/{role}.sock"

    def settings(self, role: str) -> Settings:
        return Settings(self.socket(role), deadline_seconds=5.0, store_seconds=5.0)

    def side(self, role: str, facts: NamespaceFacts = FACTS) -> WorkerSide:
        settings = self.settings(role)
        number = common_pb2.ROLE_PREFILL if role == "prefill" else common_pb2.ROLE_DECODE
        engine = self.engines[role]
        connect = connector_of(settings, number, facts.to_proto(), role, engine.mover)
        return WorkerSide(settings, engine.map, engine.mover, connect)

    def give(self, role: str, *orders: Order, preempted: tuple[str, ...] = ()) -> None:
        """One step."""
        self.sides[role].take(Orders(list(orders), preempted))
        self.sides[role].forward_done()

    def stats(self, role: str) -> cache_pb2.SideStats:
        with grpc.insecure_channel(f"unix:{self.socket(role)}") as channel:
            return fetch(channel).sides[0]

    def at_rest(self, role: str) -> bool:
        pool = self.stats(role).pool
        requests = self.stats(role).requests
        return not (pool.leased or pool.arriving or pool.locks or pool.promised or requests.running or requests.waiting)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with DeviceStack() as stack:
        made = Pair(stack)
        try:
            prompt, name = new_prompt(PAGE), new_name()
            for _ in range(20):  # until the daemons' session is up
                exchange(made, f"first {_}", name, prompt, range(PER_PAGE), range(PER_PAGE))
                if made.sides["decode"].moved.loads:
                    break
                time.sleep(0.3)
                name = new_name()
            yield made
        finally:
            for side in made.sides.values():
                side.close()


def new_name() -> RequestName:
    return RequestName(secrets.token_bytes(16), 1)


def new_prompt(tokens: int, shared: PromptPages | None = None) -> PromptPages:
    """`shared`: it begins with these full pages."""
    parent = shared.digests[-32:] if shared is not None else secrets.token_bytes(32)
    begun = shared.digests if shared is not None else b""
    full, rest = divmod(tokens, PAGE)
    chosen = np.frombuffer(secrets.token_bytes(4 * tokens), dtype=np.uint32)
    own = chain_digests(chosen[: (full - len(begun) // 32) * PAGE], page_size=PAGE, parent=parent).tobytes()
    tail = tail_digest(chosen[:rest], page_size=PAGE, parent=(begun + own)[-32:] or parent)
    return PromptPages(begun + own, tokens, tail)


def until(what: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def received(side: WorkerSide, request: str, seconds: float = SECONDS) -> set[int]:
    """Waits for the report and returns the bad blocks; nothing else may be reported meanwhile."""
    told: set[str] = set()

    def there() -> bool:
        sent, got = side.reports.take()
        assert not sent
        told.update(got)
        return bool(told)

    until(there, seconds)
    assert told == {request}
    return side.reports.take_bad()


def sent(side: WorkerSide, request: str) -> None:
    told: set[str] = set()

    def there() -> bool:
        got, others = side.reports.take()
        assert not others
        told.update(got)
        return bool(told)

    until(there)
    assert told == {request}


def push(pair: Pair, request: str, name: RequestName, prompt: PromptPages, blocks: tuple[int, ...]) -> None:
    """A prefill engine's steps: two chunks."""
    half = prompt.tokens // 2
    pair.give("prefill", Begin(request, name, prompt), Save(request, half, blocks))
    pair.give("prefill", Save(request, prompt.tokens, blocks))
    pair.give("prefill", Release(request))


def exchange(
    pair: Pair,
    request: str,
    name: RequestName,
    prompt: PromptPages,
    theirs: range,
    ours: range,
    held: int = 0,
    start: int = -1,
) -> set[int]:
    """From the prefill engine's blocks `theirs` to the decode engine's `ours`, which holds the first `held` tokens'."""
    start = held if start < 0 else start
    push(pair, request, name, prompt, tuple(theirs))
    blocks = tuple(ours)
    pair.give(
        "decode",
        Load(request, name, prompt, "p", start, blocks[: held // BLOCK], blocks[start // BLOCK :]),
    )
    bad = received(pair.sides["decode"], request)
    sent(pair.sides["prefill"], request)
    return bad


def heard(side: WorkerSide) -> None:
    """All that it was told until now has been taken in."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), side._loop).result(SECONDS)


def same(pair: Pair, theirs: range, ours: range, last: int = BLOCK) -> bool:
    """`last`: tokens of the last block that are the prompt's; behind them nothing has come."""
    prefill, decode = pair.engines["prefill"], pair.engines["decode"]
    *full, end = zip(theirs, ours, strict=True)
    return prefill.beginning(end[0], last) == decode.block(end[1]) and all(
        prefill.block(a) == decode.block(b) for a, b in full
    )


def test_a_prompt_arrives_in_the_decode_engines_blocks(pair: Pair) -> None:
    prompt = new_prompt(3 * PAGE + 5)
    assert not same(pair, range(7), range(20, 27), last=5)
    assert exchange(pair, "a", new_name(), prompt, range(7), range(20, 27)) == set()
    assert same(pair, range(7), range(20, 27), last=5)
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_what_the_decode_engine_holds_does_not_travel_and_the_daemon_gets_it_from_there(pair: Pair) -> None:
    prompt = new_prompt(4 * PAGE)
    for i in range(5):  # the engines agree on what both hold: two pages and the first block of the third
        pair.engines["decode"].take_from(pair.engines["prefill"], 10 + i, 30 + i)
    before = pair.stats("decode").transfers.delta_pages
    assert exchange(pair, "a", new_name(), prompt, range(10, 18), range(30, 38), 2 * PAGE, 2 * PAGE + BLOCK) == set()
    assert same(pair, range(10, 18), range(30, 38))
    assert pair.stats("decode").transfers.delta_pages - before == 2
    # the pages that the engine held are in the daemon's tree now, as are those that came
    again = new_prompt(5 * PAGE, prompt)
    pair.give(
        "decode",
        Restore(
            "b", new_name(), PromptPages(again.digests[: 4 * 32], 4 * PAGE + 1, bytes(32)), 0, tuple(range(40, 48))
        ),
    )
    assert received(pair.sides["decode"], "b") == set()
    assert same(pair, range(10, 18), range(40, 48))
    until(lambda: pair.at_rest("decode"))


def test_blocks_that_are_held_are_read_when_the_step_that_computes_them_is_over(pair: Pair) -> None:
    """vLLM lets a request hold blocks that another computes in the same step."""
    prompt, name = new_prompt(2 * PAGE), new_name()
    engine, side = pair.engines["decode"], pair.sides["decode"]
    push(pair, "a", name, prompt, (0, 1, 2, 3))
    side.take(Orders([Load("a", name, prompt, "p", PAGE, (40, 41), (42, 43))]))
    until(lambda: pair.stats("decode").requests.running)
    time.sleep(0.2)
    for layer in engine.layers:
        layer[40:42] += 1
    wanted = [engine.block(40), engine.block(41)]
    side.forward_done()
    assert received(side, "a") == set()
    sent(pair.sides["prefill"], "a")
    pair.give("decode", Restore("b", new_name(), PromptPages(prompt.digests[:32], PAGE + 1, bytes(32)), 0, (50, 51)))
    assert received(side, "b") == set()
    assert [engine.block(50), engine.block(51)] == wanted


def test_what_is_stored_is_found_by_a_lookup_and_comes_back(pair: Pair) -> None:
    engine, side = pair.engines["decode"], pair.sides["decode"]
    prompt = new_prompt(3 * PAGE)
    wanted = [engine.block(n) for n in range(6)]
    pair.give("decode", StorePages("a", new_name(), prompt, tuple(range(6))))
    sent(side, "a")
    lookups = PinLookups(pair.socket("decode"), common_pb2.ROLE_DECODE, FACTS.id, timeout_s=2.0)
    try:
        longer = new_prompt(4 * PAGE, prompt)
        until(lambda: pair.at_rest("decode"))
        lookup = lookups.start(longer.digests)
        until(lambda: lookup.tokens is not None)
        assert lookup.tokens == 3 * PAGE
        assert pair.stats("decode").pool.locks == 1
        until(lambda: lookups.daemon == "d")
        assert lookups.most_pages == POOL_PAGES
        restore = PromptPages(prompt.digests, 3 * PAGE + 1, bytes(32))
        pair.give("decode", Restore("b", new_name(), restore, PAGE, tuple(range(50, 54))))
        assert received(side, "b") == set()
        assert [engine.block(n) for n in range(50, 54)] == wanted[2:]
        lookup.release()
        until(lambda: pair.at_rest("decode"))
        nothing = lookups.start(new_prompt(PAGE).digests)
        until(lambda: nothing.tokens == 0)
        assert lookups.up
    finally:
        lookups.close()


def test_a_restore_of_what_is_not_held_reports_its_blocks(pair: Pair) -> None:
    prompt = new_prompt(2 * PAGE + 1)
    before = [pair.engines["decode"].block(n) for n in range(64)]
    pair.give("decode", Restore("a", new_name(), prompt, BLOCK, (8, 9, 10)))
    assert received(pair.sides["decode"], "a") == {8, 9, 10}
    assert [pair.engines["decode"].block(n) for n in range(64)] == before
    until(lambda: pair.at_rest("decode"))


def test_prefill_loads_what_its_daemon_holds(pair: Pair) -> None:
    prompt = new_prompt(2 * PAGE)
    exchange(pair, "a", new_name(), prompt, range(4), range(20, 24))
    engine = pair.engines["prefill"]
    wanted = [engine.block(n) for n in range(4)]
    longer, name = new_prompt(3 * PAGE, prompt), new_name()
    pair.give("prefill", Begin("b", name, longer, 0, 2 * PAGE, (40, 41, 42, 43)))
    assert received(pair.sides["prefill"], "b") == set()
    assert [engine.block(n) for n in range(40, 44)] == wanted
    pair.give("prefill", Save("b", 3 * PAGE, tuple(range(40, 46))), Release("b"))
    pair.give("decode", Load("b", name, longer, "p", 0, (), tuple(range(30, 36))))
    assert received(pair.sides["decode"], "b") == set()
    sent(pair.sides["prefill"], "b")
    assert same(pair, range(40, 46), range(30, 36))


def test_ends_before_their_time_are_reported_once_and_leave_nothing(pair: Pair) -> None:
    decode, prefill = pair.sides["decode"], pair.sides["prefill"]
    name, prompt = new_name(), new_prompt(2 * PAGE)
    # a load whose prefill never comes, cancelled before and after it began
    pair.give("decode", Load("a", name, prompt, "p", 0, (), tuple(range(4))), Cancel("a"))
    assert received(decode, "a") == set(range(4))
    pair.give("decode", Load("b", new_name(), prompt, "p", 0, (), tuple(range(4))))
    until(lambda: pair.stats("decode").requests.running)
    pair.give("decode", Cancel("b"))
    assert received(decode, "b") == set(range(4))
    pair.give("decode", Cancel("b"))  # it was reported already
    # a push that is dropped in the middle
    pair.give("prefill", Begin("c", new_name(), prompt), Save("c", PAGE, tuple(range(4))))
    pair.give("prefill", Drop("c"))
    sent(prefill, "c")
    # one whose blocks are taken away, and computed again in others
    again = new_name()
    pair.give("prefill", Begin("d", again, prompt), Save("d", PAGE, tuple(range(4))))
    pair.give("prefill", preempted=("d",))
    pair.give("prefill", Save("d", 2 * PAGE, (10, 11, 12, 13)), Release("d"))
    sent(prefill, "d")
    pair.give("decode", Load("d", again, prompt, "p", 0, (), (20, 21, 22, 23)))
    assert received(decode, "d") == set()
    assert same(pair, range(12, 14), range(22, 24))
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))
    assert decode.reports.take() == prefill.reports.take() == (set(), set())


def test_blocks_of_a_preempted_prompt_are_waited_for_before_its_push_is_taken_in(pair: Pair) -> None:
    side, engine = pair.sides["prefill"], pair.engines["prefill"]
    prompt, name = new_prompt(2 * PAGE), new_name()
    gate = threading.Event()
    side._loop.call_soon_threadsafe(gate.wait, SECONDS)  # the loop takes nothing in meanwhile
    pair.give("prefill", Begin("a", name, prompt), Save("a", PAGE, (0, 1)))
    opening = threading.Timer(0.2, gate.set)
    opening.start()
    try:
        pair.give("prefill", preempted=("a",))
    finally:
        gate.set()
        opening.join()
    for layer in engine.layers:  # they are another request's now
        layer[0:2] += 1
    pair.give("prefill", Save("a", 2 * PAGE, (10, 11, 12, 13)), Release("a"))
    pair.give("decode", Load("a", name, prompt, "p", 0, (), (20, 21, 22, 23)))
    assert received(pair.sides["decode"], "a") == set()
    sent(side, "a")
    assert same(pair, range(10, 14), range(20, 24))
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_a_decode_engine_waits_for_no_push_of_what_is_preempted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the engine's thread waits")

    side = pair.sides["decode"]
    monkeypatch.setattr(side, "_wait", never)
    side.take(Orders([], ("a",)))
    monkeypatch.undo()


def test_a_lease_that_fails_before_the_held_blocks_are_there_gets_none_of_them(pair: Pair) -> None:
    side, name, prompt = pair.sides["decode"], new_name(), new_prompt(2 * PAGE)
    side.take(Orders([Load("a", name, prompt, "p", PAGE, (40, 41), (42, 43))]))  # not computed yet
    until(lambda: pair.stats("decode").requests.running)
    pair.give("prefill", Begin("a", name, prompt))
    until(lambda: pair.stats("prefill").transfers.active)
    pair.give("prefill", Drop("a"))
    sent(pair.sides["prefill"], "a")
    client = side._sessions.client
    assert client is not None
    until(lambda: client._requests[name].failure is not None)
    before = held_bytes(pool_of(client).memory)
    side.forward_done()
    assert received(side, "a") == {42, 43}
    assert (held_bytes(pool_of(client).memory) == before).all(), "its pages were another's already"
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_blocks_are_reported_when_their_copy_is_over_however_often_it_is_cancelled(pair: Pair) -> None:
    side, prompt, name = pair.sides["decode"], new_prompt(2 * PAGE), new_name()
    push(pair, "a", name, prompt, (0, 1, 2, 3))
    gate = threading.Event()
    side._copier.submit(gate.wait, SECONDS)  # the copies wait behind it
    try:
        load = Load("a", name, prompt, "p", 0, (), (20, 21, 22, 23))
        pair.give("decode", load, StorePages("b", new_name(), new_prompt(PAGE), (30, 31)))
        until(lambda: side._copier._work_queue.qsize() == 2)
        for _ in range(3):
            pair.give("decode", Cancel("a"), Cancel("b"))
            heard(side)
        time.sleep(0.1)
        assert side.reports.take() == (set(), set())
    finally:
        gate.set()
    told: set[str] = set()
    until(lambda: [told.update(names) for names in side.reports.take()] and told == {"a", "b"})
    assert side.reports.take_bad() == {20, 21, 22, 23}
    assert same(pair, range(4), range(20, 24)), "it had been copied all the same"
    sent(pair.sides["prefill"], "a")
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_a_prefill_that_gives_up_is_heard_of_before_the_deadline(pair: Pair) -> None:
    name, prompt = new_name(), new_prompt(2 * PAGE)
    pair.give("decode", Load("a", name, prompt, "p", 0, (), tuple(range(4))))
    pair.give("prefill", Begin("a", name, prompt), Save("a", PAGE, tuple(range(4))))
    until(lambda: pair.stats("prefill").transfers.active)
    pair.give("prefill", Drop("a"))
    assert received(pair.sides["decode"], "a", seconds=4.0) == set(range(4))
    sent(pair.sides["prefill"], "a")
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_a_prompt_that_the_prefill_daemon_has_no_room_for_is_told_to_the_scheduler(pair: Pair) -> None:
    side, prompt = pair.sides["prefill"], new_prompt((POOL_PAGES + 1) * PAGE)
    side.reports.take_news()
    push(pair, "a", new_name(), new_prompt(PAGE), (0, 1))
    sent(side, "a")
    assert side.reports.take_news() is None, "it is in the daemon's hands"
    push(pair, "b", new_name(), prompt, tuple(range(2 * POOL_PAGES + 2)))
    sent(side, "b")
    assert side.reports.take_news() == News(frozenset({"b"}))


class Numbered:
    """A mover whose moments are numbers: what was told to wait for which."""

    records = False

    def __init__(self, engine: EngineMemory) -> None:
        self.seen: list[tuple[str, int]] = []
        self._inner = engine.mover
        self._moments = 0

    def moment(self) -> Any:
        self._moments += 1
        return self._moments

    def misfit(self, memories: Sequence[Memory]) -> str:
        return self._inner.misfit(memories)

    def to_pages(self, pool: PoolPages, places: BlockPlaces, after: Any) -> None:
        self.seen.append(("to pages", after))
        self._inner.to_pages(pool, places, self._inner.moment())

    def to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Any) -> None:
        self.seen.append(("to blocks", after))
        self._inner.to_blocks(pool, places, self._inner.moment())

    def mask(self, pool: PoolPages, page: int, kept: NDArray[np.uint8]) -> None:
        self._inner.mask(pool, page, kept)


def test_copies_of_a_decode_engine_wait_for_what_computes_or_uses_the_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, mover = pair.sides["decode"], Numbered(pair.engines["decode"])
    monkeypatch.setattr(side, "_mover", mover)
    prompt, name = new_prompt(2 * PAGE), new_name()
    push(pair, "a", name, prompt, (0, 1, 2, 3))
    pair.give("decode", Load("a", name, prompt, "p", PAGE, (40, 41), (42, 43)))  # between 1 and 2
    assert received(side, "a") == set()
    sent(pair.sides["prefill"], "a")
    assert mover.seen == [("to pages", 2), ("to blocks", 1)], (
        "held blocks may be computed in this step, others were used"
    )
    pair.give("decode", Restore("b", new_name(), PromptPages(prompt.digests[:32], PAGE + 1, bytes(32)), 0, (50, 51)))
    assert received(side, "b") == set()
    assert mover.seen[2:] == [("to blocks", 3)]
    pair.give("decode")  # no orders, no moments
    pair.give("decode", StorePages("c", new_name(), new_prompt(PAGE), (4, 5)))
    sent(side, "c")
    assert mover.seen[3:] == [("to pages", 5)]
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_copies_of_a_prefill_engine_wait_for_what_computes_or_uses_the_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, mover = pair.sides["prefill"], Numbered(pair.engines["prefill"])
    prompt = new_prompt(2 * PAGE)
    exchange(pair, "a", new_name(), prompt, range(4), range(20, 24))
    monkeypatch.setattr(side, "_mover", mover)
    longer, name = new_prompt(4 * PAGE, prompt), new_name()
    blocks = tuple(range(40, 48))
    pair.give("prefill", Begin("b", name, longer, 0, 2 * PAGE, blocks[:4]))  # between 1 and 2
    assert received(side, "b") == set()
    pair.give("prefill", Save("b", 3 * PAGE, blocks))  # before 3
    until(lambda: len(mover.seen) == 2)
    pair.give("prefill", Save("b", 4 * PAGE, blocks))  # before 4
    until(lambda: len(mover.seen) == 3)
    assert mover.seen == [("to blocks", 1), ("to pages", 3), ("to pages", 4)]
    pair.give("prefill", Release("b"))
    pair.give("decode", Load("b", name, longer, "p", 0, (), tuple(range(30, 38))))
    assert received(pair.sides["decode"], "b") == set()
    sent(side, "b")
    assert same(pair, range(40, 48), range(30, 38))


def test_an_unknown_prefill_daemon_and_other_tokens_fail_the_load(pair: Pair) -> None:
    name, prompt = new_name(), new_prompt(2 * PAGE)
    pair.give("decode", Load("a", name, prompt, "nobody", 0, (), tuple(range(4))))
    assert received(pair.sides["decode"], "a") == set(range(4))
    push(pair, "b", name, prompt, tuple(range(4)))
    pair.give("decode", Load("b", name, new_prompt(2 * PAGE), "p", 0, (), tuple(range(4))))
    assert received(pair.sides["decode"], "b") == set(range(4))
    sent(pair.sides["prefill"], "b")


def test_an_engine_of_other_facts_is_refused_by_name(pair: Pair) -> None:
    for change, message in (
        ({"root_digest": bytes(32)}, "root_digest is .* configure the same hash seed .*PYTHONHASHSEED"),
        (
            {"digest_tokens": PAGE},
            f"digest_tokens is {BLOCK} here and {PAGE} there; give both engines the same hash block",
        ),
        ({"engine_layout": "other"}, "engine_layout is test, blocks of 8 here and other there"),
    ):
        fields = {name: getattr(FACTS, name) for name in FACTS.__slots__}
        side = pair.side("decode", NamespaceFacts(**{**fields, **change}))
        with pytest.raises(DaemonRefused, match=message):
            side.start()


def test_daemons_that_die_fail_what_runs_and_serve_again_when_they_are_back(pair: Pair) -> None:
    decode, prefill = pair.sides["decode"], pair.sides["prefill"]
    name, prompt = new_name(), new_prompt(2 * PAGE)
    pair.give("decode", Load("a", name, prompt, "p", 0, (), tuple(range(4))))
    until(lambda: pair.stats("decode").requests.running)
    pair.stack.kill(pair.daemons["decode"])
    assert received(decode, "a") == set(range(4))
    pair.give(
        "decode",
        Load("b", new_name(), prompt, "p", 0, (), tuple(range(4))),
        StorePages("c", new_name(), prompt, (1, 2, 3, 4)),
    )
    told: set[str] = set()
    until(lambda: [told.update(names) for names in decode.reports.take()] and told == {"b", "c"})
    assert decode.reports.take_bad() == set(range(4))

    prefill.reports.take_news()
    pair.give("prefill", Begin("d", new_name(), prompt), Save("d", PAGE, tuple(range(4))))
    until(lambda: pair.stats("prefill").requests.running)
    pair.stack.kill(pair.daemons["prefill"])
    pair.give("prefill", Release("d"))
    sent(prefill, "d")
    assert prefill.reports.take_news() == News(frozenset({"d"}), session=False)

    pair.start("prefill")
    pair.start("decode")
    until(lambda: prefill.reports.take_news() == News(session=True))

    def works() -> bool:
        prompt = new_prompt(2 * PAGE)
        return exchange(pair, "e", new_name(), prompt, range(4), range(8, 12)) == set() and same(
            pair, range(4), range(8, 12)
        )

    until(works)
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_without_a_daemon_an_engine_starts_all_the_same(pair: Pair) -> None:
    settings = Settings(f"{pair.stack.folder}/nobody.sock", connect_seconds=0.3)
    engine = pair.engines["decode"]
    connect = connector_of(settings, common_pb2.ROLE_DECODE, FACTS.to_proto(), "alone", engine.mover)
    side = WorkerSide(settings, engine.map, engine.mover, connect)
    side.start()
    try:
        side.take(Orders([Load("a", new_name(), new_prompt(PAGE), "p", 0, (), (1, 2))]))
        assert received(side, "a") == {1, 2}
    finally:
        side.close()
