"""Random workers, prefill daemons, tiers and failures against the decode core; every page's content is tracked, on the
device and on the host."""

from __future__ import annotations

import hashlib
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.daemon.core.cache import Cache, CacheLimits, CopyStarted
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import (
    Effect,
    ForgetRows,
    SendDone,
    StartCopy,
    StartTransfer,
    StopTransfer,
    ToWorker,
    ZeroPages,
)
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import Quota, slack
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE

PAGE = 4
PAGES = 14
CLEAN, STALE = b"", b"of somebody else"
NAMESPACES = (bytes(32), b"t" * 32)

PROMPTS = [[0, 1, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0, 0, 0], [1, 0, 0]]


def chain(symbols: list[int]) -> list[bytes]:
    digests, parent = [], b"root"
    for symbol in symbols:
        parent = hashlib.sha256(parent + bytes([symbol])).digest()
        digests.append(parent)
    return digests


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.prompts: dict[Name, tuple[list[bytes], bytes, int]] = {}  # full digests, tail digest, tokens
        self.content: dict[int, bytes] = {}  # page -> digest of what was copied to it
        self.local: set[Name] = set()
        self.unfilled: set[Name] = set()  # their workers hold pages themselves that they have not filled in the pool
        self.transfers: dict[int, tuple[Name, int, tuple[int, ...]]] = {}
        self.stopping: list[int] = []
        self.arrived: dict[int, int] = {}
        self.ready: dict[Name, list[int]] = {}
        self.pages: dict[Name, list[int]] = {}
        self.answered: set[Name] = set()  # Failed was sent, Abort is owed
        self.over: set[Name] = set()
        self.workers = {1, 2}
        self.orphaned: set[int] = set()
        self.copies: list[CopyStarted] = []
        self.host_content: dict[int, bytes] = {}
        self.growing: set[Name] = set()
        self.retracting: set[Name] = set()
        self.comes_back: dict[Name, tuple[int, bytes, int]] = {}  # retracted -> worker, namespace, new tokens left
        self.namespace_of: dict[Name, bytes] = {}
        self.effects: deque[Effect] = deque()  # that wait until pages are cleared
        self.zeroing: tuple[int, ...] = ()
        self.let_go: set[Name] = set()  # the worker has said its last word of it
        self.writable: dict[Name, list[int]] = {}  # that its worker was told to fill itself and has not let go of

    @initialize(
        host=st.sampled_from([0, 6, 40]),
        overcommit=st.sampled_from([1.0, 8.0]),
        policy=st.sampled_from(["lru", "lfu", "fifo", "priority"]),
        through=st.sampled_from([0, 0, 2]),
        quota=st.sampled_from([Quota(), Quota(), Quota(5, 0), Quota(4, 12, 2, 10)]),
        output_first=st.booleans(),
        zeroes=st.sampled_from(["off", "freed", "also at first"]),
    )
    def configure(
        self, host: int, overcommit: float, policy: str, through: int, quota: Quota, output_first: bool, zeroes: str
    ) -> None:
        limits = CacheLimits(
            policy=policy,
            evict_output_first=output_first,
            write_through_hits=through,
            zero_freed=zeroes != "off",
            used_before=zeroes == "also at first",
            quotas={NAMESPACES[1]: quota},
        )
        if limits.used_before:
            self.content = dict.fromkeys(range(PAGES), STALE)
        self.overcommit = overcommit
        self.core = DecodeCore(
            Cache(PAGES, PAGE, host_pages=host, limits=limits),
            DecodeLimits(
                max_tokens=200, page_bytes=64, admission_seconds=40.0, queue=8, overtakes=2, overcommit=overcommit
            ),
        )

    # -- effects ---------------------------------------------------------------------------------------------------

    def run_effects(self) -> None:
        """As a shell does: while pages are cleared, all that follows waits."""
        self.effects += self.core.take_effects()
        while self.effects and not self.zeroing:
            self.run_effect(self.effects.popleft())
            self.effects += self.core.take_effects()

    def run_effect(self, effect: Effect) -> None:
        if isinstance(effect, ZeroPages):
            assert self.core.store.limits.zero_freed
            self.zeroing = effect.pages
        elif isinstance(effect, StartTransfer):
            name = Name(effect.ask.name.request_id, effect.ask.name.attempt)
            assert effect.ask.first_page * PAGE >= 0
            lease = self.core.leases.get(name)
            if lease is not None:
                assert effect.ask.promised_tokens == max(lease.matched, lease.held_pages) * PAGE
            assert len(effect.page_ids) == effect.ask.pages
            self.transfers[effect.ask.transfer] = (name, effect.ask.first_page, effect.page_ids)
            self.arrived[effect.ask.transfer] = 0
        elif isinstance(effect, StopTransfer):
            if effect.transfer in self.transfers:
                self.stopping.append(effect.transfer)
            else:
                self.core.transfer_drained(effect.transfer, self.now)
        elif isinstance(effect, ToWorker):
            self.hear(effect)
        elif isinstance(effect, StartCopy):
            self.copies.append(effect.started)
        elif isinstance(effect, ForgetRows):
            for row in effect.rows:
                self.host_content.pop(row, None)
        else:
            assert isinstance(effect, SendDone)

    @precondition(lambda self: self.zeroing)
    @rule()
    def zeroed(self) -> None:
        self.content.update(dict.fromkeys(self.zeroing, CLEAN))
        self.zeroing = ()
        self.run_effects()

    def assert_clean(self, pages: list[int]) -> None:
        if self.core.store.limits.zero_freed:
            assert all(self.content.get(page, CLEAN) == CLEAN for page in pages), "a worker sees what others left"

    def hear(self, effect: ToWorker) -> None:
        kind = effect.event.WhichOneof("kind")
        message = getattr(effect.event, kind)
        name = Name(message.name.request_id, message.name.attempt)
        if name in self.let_go and kind != "ended":
            return  # it crossed the worker's last word
        if kind == "retract":
            assert self.overcommit > 1, "taken back although everything was promised"
            self.retracting.add(name)
            self.growing.discard(name)
        elif kind == "admitted":
            self.pages[name] = list(message.pages)
            self.assert_clean(message.pages[message.matched_tokens // PAGE :])
            if name in self.local:
                # The worker computes what it lacks; the bytes follow from the digests.
                digests, tail, _ = self.prompts[name]
                want = [*digests, tail] if tail else digests
                for index in range(message.local_tokens // PAGE, len(want)):
                    self.content[message.pages[index]] = want[index]
            elif self.core.leases[name].held_pages * PAGE > message.matched_tokens:
                self.unfilled.add(name)
                held = self.core.leases[name].held_pages
                self.writable[name] = message.pages[message.matched_tokens // PAGE : held]
        elif kind == "ready":
            assert name not in self.unfilled, "ready before the worker had filled its own pages"
            digests, tail, _ = self.prompts[name]
            want = [*digests, tail] if tail else digests
            assert [self.content.get(p) for p in self.pages[name]] == want, "a wrong byte would be read"
            self.ready[name] = self.pages[name]
        elif kind == "grown":
            assert message.first_page == len(self.ready[name])
            self.assert_clean(message.pages)
            self.ready[name] += message.pages
            for page in message.pages:
                self.content[page] = b"output of " + str(name).encode()
            self.growing.discard(name)
        elif kind == "failed":
            self.answered.add(name)
            self.forget(name)
        elif kind == "ended":
            self.over.add(name)
            self.answered.discard(name)

    def forget(self, name: Name) -> None:
        self.ready.pop(name, None)
        self.growing.discard(name)
        self.retracting.discard(name)
        self.unfilled.discard(name)

    def last_word(self, name: Name) -> None:
        """Its worker touches none of its pages from here on."""
        self.forget(name)
        self.let_go.add(name)
        self.writable.pop(name, None)

    def names(self, worker: int | None = None) -> list[Name]:
        leases = self.core.leases.values()
        return [lease.name for lease in leases if worker is None or lease.worker == worker]

    # -- rules -----------------------------------------------------------------------------------------------------

    @rule(
        symbols=st.lists(st.integers(0, 1), max_size=5),
        tail=st.integers(0, PAGE - 1),
        new=st.integers(1, 12),
        worker=st.sampled_from([1, 2]),
        prefill=st.sampled_from(["p", "p", "q", ""]),
        priority=st.integers(-1, 1),
        warmup=st.sampled_from([False, False, False, True]),
        namespace=st.sampled_from([NAMESPACES[0], *NAMESPACES]),
        held=st.sampled_from([0, 0, 1, 2, 5]),
    )
    def admit(
        self,
        symbols: list[int],
        tail: int,
        new: int,
        worker: int,
        prefill: str,
        priority: int,
        warmup: bool,
        namespace: bytes,
        held: int = 0,
    ) -> None:
        tokens = len(symbols) * PAGE + tail
        if tokens == 0 or worker not in self.workers:
            return
        self.count += 1
        name = Name(self.count.to_bytes(16, "big"), 1)
        digests = chain([*symbols[:1], *[symbol + 2 * NAMESPACES.index(namespace) for symbol in symbols[1:]]])
        tail_digest = hashlib.sha256((digests[-1] if digests else b"") + bytes([tail])).digest() if tail else b""
        self.prompts[name] = (digests, tail_digest, tokens)
        if prefill == "":
            self.local.add(name)
        request = wire.Admit(
            name=name.to_proto(),
            digests=b"".join(digests),
            tokens=tokens,
            tail_digest=tail_digest,
            prefill=prefill,
            max_new_tokens=new,
            priority=priority,
            warmup=warmup,
            held_tokens=min(held, len(symbols)) * PAGE,
        )
        self.namespace_of[name] = namespace
        try:
            self.core.admit(worker, namespace, name, request, self.now + 50, self.now)
        except RequestError:
            self.over.add(name)
        self.run_effects()

    @rule(
        symbols=st.sampled_from(PROMPTS),
        output=st.integers(1, 9),
        worker=st.sampled_from([1, 2]),
        prefill=st.sampled_from(["p", "q", ""]),
        namespace=st.sampled_from(NAMESPACES),
        copies_end=st.sampled_from([True, True, True, False]),
        held=st.sampled_from([0, 0, 2, 5]),
    )
    def whole_request(
        self, symbols: list[int], output: int, worker: int, prefill: str, namespace: bytes, copies_end: bool, held: int
    ) -> None:
        """From admission to its end, as far as it comes: this fills the cache."""
        before = set(self.prompts)
        self.admit(symbols, 1, output, worker, prefill, 0, False, namespace, held)
        fresh = set(self.prompts) - before
        for _ in range(8):
            for name in sorted(fresh & self.unfilled):
                self.fill_own(name)
            for number in range(len(self.copies)) if copies_end else ():
                del number
                self.end_copy(0, [])
            for transfer, (name, first, pages) in list(self.transfers.items()):
                if name in fresh and transfer not in self.stopping:
                    self.arrive(transfer, name, first, pages, len(pages))
            for name in fresh & set(self.core.leases):
                self.core.aux(prefill, name, b"first token", self.now)
                self.run_effects()
            for name in fresh & set(self.able()):
                lease = self.core.leases[name]
                self.core.grow(worker, name, lease.tokens + output - 1, self.now)
                self.run_effects()
                if name in self.ready and name not in self.retracting:
                    self.end(name, output)

    @rule(symbols=st.lists(st.sampled_from(PROMPTS), min_size=2, max_size=4), prefill=st.sampled_from(["p", ""]))
    def crowd(self, symbols: list[list[int]], prefill: str) -> None:
        """Requests that decode at the same time, and grow as far as they may."""
        before = set(self.prompts)
        for prompt in symbols:
            if 1 in self.workers:
                self.admit(prompt[:3], 0, 30, 1, prefill, 0, False, NAMESPACES[0])
        while self.copies:
            self.end_copy(0, [])
        fresh = set(self.prompts) - before
        for transfer, (name, first, pages) in list(self.transfers.items()):
            if name in fresh and transfer not in self.stopping:
                self.arrive(transfer, name, first, pages, len(pages))
        for name in sorted(fresh & set(self.core.leases)):
            self.core.aux(prefill, name, b"first token", self.now)
            self.run_effects()
        for tokens in (16, 24, 32):
            for name in sorted(fresh & set(self.able()) - self.growing - self.retracting):
                self.growing.add(name)
                self.core.grow(1, name, tokens, self.now)
                self.run_effects()

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.copies) - 1))
        device = self.copies[number].copy.device
        self.end_copy(number, data.draw(st.sampled_from([[], [], [], device[:1], device[-1:], device])))

    def end_copy(self, number: int, failed: list[int]) -> None:
        started = self.copies.pop(number)
        copy = started.copy
        states = set(self.core.store.pool.states(copy.device))
        wanted = PageState.RESTORING if copy.kind == RESTORE else PageState.SPILLING
        assert states == {wanted}, "a page was reused while a copy runs"
        for page, row in zip(copy.device, copy.host, strict=True):
            source, target = (
                (self.host_content, self.content) if copy.kind == RESTORE else (self.content, self.host_content)
            )
            came_from, goes_to = (row, page) if copy.kind == RESTORE else (page, row)
            target[goes_to] = b"garbage" if page in failed else source[came_from]
        self.core.copy_ended(started.number, failed, 0, 0.001, self.now)
        self.run_effects()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        name, first, pages = self.transfers[transfer]
        done = self.arrived[transfer]
        upto = data.draw(st.integers(done, len(pages)))
        self.arrive(transfer, name, first, pages, upto)

    def arrive(self, transfer: int, name: Name, first: int, pages: tuple[int, ...], upto: int) -> None:
        done = self.arrived[transfer]
        digests, tail, _ = self.prompts[name]
        whole = [*digests, tail] if tail else digests
        indexes = list(range(first + done, first + upto))
        for index in indexes:
            # A copy may run although the transfer was stopped: it must not hit a page that was given to someone else.
            assert self.core.store.pool.state(pages[index - first]) in (
                PageState.LEASED,
                PageState.ARRIVING,
                PageState.ORPHANED,
            )
            self.content[pages[index - first]] = whole[index]
        self.arrived[transfer] = upto
        if transfer in self.stopping:
            return
        self.core.pages_arrived(transfer, indexes, self.now)
        if upto == len(pages) and pages:
            del self.transfers[transfer]
            self.core.transfer_completed(transfer, self.now)
        self.run_effects()

    def unfilled_there(self) -> list[Name]:
        return sorted(name for name in self.unfilled if self.core.leases[name].worker in self.workers)

    @precondition(lambda self: self.unfilled_there())
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.fill_own(data.draw(st.sampled_from(self.unfilled_there())))

    def fill_own(self, name: Name) -> None:
        """What the worker holds itself goes into the pool's pages."""
        lease = self.core.leases[name]
        if lease.state is not LeaseState.FILLING or lease.worker not in self.workers:
            return
        self.unfilled.discard(name)
        del self.writable[name]
        digests, _, _ = self.prompts[name]
        for index in range(lease.matched, lease.held_pages):
            assert self.core.store.pool.state(lease.pages[index]) in (PageState.LEASED, PageState.ARRIVING)
            self.content[lease.pages[index]] = digests[index]
        self.core.filled(lease.worker, name, lease.held_pages * PAGE, self.now)
        self.run_effects()

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        transfer = self.stopping.pop(data.draw(st.integers(0, len(self.stopping) - 1)))
        del self.transfers[transfer]
        self.core.transfer_drained(transfer, self.now)
        self.run_effects()

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data())
    def aux(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names()))
        self.core.aux("q", name, b"not its own", self.now) if self.core.leases[name].prefill != "q" else None
        self.core.aux(self.core.leases[name].prefill, name, b"first token", self.now)
        self.run_effects()

    def able(self) -> list[Name]:
        """Requests that decode and whose worker is there."""
        return sorted(name for name in self.ready if self.core.leases[name].worker in self.workers)

    @precondition(lambda self: self.able())
    @rule(data=st.data(), output=st.integers(1, 12))
    def grow(self, data: st.DataObject, output: int) -> None:
        name = data.draw(st.sampled_from(self.able()))
        lease = self.core.leases[name]
        if name in self.growing or name in self.retracting:
            return
        self.growing.add(name)
        self.core.grow(lease.worker, name, lease.tokens + min(output, lease.max_new_tokens) - 1, self.now)
        self.run_effects()

    @precondition(lambda self: self.able())
    @rule(data=st.data(), output=st.integers(1, 12))
    def finish(self, data: st.DataObject, output: int) -> None:
        name = data.draw(st.sampled_from(self.able()))
        self.end(name, output)

    @precondition(lambda self: self.retracting)
    @rule(data=st.data(), output=st.integers(1, 12))
    def answer_retract(self, data: st.DataObject, output: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.retracting)))
        lease = self.core.leases[name]
        if lease.worker not in self.workers:
            return
        left = lease.max_new_tokens
        tokens = self.end(name, output)
        new = left - (tokens + 1 - self.prompts[name][2])
        if new >= 1:
            self.comes_back[name] = (lease.worker, self.namespace_of[name], new)
            digests = [lease.digests[i : i + 32] for i in range(0, len(lease.digests), 32)]
            full, tail = divmod(tokens + 1, PAGE)
            behind = self.output_digests(name, digests, full)
            tail_digest = hashlib.sha256(([*digests, *behind] or [b""])[-1] + b"tail").digest() if tail else b""
            self.prompts[name] = ([*digests, *behind], tail_digest, tokens + 1)

    @precondition(lambda self: self.comes_back)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.comes_back)))
        worker, namespace, new = self.comes_back[name]
        if worker not in self.workers or name in self.core.leases or self.effects:
            return
        del self.comes_back[name]
        self.let_go.discard(name)
        digests, tail_digest, tokens = self.prompts[name]
        self.local.add(name)
        request = wire.Admit(
            name=name.to_proto(),
            digests=b"".join(digests),
            tokens=tokens,
            tail_digest=tail_digest,
            max_new_tokens=new,
        )
        try:
            self.core.admit(worker, namespace, name, request, self.now + 50, self.now)
        except RequestError:
            self.over.add(name)
        self.run_effects()

    def output_digests(self, name: Name, digests: list[bytes], full: int) -> list[bytes]:
        behind: list[bytes] = []
        parent = digests[-1] if digests else b""
        for _ in range(len(digests), full):
            parent = hashlib.sha256(parent + str(name).encode()).digest()
            behind.append(parent)
        return behind

    def end(self, name: Name, output: int) -> int:
        """Finish with what fits into its pages; returns the tokens."""
        lease = self.core.leases[name]
        total = min(lease.tokens + min(output, lease.max_new_tokens) - 1, len(self.ready[name]) * PAGE)
        digests, _, _ = self.prompts[name]
        behind = self.output_digests(name, digests, total // PAGE)
        for index, digest in enumerate(behind, len(digests)):
            self.content[self.ready[name][index]] = digest
        continues = name in self.retracting
        self.last_word(name)
        self.core.finish(lease.worker, name, total, b"".join(behind), self.now, continues)
        self.run_effects()
        return total

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names()))
        lease = self.core.leases[name]
        if lease.worker in self.workers and lease.state is not LeaseState.ENDING:
            self.last_word(name)
            self.core.abort(lease.worker, name, self.now)
            self.run_effects()

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def answer_failed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.answered)))
        self.answered.discard(name)
        lease = self.core.leases.get(name)
        if lease is not None and lease.worker not in self.workers:
            return
        self.last_word(name)
        self.core.abort(lease.worker if lease else 1, name, self.now)
        self.run_effects()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), how=st.sampled_from(["broken", "failed"]))
    def transfer_goes_wrong(self, data: st.DataObject, how: str) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        if how == "broken":
            self.core.transfer_broken(transfer, "test", self.now)
        else:
            self.core.transfer_failed(transfer, unavailable("the prefill worker is gone"), self.now)
        self.run_effects()

    @rule(prefill=st.sampled_from(["p", "q"]))
    def prefill_goes_down(self, prefill: str) -> None:
        self.core.prefill_down(prefill, unavailable("down"), self.now)
        self.run_effects()

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.run_effects()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_is_lost(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        self.workers.discard(worker)
        self.orphaned.add(worker)
        for name in self.names(worker):
            self.forget(name)
        self.hears_no_more(worker)
        self.core.worker_lost(worker, self.now)
        self.run_effects()

    def hears_no_more(self, worker: int) -> None:
        self.effects += self.core.take_effects()
        self.effects = deque(e for e in self.effects if not isinstance(e, ToWorker) or e.worker != worker)

    @precondition(lambda self: self.orphaned)
    @rule()
    def worker_is_proven_gone(self) -> None:
        worker = self.orphaned.pop()
        for name in self.names(worker):
            self.writable.pop(name, None)
        self.core.worker_gone(worker, self.now)
        self.run_effects()
        self.workers.add(worker)

    # -- oracle ----------------------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        core, store = self.core, self.core.store
        store.pool.check()
        if store.host is not None:
            store.host.check()
        held = [lease for lease in core.leases.values() if lease.state is not LeaseState.WAITING]
        for namespace in store.namespaces.values():
            namespace.tree.check()
            mine = [lease for lease in held if lease.hold.namespace is namespace]
            assert namespace.promised == sum(lease.hold.counted for lease in mine)
            assert namespace.own == sum(len(lease.own) for lease in mine)
            if namespace.quota.hard:
                assert namespace.used <= namespace.quota.hard
        if self.overcommit == 1:
            assert slack(store.pool.free, store.namespaces.values()) >= 0, "a promise cannot be kept"
            assert self.copies or self.effects or not self.growing, "growth waits for nothing"
        assert store.locks == len(held)
        assert store.copies == len(self.copies) + sum(isinstance(effect, StartCopy) for effect in self.effects)
        private = [page for lease in held for page in lease.own]
        assert len(private) == len(set(private)), "two requests own a page"
        counts = store.pool.counts()
        assert counts.leased + counts.orphaned == len(private)
        brought = {page for _, _, pages in self.transfers.values() for page in pages}
        for name, pages in self.writable.items():
            assert brought.isdisjoint(pages), "a page is brought that somebody else may still write"
            owned = {int(PageState.LEASED), int(PageState.ORPHANED)}
            assert owned.issuperset(store.pool.states(pages)), "a page was given on that a worker may still write"
            others = [lease for lease in held if lease.name != name]
            assert all(lease.missing.isdisjoint(pages) for lease in others), "a request waits for what may never come"
        for name, pages in self.ready.items():
            digests, tail, _ = self.prompts[name]
            want = [*digests, tail] if tail else digests
            got = [self.content[p] for p in pages[: len(want)]]
            assert got == want, "a running request's page was overwritten"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for worker in (1, 2):
            self.hears_no_more(worker)
            self.core.worker_gone(worker, self.now)
        self.run_effects()
        while self.zeroing:
            self.zeroed()
        while self.stopping:
            transfer = self.stopping.pop()
            del self.transfers[transfer]
            self.core.transfer_drained(transfer, self.now)
            self.run_effects()
        while self.copies:
            self.core.copy_ended(self.copies.pop().number, [], 0, 0.001, self.now)
            self.run_effects()
        store = self.core.store
        counts = store.pool.counts()
        assert not self.core.leases
        assert store.locks == 0
        assert counts.free + counts.cached == PAGES, "pages leaked"
        assert self.core.active_transfers == 0
        store.flush(store.namespaces.values())
        assert store.pool.free == PAGES, "pages leaked"
        assert store.host is None or store.host.free == store.host.pages, "host pages leaked"


TestDecodeCore = CoreMachine.TestCase
TestDecodeCore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongCoreMachine(CoreMachine):
    """Another class: a machine's test case is one object."""


TestDecodeCoreLong = pytest.mark.nightly(pytest.mark.timeout(1800)(LongCoreMachine.TestCase))
TestDecodeCoreLong.settings = settings(
    max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
