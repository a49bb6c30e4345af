"""Random prefill workers, decode daemons and failures against the prefill core; every page's content is tracked.

Decode daemons may lie: they repeat transfer numbers, ask past the prompt, and speak of other tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.daemon.core.cache import Cache, CopyStarted
from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, SendAux, SendProgress, StartCopy, ToWorker, ZeroTail
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST, Name
from kvferry.daemon.core.namespaces import slack
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE

PAGE = 4
PAGES = 16
TABLE = 8
NAMESPACE = bytes(32)

PROMPTS = [[0, 1, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0, 0, 0], [1, 0, 0]]


def chain(symbols: list[int]) -> list[bytes]:
    digests, parent = [], b"root"
    for symbol in symbols:
        parent = hashlib.sha256(parent + bytes([symbol])).digest()
        digests.append(parent)
    return digests


@dataclass
class Job:
    """A request as its worker and its decode daemon know it."""

    digests: list[bytes]
    tail: bytes
    tokens: int
    worker: int | None = None  # that began it and has not heard its end
    pages: list[int] | None = None  # as in Begun
    computed: int = 0
    owes_abort: bool = False
    begun: bool = False

    @property
    def whole(self) -> list[bytes]:
        return [*self.digests, self.tail] if self.tail else self.digests


@dataclass
class Send:
    """As the session's sender has it."""

    name: Name
    first_page: int
    page_ids: tuple[int, ...]
    ready: int  # prompt pages
    sent: int = 0  # pages of the run
    ending: bool = False


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.jobs: dict[Name, Job] = {}
        self.content: dict[int, bytes] = {}
        self.sessions = {1, 2}
        self.next_session = 3
        self.next_transfer = 1
        self.sends: dict[tuple[int, int], Send] = {}
        self.workers = {1, 2}
        self.lost: set[int] = set()
        self.aux_sent: set[Name] = set()
        self.copies: list[CopyStarted] = []
        self.zeroing: dict[ZeroTail, int] = {}  # tails that are being cleared, and their pages' generations
        self.host_content: dict[int, bytes] = {}

    @initialize(host=st.sampled_from([0, 5, 40]))
    def configure(self, host: int) -> None:
        self.core = PrefillCore(Cache(PAGES, PAGE, host_pages=host), PrefillLimits(table=TABLE, overtakes=2))

    # -- effects ---------------------------------------------------------------------------------------------------

    def run_effects(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                if isinstance(effect, OpenSend):
                    key = (effect.session, effect.transfer)
                    assert effect.session in self.sessions and key not in self.sends
                    name = self.core._sends[key].name
                    assert effect.first_page >= 0 and effect.pages_ready >= 0
                    assert effect.first_page + len(effect.page_ids) <= len(self.jobs[name].whole)
                    self.sends[key] = Send(name, effect.first_page, effect.page_ids, effect.pages_ready)
                elif isinstance(effect, SendProgress):
                    send = self.sends.get((effect.session, effect.transfer))
                    if send is not None:
                        assert effect.pages_ready >= send.ready
                        send.ready = effect.pages_ready
                elif isinstance(effect, EndSend):
                    send = self.sends.get((effect.session, effect.transfer))
                    if send is not None:
                        send.ending = True
                    else:
                        self.core.send_ended(effect.session, effect.transfer, self.now)
                elif isinstance(effect, SendAux):
                    assert effect.name not in self.aux_sent, "the aux blob was sent twice"
                    self.aux_sent.add(effect.name)
                elif isinstance(effect, ZeroTail):
                    self.begin_zeroing(effect)
                elif isinstance(effect, ToWorker):
                    self.hear(effect)
                elif isinstance(effect, StartCopy):
                    self.copies.append(effect.started)
                else:
                    assert isinstance(effect, FailAsk)

    def begin_zeroing(self, effect: ZeroTail) -> None:
        """What is gathered later is behind it: for that it has been done."""
        owners = [job for job in self.jobs.values() if job.pages and job.pages[-1] == effect.page]
        assert len(owners) == 1 and effect.tokens == owners[0].tokens % PAGE
        assert self.content[effect.page] == b"unclean " + owners[0].tail
        self.content[effect.page] = owners[0].tail
        self.zeroing[effect] = self.core.store.pool.generation(effect.page)

    @precondition(lambda self: self.zeroing)
    @rule(data=st.data())
    def tail_is_zeroed(self, data: st.DataObject) -> None:
        self.zeroed(data.draw(st.sampled_from(list(self.zeroing))))

    def zeroed(self, effect: ZeroTail) -> None:
        generation = self.zeroing.pop(effect)
        assert self.core.store.pool.generation(effect.page) == generation, "a page was given on while it was cleared"
        self.core.tail_zeroed(effect.name, self.now)
        self.run_effects()

    def hear(self, effect: ToWorker) -> None:
        kind = effect.event.WhichOneof("kind")
        message = getattr(effect.event, kind)
        job = self.jobs[Name(message.name.request_id, message.name.attempt)]
        if kind == "begun":
            job.pages = list(message.pages)
            job.computed = message.matched_tokens
            assert job.computed < job.tokens and job.computed % PAGE == 0
            assert len(job.pages) == len(job.whole)
            matched = job.computed // PAGE
            assert [self.content[page] for page in job.pages[:matched]] == job.digests[:matched]
        elif kind == "failed":
            job.owes_abort = True
        else:
            assert kind == "ended"
            job.worker = job.pages = None
            job.owes_abort = False

    def begun(self) -> list[Name]:
        """Names that a living worker may still speak of."""
        return [name for name, job in self.jobs.items() if job.worker in self.workers]

    # -- tiers -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.copies) - 1))
        device = self.copies[number].copy.device
        self.end_copy(number, data.draw(st.sampled_from([[], [], [], device[:1], device[-1:], device])))

    def end_copy(self, number: int, failed: list[int]) -> None:
        started = self.copies.pop(number)
        copy = started.copy
        restore = copy.kind == RESTORE
        wanted = PageState.RESTORING if restore else PageState.SPILLING
        assert set(self.core.store.pool.states(copy.device)) == {wanted}, "a page was reused while a copy runs"
        for page, row in zip(copy.device, copy.host, strict=True):
            if restore:
                self.content[page] = b"garbage" if page in failed else self.host_content[row]
            else:
                self.host_content[row] = b"garbage" if page in failed else self.content[page]
        self.core.copy_ended(started.number, failed, 0, 0.001, self.now)
        self.run_effects()

    @rule(
        symbols=st.sampled_from(PROMPTS),
        worker=st.sampled_from([1, 2]),
        copies_end=st.sampled_from([True, True, True, False]),
        ends=st.sampled_from(["done", "done", "nothing"]),
    )
    def whole_request(self, symbols: list[int], worker: int, copies_end: bool, ends: str) -> None:
        """Asked for, begun, computed and sent at once, as far as it comes: this fills the cache."""
        if worker not in self.workers or not self.sessions:
            return
        self.count += 1
        digests = chain(symbols)
        name = Name(self.count.to_bytes(16, "big"), 1)
        job = self.jobs[name] = Job(digests, hashlib.sha256(digests[-1] + b"1").digest(), len(symbols) * PAGE + 1)
        session = max(self.sessions)
        self.say_ask(session, name, 0, "", 50.0)
        self.say_begin(worker, name, 50.0)
        while copies_end and self.copies:
            self.end_copy(0, [])
        if not job.pages or job.owes_abort:
            return
        self.write(job, job.tokens)
        job.computed = job.tokens
        self.core.progress(worker, name, job.tokens, self.now)
        self.run_effects()
        if job.owes_abort:
            return
        self.core.aux(worker, name, b"first token", self.now)
        job.pages = None
        self.run_effects()
        if ends == "done":
            for key in [key for key, send in self.sends.items() if send.name == name]:
                del self.sends[key]
                self.core.send_completed(*key, self.now)
                self.run_effects()
            self.core.done(session, name, self.now)
            self.run_effects()

    # -- the worker's words ----------------------------------------------------------------------------------------

    @rule(
        symbols=st.lists(st.integers(0, 1), max_size=6),
        tail=st.integers(0, PAGE - 1),
        halves=st.sampled_from(["", "worker", "decode", "worker decode", "decode worker"]),
        worker=st.sampled_from([1, 2]),
    )
    def new_request(self, symbols: list[int], tail: int, halves: str, worker: int) -> None:
        tokens = len(symbols) * PAGE + tail
        if tokens == 0:
            return
        self.count += 1
        digests = chain(symbols)
        tail_digest = hashlib.sha256((digests[-1] if digests else b"") + bytes([tail])).digest() if tail else b""
        name = Name(self.count.to_bytes(16, "big"), 1)
        self.jobs[name] = Job(digests, tail_digest, tokens)
        for half in halves.split():
            if half == "decode" and self.sessions:
                self.say_ask(max(self.sessions), name, len(symbols) // 2, "", 50.0)
            elif half == "worker" and worker in self.workers:
                self.say_begin(worker, name, 50.0)

    @precondition(lambda self: any(not job.begun for job in self.jobs.values()))
    @rule(data=st.data(), worker=st.sampled_from([1, 2]), seconds=st.sampled_from([5.0, 50.0]))
    def begin(self, data: st.DataObject, worker: int, seconds: float) -> None:
        if worker not in self.workers:
            return
        name = data.draw(st.sampled_from([name for name, job in self.jobs.items() if not job.begun]))
        self.say_begin(worker, name, seconds)

    def say_begin(self, worker: int, name: Name, seconds: float) -> None:
        job = self.jobs[name]
        job.begun, job.worker = True, worker
        request = wire.Begin(digests=b"".join(job.digests), tokens=job.tokens, tail_digest=job.tail)
        try:
            self.core.begin(worker, NAMESPACE, name, request, self.now + seconds, self.now)
        except RequestError:
            job.worker = None
        self.run_effects()

    @precondition(lambda self: any(job.pages for job in self.jobs.values()))
    @rule(data=st.data(), chunk=st.sampled_from([100, 1, PAGE, 3]))
    def compute(self, data: st.DataObject, chunk: int) -> None:
        names = [name for name, job in self.jobs.items() if job.pages and job.computed < job.tokens]
        names = [name for name in names if self.jobs[name].worker in self.workers and not self.jobs[name].owes_abort]
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        job = self.jobs[name]
        upto = min(job.tokens, job.computed + chunk)
        self.write(job, upto)
        job.computed = upto
        self.core.progress(job.worker or 0, name, upto, self.now)
        self.run_effects()
        if chunk == 100 and not job.owes_abort:
            self.core.aux(job.worker or 0, name, b"first token", self.now)
            job.pages = None
        self.run_effects()

    def write(self, job: Job, upto: int) -> None:
        """A worker computes: its pages must be its own, whatever has become of the request meanwhile."""
        assert job.pages is not None
        for index in range(job.computed // PAGE, -(-upto // PAGE)):
            page = job.pages[index]
            assert self.core.store.pool.state(page) in (PageState.LEASED, PageState.ORPHANED), "not the writer's page"
            clean = index < len(job.digests) and (index + 1) * PAGE <= upto
            self.content[page] = job.whole[index] if clean else b"unclean " + job.whole[index]

    @precondition(lambda self: self.begun())
    @rule(data=st.data(), tokens=st.integers(0, 30))
    def report_anything(self, data: st.DataObject, tokens: int) -> None:
        """Numbers that the worker did not compute are refused; the same number again changes nothing."""
        name = data.draw(st.sampled_from(self.begun()))
        job = self.jobs[name]
        if job.pages is not None and job.computed < tokens <= job.tokens:
            return
        try:
            self.core.progress(job.worker or 0, name, tokens, self.now)
        except RequestError:
            assert job.pages is None
        self.run_effects()

    @precondition(lambda self: self.begun())
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        ready = [name for name in self.begun() if self.jobs[name].computed == self.jobs[name].tokens]
        name = data.draw(st.sampled_from(ready or self.begun()))
        job = self.jobs[name]
        if ready or data.draw(st.booleans()):
            try:
                self.core.aux(job.worker or 0, name, b"first token", self.now)
            except RequestError:
                assert job.pages is None
            self.run_effects()
            if ready:
                job.pages = None  # it was the worker's last word

    @precondition(lambda self: self.begun())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.begun()))
        self.core.abort(self.jobs[name].worker or 0, name, self.now)
        job = self.jobs[name]
        job.pages = None  # from here on the worker touches them no more
        job.owes_abort = False
        self.run_effects()

    @precondition(lambda self: any(job.owes_abort for job in self.jobs.values()))
    @rule(data=st.data())
    def answer_failed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, job in self.jobs.items() if job.owes_abort]))
        job = self.jobs[name]
        if job.worker in self.workers:
            job.owes_abort, job.pages = False, None
            self.core.abort(job.worker, name, self.now)
            self.run_effects()

    @rule(data=st.data(), how=st.sampled_from(["lost", "gone", "gone", "gone"]))
    def worker_ends(self, data: st.DataObject, how: str) -> None:
        if self.lost and how == "gone":
            worker = self.lost.pop()
            for job in self.jobs.values():
                if job.worker == worker and job.pages and job.computed < job.tokens:
                    self.write(job, job.tokens)  # it wrote on until now
            self.prove_gone(worker)
        elif self.workers and data.draw(st.booleans()):
            worker = data.draw(st.sampled_from(sorted(self.workers)))
            if how == "gone":
                self.prove_gone(worker)
            else:
                self.workers.discard(worker)
                self.lost.add(worker)
                self.core.worker_lost(worker, self.now)
                self.run_effects()

    def prove_gone(self, worker: int) -> None:
        for job in self.jobs.values():
            if job.worker == worker:
                job.pages = None
                job.owes_abort = False
        self.core.worker_gone(worker, self.now)
        self.run_effects()
        for job in self.jobs.values():
            if job.worker == worker:
                job.worker = None
        self.workers.add(worker)

    # -- decode daemons' words -------------------------------------------------------------------------------------

    @precondition(lambda self: self.jobs and self.sessions)
    @rule(
        data=st.data(),
        lie=st.sampled_from(["", "", "", "", "", "", "past the end", "other tokens", "old number", "long"]),
        seconds=st.sampled_from([5.0, 50.0]),
    )
    def ask(self, data: st.DataObject, lie: str, seconds: float) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        name = data.draw(st.sampled_from(list(self.core.entries) or list(self.jobs)))
        first = data.draw(st.integers(0, len(self.jobs[name].whole)))
        self.say_ask(session, name, first, lie, seconds)

    def say_ask(self, session: int, name: Name, first: int, lie: str, seconds: float) -> None:
        job = self.jobs[name]
        ask = peer.Ask(
            transfer=self.next_transfer,
            name=name.to_proto(),
            namespace_id=NAMESPACE,
            first_page=first,
            pages=len(job.whole) - first,
            tokens=job.tokens,
            last_full_digest=job.digests[-1] if job.digests else b"",
            tail_digest=job.tail,
        )
        if lie == "past the end":
            ask.first_page = (1 << 32) - 1
        elif lie == "other tokens":
            ask.tokens += 1
        elif lie == "long":
            ask.tail_digest = bytes(1 << 16)
        if lie == "old number":
            ask.transfer = max((number for of, number in self.sends if of == session), default=0)
        else:
            self.next_transfer += 1
        self.core.ask(session, name, ask, self.now + seconds, self.now)
        self.run_effects()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def ask_end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.core.ask_end(session, data.draw(st.integers(0, self.next_transfer)))
        self.run_effects()

    @precondition(lambda self: self.jobs and self.sessions)
    @rule(data=st.data(), early=st.sampled_from([False, False, False, True]))
    def done(self, data: st.DataObject, early: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        names = list(self.jobs if early else self.aux_sent)
        if names:
            self.core.done(session, data.draw(st.sampled_from(names)), self.now)
        self.run_effects()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def session_breaks(self, data: st.DataObject) -> None:
        if not data.draw(st.booleans()):
            return
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.break_session(session)
        self.sessions.add(self.next_session)
        self.next_session += 1

    def break_session(self, session: int) -> None:
        """No copy of it runs any more when the core hears of it."""
        self.sessions.discard(session)
        for key in [key for key in self.sends if key[0] == session]:
            del self.sends[key]
        self.core.session_down(session, self.now)
        self.run_effects()
        assert not any(key[0] == session for key in self.core._sends), "a send outlives its session"

    # -- the senders -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sends)
    @rule(data=st.data(), pages=st.sampled_from([100, 1, 3]))
    def gather(self, data: st.DataObject, pages: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.sends)))
        send = self.sends[key]
        if send.ending:
            return
        upto = min(len(send.page_ids), send.sent + pages, max(0, send.ready - send.first_page))
        whole = self.jobs[send.name].whole
        for index in range(send.sent, upto):
            got = self.content.get(send.page_ids[index])
            assert got == whole[send.first_page + index], "a wrong byte would be sent"
        send.sent = max(send.sent, upto)
        if send.sent == len(send.page_ids):
            del self.sends[key]
            self.core.send_completed(*key, self.now)
            self.run_effects()

    @precondition(lambda self: self.sends)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def last_gather_ends(self, data: st.DataObject, fails: bool) -> None:
        """Of one that was to end, or by a failure."""
        keys = sorted(key for key, send in self.sends.items() if send.ending or fails)
        if keys:
            key = data.draw(st.sampled_from(keys))
            del self.sends[key]
            self.core.send_ended(*key, self.now)
            self.run_effects()

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.0, 6.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.run_effects()

    # -- oracle ----------------------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        core, store = self.core, self.core.store
        store.pool.check()
        if store.host is not None:
            store.host.check()
        for namespace in store.namespaces.values():
            namespace.tree.check()
        assert slack(store.pool.free, store.namespaces.values()) >= 0, "a promise cannot be kept"
        assert store.copies == len(self.copies)
        assert len(core.entries) <= TABLE
        prompts = [(entry, entry.prompt) for entry in core.entries.values() if entry.prompt is not None]
        held = [(entry, prompt) for entry, prompt in prompts if prompt.hold.lock is not None]
        assert store.locks == len(held)
        assert store.promised == sum(prompt.hold.counted for _, prompt in prompts)
        private = [page for _, prompt in held for page in prompt.private]
        assert len(private) == len(set(private)), "two requests own a page"
        counts = store.pool.counts()
        assert counts.leased + counts.orphaned == len(private)
        in_tree = counts.cached + counts.spilling + counts.restoring + counts.arriving
        assert counts.free + in_tree + len(private) == PAGES
        unasked = sum(prompt.hold.wanted for entry, prompt in held if not entry.asked)
        assert core._supply.unasked_pages == unasked == sum(prompt.unasked for _, prompt in prompts)
        assert unasked <= PAGES // 2, "what nobody asked for holds more than half of the pool"
        waiting = [entry for entry, prompt in prompts if prompt.hold.lock is None]
        assert len(waiting) == core.waiting_requests
        over = [entry for entry in core.entries.values() if entry.done and entry.prompt is None]
        assert core.running == len(core.entries) - len(over) - len(waiting)
        # Level-triggered: the first that was asked for waits for room only.
        asked = sorted((entry for entry in waiting if entry.asked), key=lambda entry: entry.order)
        if asked and asked[0].prompt is not None:
            hold = asked[0].prompt.hold
            tree = hold.namespace.tree
            assert not store.fits(hold.namespace, hold.wanted - tree.match(hold.digests).device_pages) or tree.evictable
        if not self.copies:
            assert core.reserved == 0, "pages are reserved, but nothing will free them"
        for entry in core.entries.values():
            assert len(entry.asks) + len(entry.sends) <= MAX_ASKS_PER_REQUEST
            assert all((entry.session, number) in core._sends for number in entry.sends)
        assert core.active_transfers == sum(len(entry.sends) for entry in core.entries.values())
        assert {key for key in self.sends if key not in core._sends} == set(), "the sender has what the core forgot"

    @invariant()
    def open_sends_keep_their_pages(self) -> None:
        pool = self.core.store.pool
        for send in self.sends.values():
            states = {pool.state(page) for page in send.page_ids}
            assert PageState.FREE not in states, "a page was freed while a send of it is open"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.now += 1000.0
        self.core.tick(self.now)  # what was asked for ends although its session and worker live
        self.run_effects()
        assert all(send.ending for send in self.sends.values()), "a send goes on behind its request's deadline"
        for key in sorted(self.sends):
            del self.sends[key]
            self.core.send_ended(*key, self.now)
            self.run_effects()
        for name in [name for name, job in self.jobs.items() if job.owes_abort and job.worker in self.workers]:
            self.core.abort(self.jobs[name].worker or 0, name, self.now)
            self.run_effects()
        for worker in sorted(self.lost):
            self.core.worker_gone(worker, self.now)
            self.run_effects()
        while self.zeroing:
            self.zeroed(next(iter(self.zeroing)))
        assert not self.core.entries, "a request never ends"
        for session in sorted(self.sessions):
            self.break_session(session)
        while self.copies:
            self.core.copy_ended(self.copies.pop().number, [], 0, 0.001, self.now)
            self.run_effects()
        store = self.core.store
        assert store.locks == 0
        store.flush(store.namespaces.values())
        assert store.pool.free == PAGES, "pages leaked"
        assert store.host is None or store.host.free == store.host.pages, "host pages leaked"
        assert self.core.active_transfers == self.core.waiting_requests == self.core._supply.unasked_pages == 0
        counters = self.core.transfer_counters
        assert counters.opened == counters.completed + counters.failed + counters.aborted


TestPrefillCore = PrefillMachine.TestCase
TestPrefillCore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongPrefillMachine(PrefillMachine):
    """Another class: a machine's test case is one object."""


TestPrefillCoreLong = pytest.mark.nightly(pytest.mark.timeout(1800)(LongPrefillMachine.TestCase))
TestPrefillCoreLong.settings = settings(
    max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
