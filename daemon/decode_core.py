"""The decode daemon's requests: admission by promise, single flight, asking again, leases. Core: no I/O, time is passed
in.

Every public method is one step: it changes the state, then looks at the admission queue again (level-triggered) and
leaves effects to be carried out. Pages and locks of a lease are given back only when its worker has said that it
touches them no more (or is proven gone) and no copy of its transfers runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.daemon.arrivals import Arrivals
from kvferry.daemon.asks import Asks
from kvferry.daemon.counters import Latencies, RequestCounters, TransferCounters
from kvferry.daemon.effects import Effect, SendDone, ToWorker
from kvferry.daemon.errors import RequestError, deadline_exceeded, exhausted, invalid, precondition
from kvferry.daemon.lease import Lease, LeaseState
from kvferry.daemon.limits import MAX_ASKS_PER_REQUEST, Name, pages_for
from kvferry.daemon.store import Store
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_AUX_BYTES
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    max_tokens: int
    page_bytes: int
    admission_seconds: float  # that a request waits at most
    queue: int  # requests that may wait for admission
    reuse: str = "on"  # "off": nothing is matched and nothing kept, the baseline of comparisons


class DecodeCore:
    def __init__(self, store: Store, limits: DecodeLimits) -> None:
        self.store = store
        self.limits = limits
        self.counters = RequestCounters()
        self.latencies = Latencies()
        self.leases: dict[Name, Lease] = {}
        self.waiting: deque[Lease] = deque()
        self.promised = 0  # pages, over all leases
        self._arrivals = Arrivals()
        self._next_order = 1
        self._effects: list[Effect] = []
        self._asks = Asks(store.page_size, lambda effect: self._effects.append(effect))

    # -- what the shells ask -------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def matched_tokens(self, namespace_id: bytes, digests: bytes) -> int:
        """Read-only: how much of the prompt is in the tree, arriving pages too."""
        tree = self.store.trees.get(namespace_id)
        if tree is None or self.limits.reuse == "off":
            return 0
        return tree.match(digests).pages * self.store.page_size

    @property
    def running(self) -> int:
        return len(self.leases) - len(self.waiting)

    @property
    def waiting_requests(self) -> int:
        return len(self.waiting)

    @property
    def active_transfers(self) -> int:
        return len(self._asks)

    @property
    def transfer_counters(self) -> TransferCounters:
        return self._asks.counters

    @property
    def asked_again(self) -> int:
        return self._asks.asked_again

    # -- worker's words ------------------------------------------------------------------------------------------

    def admit(
        self, worker: int, namespace_id: bytes, name: Name, request: wire.Admit, deadline: float, now: float
    ) -> None:
        """Takes a checked Admit into the queue, or raises why not."""
        if name in self.leases:
            raise precondition(f"name {name} is already in use; a new try takes the next attempt number")
        if request.max_new_tokens < 1 or request.tokens + request.max_new_tokens > self.limits.max_tokens:
            raise invalid(
                f"max_new_tokens is {request.max_new_tokens}; with {request.tokens} prompt tokens it must be 1 to "
                f"{self.limits.max_tokens - request.tokens}"
            )
        need = pages_for(request.tokens + request.max_new_tokens - 1, self.store.page_size)
        if need > self.store.pool.pages:
            self.counters.refused += 1
            raise exhausted(
                f"prompt of {request.tokens} + max_new_tokens {request.max_new_tokens} needs {need} pages; "
                f"the pool has {self.store.pool.pages}"
            )
        if len(self.waiting) >= self.limits.queue:
            self.counters.refused += 1
            raise exhausted(f"{len(self.waiting)} requests wait for admission; the bound is {self.limits.queue}")
        lease = Lease(
            name=name,
            worker=worker,
            namespace_id=namespace_id,
            tree=self.store.tree(namespace_id),
            digests=request.digests,
            tokens=request.tokens,
            tail_digest=request.tail_digest,
            prefill=request.prefill,
            max_new_tokens=request.max_new_tokens,
            arrived_at=now,
            deadline=deadline,
            order=self._next_order,
        )
        self._next_order += 1
        self.leases[name] = lease
        self.waiting.append(lease)
        self._pump(now)

    def grow(self, worker: int, name: Name, tokens: int, now: float) -> None:
        lease = self._lease_of(worker, name)
        if lease.state is LeaseState.FAILED:
            return  # the worker has not read its Failed yet
        extra = pages_for(tokens, self.store.page_size) - len(lease.pages)
        if lease.state is not LeaseState.READY or extra > lease.promised:
            bound = len(lease.pages) + lease.promised
            self._fail(
                lease,
                invalid(f"tokens {tokens} needs {extra + len(lease.pages)} pages; the promise is {bound}, once ready"),
            )
            self._pump(now)
            return
        first = len(lease.pages)
        if extra > 0:
            lease.pages += self.store.take(extra)
            lease.promised -= extra
            self.promised -= extra
        grown = wire.Grown(name=name.to_proto(), first_page=first, pages=lease.pages[first:])
        self._tell(worker, wire.WorkerEvent(grown=grown))

    def finish(self, worker: int, name: Name, tokens: int, digests: bytes, now: float) -> None:
        lease = self._lease_of(worker, name)
        if lease.state is LeaseState.FAILED:
            self.abort(worker, name, now)  # it crossed Failed on the way
            return
        page_size = self.store.page_size
        full = tokens // page_size
        want = (full - lease.tokens // page_size) * DIGEST_BYTES
        last = min(lease.tokens + lease.max_new_tokens - 1, len(lease.pages) * page_size)
        if lease.state is not LeaseState.READY:
            self._fail(lease, precondition(f"name {name} is not ready; only a ready request finishes"))
        elif not lease.tokens <= tokens <= last:
            self._fail(lease, invalid(f"tokens is {tokens}; it must be {lease.tokens} to {last}"))
        elif len(digests) != want:
            self._fail(lease, invalid(f"digests has {len(digests)} bytes; {tokens} tokens need {want}"))
        else:
            self.counters.finished += 1
            if self.limits.reuse == "on":
                fresh = lease.pages[lease.tree_pages : full]
                result = lease.tree.insert(lease.digests + digests, fresh, start=lease.tree_pages)
                self.store.pool.free_pages(result.duplicates)
                del lease.pages[lease.tree_pages : full]
            lease.acknowledge = True
            self._end(lease)
        self._pump(now)

    def abort(self, worker: int, name: Name, now: float) -> None:
        """Idempotent: an unknown name is answered with Ended."""
        lease = self.leases.get(name)
        if lease is None:
            self._tell(worker, wire.WorkerEvent(ended=wire.Ended(name=name.to_proto())))
            return
        if lease.worker != worker:
            raise precondition(f"name {name} belongs to another worker")
        if lease.state is not LeaseState.FAILED and lease.state is not LeaseState.ENDING:
            self.counters.aborted += 1
        lease.acknowledge = True
        self._end(lease)
        self._pump(now)

    def worker_lost(self, worker: int, now: float) -> None:
        """Its stream broke: it may still write. Its pages are orphaned until `worker_gone`."""
        for lease in [lease for lease in self.leases.values() if lease.worker == worker]:
            if lease.state is LeaseState.WAITING:
                self._end(lease)
                self.counters.aborted += 1
                continue
            if lease.live:
                self.counters.aborted += 1
                self._withdraw(lease)
            if lease.state is not LeaseState.ENDING:
                lease.state = LeaseState.FAILED
            own = [page for page in lease.pages[lease.tree_pages :] if self.store.pool.state(page) is PageState.LEASED]
            self.store.pool.move(own, PageState.LEASED, PageState.ORPHANED)
            self._settle(lease)
        self._pump(now)

    def worker_gone(self, worker: int, now: float) -> None:
        """Proof that it writes no more: its quiesced message, or the kernel's release of its lock."""
        for lease in [lease for lease in self.leases.values() if lease.worker == worker]:
            if lease.live:
                self.counters.aborted += 1
            self._end(lease)
        self._pump(now)

    # -- the other daemon's words --------------------------------------------------------------------------------

    def aux(self, prefill: str, name: Name, blob: bytes, now: float) -> None:
        lease = self.leases.get(name)
        if lease is None or lease.state is not LeaseState.FILLING or lease.local or lease.prefill != prefill:
            return
        if len(blob) > MAX_AUX_BYTES:
            self._fail(lease, invalid(f"aux has {len(blob)} bytes; the bound is {MAX_AUX_BYTES}"))
        else:
            lease.aux = blob
            lease.aux_at = now
            self._check_ready(lease, now)
        self._pump(now)

    def pages_arrived(self, transfer: int, prompt_pages: Iterable[int], now: float) -> None:
        """Verified bytes of these prompt pages are in the transfer's pool pages."""
        moving = self._asks.get(transfer)
        if moving is None:
            return
        lease = moving.lease
        pages = [moving.page_ids[index - moving.first_page] for index in prompt_pages]
        pages = [page for page in pages if page in self._arrivals]
        lease.delta_pages += len(pages)
        lease.tree.arrived(page for page in pages if self.store.pool.state(page) is PageState.ARRIVING)
        for waiter in {waiter: None for page in pages for waiter in self._arrivals.arrived(page)}:
            self._check_ready(waiter, now)
        self._pump(now)

    def transfer_completed(self, transfer: int, now: float) -> None:
        """Every page of it has arrived; the receiver knows it no more."""
        moving = self._asks.pop(transfer)
        if moving is not None:
            self.transfer_counters.completed += 1
            self._settle(moving.lease)
            self._pump(now)

    def transfer_broken(self, transfer: int, now: float) -> None:
        """Parts of it were wrong or lost: what is missing is asked for again once no copy of it runs."""
        moving = self._asks.get(transfer)
        if moving is None or moving.draining:
            return
        moving.retry = True
        self._asks.stop(moving, "broken")
        self._pump(now)

    def transfer_failed(self, transfer: int, error: RequestError, now: float) -> None:
        """The prefill daemon will send no more of it."""
        moving = self._asks.get(transfer)
        if moving is None or moving.draining:
            return
        if moving.lease.state is LeaseState.FILLING:
            self._fail(moving.lease, error)
        else:
            self._asks.stop(moving, error.message)
        self._pump(now)

    def transfer_drained(self, transfer: int, now: float) -> None:
        """After StopTransfer: no copy into its pages runs, and none will."""
        moving = self._asks.pop(transfer)
        if moving is None:
            return
        assert moving.draining, f"transfer {transfer} drained before it was stopped"
        lease = moving.lease
        if moving.retry and lease.state is LeaseState.FILLING:
            self.transfer_counters.failed += 1
            still = [page for page in moving.page_ids if page in lease.filling]
            if lease.asks >= MAX_ASKS_PER_REQUEST:
                self._fail(
                    lease, exhausted(f"{lease.asks} transfers were asked for; the bound is {MAX_ASKS_PER_REQUEST}")
                )
            elif still:
                self._asks.ask_again(lease, still)
        else:
            self.transfer_counters.aborted += 1
        self._settle(lease)
        self._pump(now)

    def prefill_down(self, prefill: str, error: RequestError, now: float) -> None:
        """No session to that daemon: its requests fail, what arrived stays."""
        for lease in list(self.leases.values()):
            if lease.prefill == prefill and lease.state is LeaseState.FILLING:
                self._fail(lease, error)
        self._pump(now)

    def tick(self, now: float) -> None:
        for lease in list(self.leases.values()):
            deadline = lease.deadline
            if lease.state is LeaseState.WAITING:
                deadline = min(deadline, lease.arrived_at + self.limits.admission_seconds)
            if deadline <= now and lease.state in (LeaseState.WAITING, LeaseState.FILLING):
                waited = now - lease.arrived_at
                what = (
                    "admission" if lease.state is LeaseState.WAITING else f"{len(lease.missing)} pages or the aux blob"
                )
                self._fail(lease, deadline_exceeded(f"waited {waited:.3f} s for {what}; the deadline is passed"))
        self._pump(now)

    # -- admission -----------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        while self.waiting and self._try_admit(self.waiting[0], now):
            self.waiting.popleft()

    def _try_admit(self, lease: Lease, now: float) -> bool:
        tree, pool = lease.tree, self.store.pool
        digests = lease.digests if self.limits.reuse == "on" else b""
        match = tree.match(digests)
        total = pages_for(lease.tokens + lease.max_new_tokens - 1, self.store.page_size)
        if pool.free + self.store.evictable - self.promised < total - match.pages:
            return False  # locking the match can only make it worse; a request that waits should not look like use
        lock = tree.lock(match)
        held = tree.path_pages(lock)
        if lease.local:
            # Only what is readable: a request without a prefill server could not take over from a failed filler.
            readable = next((i for i, page in enumerate(held) if page in self._arrivals), len(held))
            # At least one token is left to compute, for its logits.
            readable = min(readable, (lease.tokens - 1) // self.store.page_size)
            if readable < len(held):
                shorter = tree.lock(tree.match(digests[: readable * DIGEST_BYTES]))
                tree.unlock(lock)
                lock, held = shorter, held[:readable]
        prompt = pages_for(lease.tokens, self.store.page_size)
        promise = total - len(held)
        if pool.free + self.store.evictable - self.promised < promise:
            tree.unlock(lock)
            return False
        fresh = self.store.take(prompt - len(held))
        lease.lock, lease.pages, lease.matched, lease.tree_pages = lock, held + fresh, len(held), len(held)
        lease.promised = promise - len(fresh)
        self.promised += lease.promised
        lease.state = LeaseState.FILLING
        lease.admitted_at = now
        self.counters.lookup(lease.tokens, lease.matched * self.store.page_size)
        self.counters.saved_pages += lease.matched
        self._tell(lease.worker, wire.WorkerEvent(admitted=self._admitted(lease)))
        if not lease.local:
            self._fetch(lease, fresh, digests)
        self._check_ready(lease, now)
        return True

    def _admitted(self, lease: Lease) -> wire.Admitted:
        matched = lease.matched * self.store.page_size
        local = matched if lease.local else 0
        return wire.Admitted(name=lease.name.to_proto(), matched_tokens=matched, pages=lease.pages, local_tokens=local)

    def _fetch(self, lease: Lease, fresh: list[int], digests: bytes) -> None:
        """Follows what arrives for others, puts the full delta pages into the tree as arriving, and asks for the
        delta.
        """
        adopted = [p for p in lease.pages[: lease.matched] if p in self._arrivals and self._arrivals.follow(p, lease)]
        for page in fresh:
            self._arrivals.expect(page, lease)
        full = len(digests) // DIGEST_BYTES
        if full > lease.matched:
            coming = lease.pages[lease.matched : full]
            self.store.pool.move(coming, PageState.LEASED, PageState.ARRIVING)
            result = lease.tree.insert(digests, coming, start=lease.matched)
            assert not result.duplicates, "pages behind a full match were in the tree"
            assert lease.lock is not None
            longer = lease.tree.lock(result.match)
            lease.tree.unlock(lease.lock)
            lease.lock, lease.tree_pages = longer, full
        self._asks.ask(lease, lease.matched, len(fresh))
        if adopted:
            self._asks.ask_again(lease, adopted)

    # -- ready, failed, ended ------------------------------------------------------------------------------------

    def _check_ready(self, lease: Lease, now: float) -> None:
        if lease.state is not LeaseState.FILLING or lease.missing:
            return
        lease.filled_at = lease.filled_at or now
        if lease.aux is None and not lease.local:
            return
        lease.state = LeaseState.READY
        elapsed = now - lease.arrived_at
        aux_wait = max(0.0, now - lease.filled_at)
        self.latencies.add(
            elapsed,
            {
                "queue": lease.admitted_at - lease.arrived_at,
                "pages": lease.filled_at - lease.admitted_at,
                "aux": aux_wait,
                "first_token": max(0.0, lease.aux_at - lease.admitted_at),
            },
        )
        ready = wire.Ready(
            name=lease.name.to_proto(),
            aux=lease.aux or b"",
            delta_pages=lease.delta_pages,
            delta_bytes=lease.delta_pages * self.limits.page_bytes,
            elapsed_us=int(elapsed * 1e6),
        )
        self._tell(lease.worker, wire.WorkerEvent(ready=ready))
        self._asks.complete_empty(lease)
        if not lease.local:
            self._effects.append(SendDone(lease.prefill, lease.name))

    def _fail(self, lease: Lease, error: RequestError) -> None:
        """Tells the worker; what it may still touch is kept until it answers with Abort (or is gone)."""
        self.counters.failed += 1
        self._tell(
            lease.worker, wire.WorkerEvent(failed=wire.Failed(name=lease.name.to_proto(), error=error.to_proto()))
        )
        if lease.state is LeaseState.WAITING:
            self.waiting.remove(lease)
            del self.leases[lease.name]
            return
        self._withdraw(lease)
        lease.state = LeaseState.FAILED
        self._settle(lease)

    def _withdraw(self, lease: Lease) -> None:
        """The request wants nothing more of its prefill daemon and waits for no page."""
        if lease.state is LeaseState.FILLING and not lease.local:
            self._effects.append(SendDone(lease.prefill, lease.name))
        self._arrivals.leave(lease)
        self._asks.stop_all(lease, "the request ended")
        self.promised -= lease.promised
        lease.promised = 0

    def _end(self, lease: Lease) -> None:
        """The worker touches its pages no more."""
        if lease.state is LeaseState.WAITING:
            self.waiting.remove(lease)
            self._forget(lease)
            return
        if lease.live:
            self._withdraw(lease)
        lease.state = LeaseState.ENDING
        self._settle(lease)

    def _settle(self, lease: Lease) -> None:
        """Once no copy of its transfers runs: others take over what it was to bring, and if its worker is done its
        pages go.
        """
        if lease.live or lease.transfers:
            return
        for heir, pages in self._arrivals.hand_over(lease).items():
            self._asks.ask_again(heir, pages)
        if lease.state is not LeaseState.ENDING:
            return
        own = lease.pages[lease.tree_pages :]
        self._arrivals.forget(own)
        self.store.pool.free_pages(own)
        assert lease.lock is not None
        on_path = lease.pages[: lease.tree_pages]
        abandoned = next(
            (i for i, p in enumerate(on_path) if p in self._arrivals and self._arrivals.filler(p) is None), None
        )
        if abandoned is None:
            lease.tree.unlock(lease.lock)
        else:
            removed = lease.tree.prune(lease.lock, abandoned)
            self._arrivals.forget(removed)
            self.store.pool.free_pages(removed)
        lease.lock = None
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        del self.leases[lease.name]
        if lease.acknowledge:
            self._tell(lease.worker, wire.WorkerEvent(ended=wire.Ended(name=lease.name.to_proto())))

    def _lease_of(self, worker: int, name: Name) -> Lease:
        lease = self.leases.get(name)
        if lease is None or lease.state is LeaseState.ENDING:
            raise precondition(f"name {name} is not a running request")
        if lease.worker != worker:
            raise precondition(f"name {name} belongs to another worker")
        return lease

    def _tell(self, worker: int, event: wire.WorkerEvent) -> None:
        self._effects.append(ToWorker(worker, event))
