"""A prefill and a decode engine's halves over real daemons, and what passes between them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import grpc
import numpy as np

from kvferry.client.requests import RequestName
from kvferry.connectors.orders import Begin, Load, Order, Orders, PromptPages, Release, Save
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import connector_of
from kvferry.connectors.worker_side import WorkerSide
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import cache_pb2, common_pb2
from kvferry.radix.digests import chain_digests, root_digest, tail_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.connectors.engine_memory import BLOCK, HEAD_DIM, HEADS, LAYERS, EngineMemory
from tests.support.devices import chosen

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

    deadline_seconds = 5.0

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.addresses: dict[str, str] = {}
        self.words: dict[str, list[str]] = {}
        self.daemons: dict[str, Process] = {}
        self.start("prefill")
        address = self.addresses["prefill"]
        self.start("decode", "--peer", f"p={address}", "--host-bytes", "64KiB")
        self.engines = {role: self.engine(role, seed) for seed, role in enumerate(self.daemons)}
        self.sides = {role: self.side(role) for role in self.daemons}
        for side in self.sides.values():
            side.start()

    def engine(self, role: str, seed: int) -> EngineMemory:
        devices = chosen()[:1] if role == "prefill" else chosen()[-1:]
        return EngineMemory(64, PER_PAGE, seed=seed, device=next(iter(devices), None))

    def pool_words(self, role: str) -> list[str]:
        """A daemon's flags for its pool."""
        return ["--pool-bytes", str(POOL_PAGES * FACTS.geometry.page_bytes)]

    def start(self, role: str, *more: str) -> None:
        name = "p" if role == "prefill" else "d"
        if role not in self.words:
            self.words[role] = ["serve", "--role", role, "--name", name, "--listen", "127.0.0.1:0", *more]
            self.words[role] += ["--socket", self.socket(role), "--page-size", str(PAGE)]
            self.words[role] += self.pool_words(role)
        self.daemons[role] = self.stack.start(f"{role}-daemon", self.words[role])
        self.addresses[role] = self.stack.ready(self.daemons[role])
        if role == "prefill":  # a restarted one is found where it was
            self.words[role][6] = self.addresses[role]

    def socket(self, role: str) -> str:
        return f"{self.stack.folder}/{role}.sock"

    def settings(self, role: str) -> Settings:
        return Settings(self.socket(role), deadline_seconds=self.deadline_seconds, store_seconds=5.0)

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
