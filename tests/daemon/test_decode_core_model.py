"""Random workers, prefill daemons and failures against the decode core; every page's content is tracked."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.daemon.decode_core import DecodeCore, DecodeLimits
from kvferry.daemon.effects import SendDone, StartTransfer, StopTransfer, ToWorker
from kvferry.daemon.errors import RequestError, unavailable
from kvferry.daemon.lease import LeaseState
from kvferry.daemon.limits import Name
from kvferry.daemon.store import Store
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState

PAGE = 4
PAGES = 20
NAMESPACE = bytes(32)


def chain(symbols: list[int]) -> list[bytes]:
    digests, parent = [], b"root"
    for symbol in symbols:
        parent = hashlib.sha256(parent + bytes([symbol])).digest()
        digests.append(parent)
    return digests


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = DecodeCore(
            Store(PAGES, PAGE), DecodeLimits(max_tokens=200, page_bytes=64, admission_seconds=40.0, queue=8)
        )
        self.now = 0.0
        self.count = 0
        self.prompts: dict[Name, tuple[list[bytes], bytes, int]] = {}  # full digests, tail digest, tokens
        self.content: dict[int, bytes] = {}  # page -> digest of what was copied to it
        self.local: set[Name] = set()
        self.transfers: dict[int, tuple[Name, int, tuple[int, ...]]] = {}
        self.stopping: list[int] = []
        self.arrived: dict[int, int] = {}
        self.ready: dict[Name, list[int]] = {}
        self.pages: dict[Name, list[int]] = {}
        self.answered: set[Name] = set()  # Failed was sent, Abort is owed
        self.over: set[Name] = set()
        self.workers = {1, 2}
        self.orphaned: set[int] = set()

    # -- effects ---------------------------------------------------------------------------------------------------

    def run_effects(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                if isinstance(effect, StartTransfer):
                    name = Name(effect.ask.name.request_id, effect.ask.name.attempt)
                    assert effect.ask.first_page * PAGE >= 0
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
                else:
                    assert isinstance(effect, SendDone)

    def hear(self, effect: ToWorker) -> None:
        kind = effect.event.WhichOneof("kind")
        message = getattr(effect.event, kind)
        name = Name(message.name.request_id, message.name.attempt)
        if kind == "admitted":
            self.pages[name] = list(message.pages)
            if name in self.local:
                # The worker computes what it lacks; the bytes follow from the digests.
                digests, tail, _ = self.prompts[name]
                want = [*digests, tail] if tail else digests
                for index in range(message.local_tokens // PAGE, len(want)):
                    self.content[message.pages[index]] = want[index]
        elif kind == "ready":
            digests, tail, _ = self.prompts[name]
            want = [*digests, tail] if tail else digests
            assert [self.content.get(p) for p in self.pages[name]] == want, "a wrong byte would be read"
            self.ready[name] = self.pages[name]
        elif kind == "grown":
            assert message.first_page == len(self.ready[name])
            self.ready[name] += message.pages
            for page in message.pages:
                self.content[page] = b"output of " + str(name).encode()
        elif kind == "failed":
            self.answered.add(name)
            self.ready.pop(name, None)
        elif kind == "ended":
            self.over.add(name)
            self.answered.discard(name)

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
    )
    def admit(self, symbols: list[int], tail: int, new: int, worker: int, prefill: str) -> None:
        tokens = len(symbols) * PAGE + tail
        if tokens == 0 or worker not in self.workers:
            return
        self.count += 1
        name = Name(self.count.to_bytes(16, "big"), 1)
        digests = chain(symbols)
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
        )
        try:
            self.core.admit(worker, NAMESPACE, name, request, self.now + 50, self.now)
        except RequestError:
            self.over.add(name)
        self.run_effects()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        name, first, pages = self.transfers[transfer]
        done = self.arrived[transfer]
        upto = data.draw(st.integers(done, len(pages)))
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

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), output=st.integers(1, 12))
    def decode_and_finish(self, data: st.DataObject, output: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.ready)))
        lease = self.core.leases[name]
        if lease.worker not in self.workers:
            return
        total = lease.tokens + min(output, lease.max_new_tokens) - 1
        self.core.grow(lease.worker, name, total, self.now)
        self.run_effects()
        digests, _, _ = self.prompts[name]
        behind: list[bytes] = []
        parent = digests[-1] if digests else b""
        for index in range(len(digests), total // PAGE):
            parent = hashlib.sha256(parent + str(name).encode()).digest()
            behind.append(parent)
            self.content[self.ready[name][index]] = parent
        del self.ready[name]
        self.core.finish(lease.worker, name, total, b"".join(behind), self.now)
        self.run_effects()

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names()))
        lease = self.core.leases[name]
        if lease.worker in self.workers and lease.state is not LeaseState.ENDING:
            self.ready.pop(name, None)
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
        self.core.abort(lease.worker if lease else 1, name, self.now)
        self.run_effects()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), how=st.sampled_from(["broken", "failed"]))
    def transfer_goes_wrong(self, data: st.DataObject, how: str) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        if how == "broken":
            self.core.transfer_broken(transfer, self.now)
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
            self.ready.pop(name, None)
        self.core.worker_lost(worker, self.now)
        self.run_effects()

    @precondition(lambda self: self.orphaned)
    @rule()
    def worker_is_proven_gone(self) -> None:
        worker = self.orphaned.pop()
        self.core.worker_gone(worker, self.now)
        self.run_effects()
        self.workers.add(worker)

    # -- oracle ----------------------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        core, store = self.core, self.core.store
        store.pool.check()
        for tree in store.trees.values():
            tree.check()
        assert core.promised == sum(lease.promised for lease in core.leases.values())
        assert store.pool.free + store.evictable >= core.promised
        held = [lease for lease in core.leases.values() if lease.state is not LeaseState.WAITING]
        assert store.locks == len(held)
        private = [page for lease in held for page in lease.pages[lease.tree_pages :]]
        assert len(private) == len(set(private)), "two requests own a page"
        counts = store.pool.counts()
        assert counts.leased + counts.orphaned == len(private)
        for name, pages in self.ready.items():
            digests, tail, _ = self.prompts[name]
            want = [*digests, tail] if tail else digests
            got = [self.content[p] for p in pages[: len(want)]]
            assert got == want, "a running request's page was overwritten"

    def teardown(self) -> None:
        for worker in (1, 2):
            self.core.worker_gone(worker, self.now)
        self.run_effects()
        while self.stopping:
            transfer = self.stopping.pop()
            del self.transfers[transfer]
            self.core.transfer_drained(transfer, self.now)
            self.run_effects()
        store = self.core.store
        counts = store.pool.counts()
        assert not self.core.leases
        assert store.locks == 0
        assert counts.free + counts.cached == PAGES, "pages leaked"
        assert self.core.active_transfers == 0
        # What the tree holds now is exactly what was copied there.
        for tree in store.trees.values():
            lock_all = tree.match(b"")
            assert lock_all.pages == 0


TestDecodeCore = CoreMachine.TestCase
TestDecodeCore.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
