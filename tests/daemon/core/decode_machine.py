"""Rules that drive a `DecodeWorld`, and what holds after each of them."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvferry.daemon.core.effects import StartCopy
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import slack
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState
from tests.daemon.core.decode_world import CLEAN, NAMESPACES, PAGE, PAGES, DecodeWorld
from tests.daemon.core.prompts import PROMPTS, chain


class CoreMachine(DecodeWorld):
    @precondition(lambda self: self.zeroing)
    @rule()
    def zeroed(self) -> None:
        self.content.update(dict.fromkeys(self.zeroing, CLEAN))
        self.zeroing = ()
        self.run_effects()

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

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        name, first, pages = self.transfers[transfer]
        done = self.arrived[transfer]
        upto = data.draw(st.integers(done, len(pages)))
        self.arrive(transfer, name, first, pages, upto)

    @precondition(lambda self: self.unfilled_there())
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.fill_own(data.draw(st.sampled_from(self.unfilled_there())))

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

    @precondition(lambda self: self.orphaned)
    @rule()
    def worker_is_proven_gone(self) -> None:
        worker = self.orphaned.pop()
        for name in self.names(worker):
            self.writable.pop(name, None)
        self.core.worker_gone(worker, self.now)
        self.run_effects()
        self.workers.add(worker)

    # -- oracle --------------------------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        core, cache = self.core, self.core.cache
        cache.pool.check()
        if cache.host is not None:
            cache.host.check()
        held = [lease for lease in core.leases.values() if lease.state is not LeaseState.WAITING]
        for namespace in cache.namespaces.values():
            namespace.tree.check()
            mine = [lease for lease in held if lease.hold.namespace is namespace]
            assert namespace.promised == sum(lease.hold.counted for lease in mine)
            assert namespace.own == sum(len(lease.own) for lease in mine)
            if namespace.quota.hard:
                assert namespace.used <= namespace.quota.hard
        if self.overcommit == 1:
            assert slack(cache.pool.free, cache.namespaces.values()) >= 0, "a promise cannot be kept"
            assert self.copies or self.effects or not self.growing, "growth waits for nothing"
        assert cache.locks == len(held)
        assert cache.copies.running == len(self.copies) + sum(isinstance(effect, StartCopy) for effect in self.effects)
        private = [page for lease in held for page in lease.own]
        assert len(private) == len(set(private)), "two requests own a page"
        counts = cache.pool.counts()
        assert counts.leased + counts.orphaned == len(private)
        brought = {page for _, _, pages in self.transfers.values() for page in pages}
        for name, pages in self.writable.items():
            assert brought.isdisjoint(pages), "a page is brought that somebody else may still write"
            owned = {int(PageState.LEASED), int(PageState.ORPHANED)}
            assert owned.issuperset(cache.pool.states(pages)), "a page was given on that a worker may still write"
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
        cache = self.core.cache
        counts = cache.pool.counts()
        assert not self.core.leases
        assert cache.locks == 0
        assert counts.free + counts.cached == PAGES, "pages leaked"
        assert self.core.active_transfers == 0
        cache.flush(cache.namespaces.values())
        assert cache.pool.free == PAGES, "pages leaked"
        assert cache.host is None or cache.host.free == cache.host.pages, "host pages leaked"
