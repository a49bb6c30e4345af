"""Rules that drive a `PrefillWorld`, and what holds after each of them.

Decode daemons may lie: they repeat transfer numbers, ask past the prompt, and speak of other tokens.
"""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST, Name
from kvferry.daemon.core.namespaces import slack
from kvferry.radix.pool import PageState
from tests.daemon.core.prefill_world import PAGE, PAGES, TABLE, Job, PrefillWorld
from tests.daemon.core.prompts import PROMPTS, chain


class PrefillMachine(PrefillWorld):
    @precondition(lambda self: self.zeroing)
    @rule(data=st.data())
    def tail_is_zeroed(self, data: st.DataObject) -> None:
        self.zeroed(data.draw(st.sampled_from(list(self.zeroing))))

    # -- tiers ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.copies) - 1))
        device = self.copies[number].copy.device
        self.end_copy(number, data.draw(st.sampled_from([[], [], [], device[:1], device[-1:], device])))

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

    # -- the worker's words --------------------------------------------------------------------------------------------

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

    # -- decode daemons' words -----------------------------------------------------------------------------------------

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

    # -- the senders ---------------------------------------------------------------------------------------------------

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

    # -- oracle --------------------------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        core, cache = self.core, self.core.cache
        cache.pool.check()
        if cache.host is not None:
            cache.host.check()
        for namespace in cache.namespaces.values():
            namespace.tree.check()
        assert slack(cache.pool.free, cache.namespaces.values()) >= 0, "a promise cannot be kept"
        assert cache.copies.running == len(self.copies)
        assert len(core.entries) <= TABLE
        prompts = [(entry, entry.prompt) for entry in core.entries.values() if entry.prompt is not None]
        held = [(entry, prompt) for entry, prompt in prompts if prompt.hold.lock is not None]
        assert cache.locks == len(held)
        assert cache.promised == sum(prompt.hold.counted for _, prompt in prompts)
        private = [page for _, prompt in held for page in prompt.private]
        assert len(private) == len(set(private)), "two requests own a page"
        counts = cache.pool.counts()
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
            assert not cache.fits(hold.namespace, hold.wanted - tree.match(hold.digests).device_pages) or tree.evictable
        if not self.copies:
            assert core.reserved == 0, "pages are reserved, but nothing will free them"
        for entry in core.entries.values():
            assert len(entry.asks) + len(entry.sends) <= MAX_ASKS_PER_REQUEST
            assert all((entry.session, number) in core._sends.open for number in entry.sends)
        assert core.active_transfers == sum(len(entry.sends) for entry in core.entries.values())
        assert {key for key in self.sends if key not in core._sends.open} == set(), (
            "the sender has what the core forgot"
        )

    @invariant()
    def open_sends_keep_their_pages(self) -> None:
        pool = self.core.cache.pool
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
        cache = self.core.cache
        assert cache.locks == 0
        cache.flush(cache.namespaces.values())
        assert cache.pool.free == PAGES, "pages leaked"
        assert cache.host is None or cache.host.free == cache.host.pages, "host pages leaked"
        assert self.core.active_transfers == self.core.waiting_requests == self.core._supply.unasked_pages == 0
        counters = self.core.transfer_counters
        assert counters.opened == counters.completed + counters.failed + counters.aborted
