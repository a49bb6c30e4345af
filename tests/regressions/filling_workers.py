"""Decode workers that fill pages themselves, hang and are lost, and pages that others bring or do not, around one
decode core: random, by a seed.

Who may write to a page does so at every step, and leaves half of what should stand there. So no such page may be
brought by, given to or read by anybody else before its worker has filled it, has let go of it or is proven gone. And no
page is brought by two transfers at a time, whoever takes over from whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias, TypeVar

from kvferry.daemon.core.effects import StartCopy, StartTransfer, StopTransfer, ToWorker
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.limits import Name, name_of
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import split_digests
from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import RESTORE
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Decode, digests, name

PAGES, PROMPT_PAGES, STEPS = 16, 8, 160
HALF = b"half written"
PREFILLS = ("p", "q", "r")
LEASED, ORPHANED = int(PageState.LEASED), int(PageState.ORPHANED)
ThingT = TypeVar("ThingT")


def by_page(prompt: bytes) -> list[bytes]:
    return split_digests(prompt)


@dataclass(slots=True)
class Request:
    """What its worker knows of it, until it lets go of it or is proven gone."""

    name: Name
    worker: int
    prompt: list[bytes]  # what must stand in its pages
    held: int  # of them, those that the worker has in memory of its own
    prefill: str  # "": its worker computes it
    pages: list[int] = field(default_factory=list)  # once admitted
    to_fill: list[int] = field(default_factory=list)  # of them, those that its worker writes to
    ready: bool = False
    failed: bool = False


class World:
    """An action does nothing where there is nothing for it to be done to."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.side = Decode(PAGES, host_pages=self.random.choice([0, PAGES, PAGES, PAGES]))
        self.core = self.side.core
        self.pool = self.side.cache.pool
        self.workers = [1, 2, 3]
        self.lost: list[int] = []
        self.requests: dict[Name, Request] = {}
        self.prompts: dict[Name, list[bytes]] = {}  # also of requests that are let go: transfers of theirs may run
        self.transfers: dict[int, tuple[StartTransfer, list[bytes]]] = {}  # and what they bring
        self.stopping: list[int] = []
        self.copies: list[CopyStarted] = []
        self.now = 1.0
        self.memory: dict[int, bytes] = {}
        self.host_memory: dict[int, bytes] = {}
        self.met: Counter[str] = Counter()
        if self.side.cache.host is not None:
            self.recover(self.side.cache.host)

    def recover(self, host: PagePool) -> None:
        """The host has pages of an earlier daemon, which get below those that a request brings before them."""
        shared, first = by_page(digests("shared", PROMPT_PAGES)), self.random.randint(1, 3)
        rows = list(range(PROMPT_PAGES - first))
        self.host_memory.update(zip(rows, shared[first:], strict=True))
        own, parents = b"".join(shared[first:]), b"".join(shared[first - 1 : -1])
        host.claim(rows, PageState.LEASED)
        self.side.cache.recover(self.side.cache.namespace(NAMESPACE), own, parents, rows, bytes(len(rows)))

    def one_of(self, things: Iterable[ThingT]) -> list[ThingT]:
        among = list(things)
        return self.random.sample(among, min(1, len(among)))

    @property
    def served(self) -> list[Request]:
        """Requests whose worker is there."""
        return [request for request in self.requests.values() if request.worker in self.workers]

    # -- actions ---------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """A prefix that many share, and an end that fewer do."""
        pages = self.random.randint(2, PROMPT_PAGES)
        shared = self.random.randint(1, pages)
        ends = self.random.choice("ab")
        prompt = digests("shared", shared) + digests(f"{ends} behind {shared}, ", pages - shared)
        contents = by_page(prompt)
        prefill = self.random.choice(PREFILLS) if self.random.random() < 0.9 else ""
        held = min(pages, self.random.choice([0, 1, 3, 5]))
        for worker in self.one_of(self.workers):
            self.met["requests"] += 1
            request = Request(name(self.met["requests"]), worker, contents, held, prefill)
            self.prompts[request.name] = contents
            message = wire.Admit(
                name=request.name.to_proto(),
                digests=prompt,
                tokens=pages * PAGE,
                prefill=prefill,
                max_new_tokens=1,
                held_tokens=request.held * PAGE,
            )
            try:
                self.core.admit(worker, NAMESPACE, request.name, message, DEADLINE, self.now)
            except RequestError:
                self.met["requests refused by a full queue"] += 1
            else:
                self.requests[request.name] = request

    def pages_arrive(self) -> None:
        running = (n for n, (start, _) in self.transfers.items() if start.page_ids and n not in self.stopping)
        for number in self.one_of(running):
            start, contents = self.transfers[number]
            arrived = self.random.randint(0, len(contents))
            self.memory.update(zip(start.page_ids, contents[:arrived], strict=False))
            self.core.pages_arrived(number, range(start.ask.first_page, start.ask.first_page + arrived), self.now)
            if arrived == len(contents):
                del self.transfers[number]
                self.core.transfer_completed(number, self.now)

    def transfer_fails(self) -> None:
        for number in self.one_of(self.transfers):
            self.core.transfer_failed(number, unavailable("the prefill worker is gone"), self.now)

    def transfer_drains(self) -> None:
        """Up to now it wrote, too."""
        for number in self.one_of(self.stopping):
            self.stopping.remove(number)
            start, contents = self.transfers.pop(number)
            self.memory.update(zip(start.page_ids, contents, strict=True))
            self.core.transfer_drained(number, self.now)
            self.met["transfers taken over"] = self.core.transfer_counters.aborts["taken_over"]

    def time_passes(self) -> None:
        """Nothing comes meanwhile."""
        self.now += self.random.choice([0.3, 0.3, 1.2])
        self.core.tick(self.now)

    def cache_is_spilled(self) -> None:
        """What nothing holds."""
        self.side.cache.eviction.spill(PAGES)
        self.core.tick(self.now)

    def copy_ends(self) -> None:
        """Between the tiers. Pages of it may be wrong."""
        for started in self.one_of(self.copies):
            self.copies.remove(started)
            wrong = [page for page in started.copy.device if self.random.random() < 0.1]
            for page, row in zip(started.copy.device, started.copy.host, strict=True):
                if page in wrong:
                    continue
                if started.copy.kind == RESTORE:
                    self.memory[page] = self.host_memory[row]
                else:
                    self.host_memory[row] = self.memory[page]
            self.met["copies between the tiers"] += 1
            self.core.copy_ended(started.number, wrong, 0, 0.001, self.now)

    def first_token_comes(self) -> None:
        for request in self.one_of(self.served):
            self.core.aux(request.prefill, request.name, b"first token", self.now)

    def worker_fills(self) -> None:
        for request in self.one_of(request for request in self.served if request.to_fill and not request.failed):
            filled = dict(zip(request.pages, request.prompt, strict=True))
            self.memory.update({page: filled[page] for page in request.to_fill})
            request.to_fill = []
            self.met["requests whose worker filled pages"] += 1
            self.core.filled(request.worker, request.name, request.held * PAGE, self.now)

    def worker_finishes(self) -> None:
        for request in self.one_of(request for request in self.served if request.ready):
            del self.requests[request.name]
            self.core.finish(request.worker, request.name, len(request.prompt) * PAGE, b"", self.now)

    def worker_aborts(self) -> None:
        for request in self.one_of(self.served):
            del self.requests[request.name]
            self.core.abort(request.worker, request.name, self.now)

    def worker_answers_failed(self) -> None:
        for request in self.one_of(request for request in self.served if request.failed):
            del self.requests[request.name]
            self.core.abort(request.worker, request.name, self.now)

    def worker_is_lost(self) -> None:
        for worker in self.one_of(self.workers):
            filling = any(request.to_fill for request in self.served if request.worker == worker)
            self.met["losses of a worker with pages to fill"] += filling
            self.workers.remove(worker)
            self.lost.append(worker)
            self.core.worker_lost(worker, self.now)

    def lost_worker_is_proven_gone(self) -> None:
        """Another one comes in its place."""
        for worker in self.one_of(self.lost):
            self.lost.remove(worker)
            self.workers.append(worker + 3)
            self.requests = {n: request for n, request in self.requests.items() if request.worker != worker}
            orphaned = self.pool.counts().orphaned
            self.core.worker_gone(worker, self.now)
            self.met["orphans freed on proof"] += orphaned - self.pool.counts().orphaned

    # -- what follows ----------------------------------------------------------------------------------------------

    def run_effects(self) -> None:
        self.side.take()
        for effect in self.side.seen:
            if isinstance(effect, StartTransfer):
                prompt, first = self.prompts[name_of(effect.ask.name)], effect.ask.first_page
                self.transfers[effect.ask.transfer] = (effect, prompt[first : first + len(effect.page_ids)])
            elif isinstance(effect, StopTransfer):
                self.stopping.append(effect.transfer)
            elif isinstance(effect, StartCopy):
                self.copies.append(effect.started)
            elif isinstance(effect, ToWorker) and effect.worker in self.workers:
                self.hear(effect.event)
        for request in self.requests.values():
            self.memory.update(dict.fromkeys(request.to_fill, HALF))

    def hear(self, event: wire.WorkerEvent) -> None:
        if event.HasField("admitted"):
            request = self.requests[name_of(event.admitted.name)]
            request.pages = list(event.admitted.pages)
            if request.prefill:
                request.to_fill = request.pages[event.admitted.matched_tokens // PAGE : request.held]
            else:  # it computes the rest, at once
                first = event.admitted.local_tokens // PAGE
                self.memory.update(zip(request.pages[first:], request.prompt[first:], strict=True))
        elif event.HasField("ready"):
            self.requests[name_of(event.ready.name)].ready = True
            self.met["requests that were ready"] += 1
        elif event.HasField("failed"):
            request = self.requests[name_of(event.failed.name)]
            request.failed = True
            self.met["requests failed before their worker had filled pages"] += bool(request.to_fill)

    # -- oracle ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.pool.check()
        for namespace in self.side.cache.namespaces.values():
            namespace.tree.check()
        own = [page for lease in self.core.leases.values() for page in lease.own]
        counts = self.pool.counts()
        assert counts.leased + counts.orphaned == len(own) == len(set(own)), "pages of nobody, or of two requests"
        brought = [page for start, _ in self.transfers.values() for page in start.page_ids]
        assert len(brought) == len(set(brought)), "a page is brought by two transfers"
        self.check_brought(set(brought))
        for request in self.requests.values():
            if request.to_fill:
                assert set(brought).isdisjoint(request.to_fill), "a page is brought that its worker may still write"
                self.check_unfilled(request)
            if request.ready:
                got = [self.memory.get(page) for page in request.pages]
                assert got == request.prompt, "a wrong byte is read"

    def check_brought(self, coming: set[int]) -> None:
        """Nobody waits for a page that nobody brings, now or in its turn."""
        for lease in self.core.leases.values():
            coming |= {page for first, count in lease.runs for page in lease.pages[first : first + count]}
            coming |= set(lease.to_fill)
            if not lease.live and lease.transfers:
                coming |= lease.filling  # until these have drained: then others ask for it
        restored = {page for started in self.copies for page in started.copy.device}
        for lease in self.core.leases.values():
            assert lease.missing <= coming | restored, "a request waits for a page that nobody brings"

    def check_unfilled(self, request: Request) -> None:
        """What its worker may still write is in no tree, and nobody else has it or waits for it."""
        over = request.failed or request.worker in self.lost
        states = set(self.pool.states(request.to_fill))
        assert states == {ORPHANED if over else LEASED}, "a page was given on that its worker may still write"
        others = [lease for name, lease in self.core.leases.items() if name != request.name]
        theirs = {page for lease in others for page in (*lease.pages, *lease.missing)}
        assert theirs.isdisjoint(request.to_fill), "a request waits for what may never come"

    def end(self) -> None:
        """All workers are proven gone: nothing is left, and every page serves again."""
        for worker in [*self.workers, *self.lost]:
            self.requests = {n: request for n, request in self.requests.items() if request.worker != worker}
            self.core.worker_gone(worker, self.now)
            self.run_effects()
        self.workers = self.lost = []
        while self.stopping or self.copies:
            self.transfer_drains()
            self.copy_ends()
            self.run_effects()
        self.check()
        counts = self.pool.counts()
        assert not self.core.leases and self.side.cache.locks == 0 and counts.free + counts.cached == PAGES, "a leak"
        self.side.cache.flush(self.side.cache.namespaces.values())
        for follower in range(2):  # nor is anything withheld any more
            self.side.admit(name(10_000 + follower), "whole", PAGES)
            asked = [len(start.page_ids) for start in self.side.of(StartTransfer)]
            assert asked == [0 if follower else PAGES], "a page of nobody is withheld"
        for follower in range(2):
            self.core.abort(1, name(10_000 + follower), self.now)


Action: TypeAlias = Callable[[World], None]
WEIGHTS: dict[Action, int] = {
    World.admit: 30,
    World.pages_arrive: 20,
    World.transfer_fails: 2,
    World.transfer_drains: 10,
    World.time_passes: 8,
    World.copy_ends: 3,
    World.cache_is_spilled: 4,
    World.first_token_comes: 7,
    World.worker_fills: 5,
    World.worker_finishes: 5,
    World.worker_aborts: 5,
    World.worker_answers_failed: 7,
    World.worker_is_lost: 1,
    World.lost_worker_is_proven_gone: 4,
}


class Harm(Exception):
    """What a seed found."""


def run(seed: int) -> Counter[str]:
    """What was met in it. Raises Harm."""
    world = World(seed)
    steps = world.random.choices([*WEIGHTS], [*WEIGHTS.values()], k=STEPS)
    for step, action in enumerate([*steps, World.end]):
        try:
            action(world)
            world.run_effects()
            world.check()
        except Exception as error:
            raise Harm(f"seed {seed}, step {step}, {action.__name__}: {type(error).__name__}: {error}") from error
    return world.met
