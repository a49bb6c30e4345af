"""What the decode daemon keeps of its requests, and how a lease becomes ready, fails and ends. Core: no I/O.

`decode_core` has the steps from outside; each of them ends with `_pump`, which looks again at who waits for pages.
Pages and locks of a lease are given back only when its worker has said that it touches them no more (or is proven gone)
and no copy of its transfers runs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.daemon.core.admission_queue import OVERTAKES
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import Latencies, RequestCounters, TransferCounters, reason_of
from kvferry.daemon.core.decode_scheduler import Supply
from kvferry.daemon.core.effects import Effect, SendDone, ToWorker, tier_effects, zero_effects
from kvferry.daemon.core.errors import RequestError, precondition
from kvferry.daemon.core.lease import Lease, LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.pins import Pins
from kvferry.daemon.core.reservations import Holds
from kvferry.daemon.core.single_flight import Arrivals
from kvferry.daemon.core.take_over import TakeOvers
from kvferry.daemon.core.transfers import Asks
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState
from kvferry.radix.tree import PROMPT


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    max_tokens: int
    page_bytes: int
    admission_seconds: float  # that a request waits at most
    queue: int  # requests that may wait for admission
    reuse: str = "on"  # "off": nothing is matched and nothing kept, the baseline of comparisons
    overtakes: int = OVERTAKES
    overcommit: float = 1.0  # of the growth that requests may have, 1 / overcommit is promised
    growth_seconds: float = 60.0  # that a growing request waits at most for pages


class DecodeRequests:
    def __init__(self, store: Cache, limits: DecodeLimits) -> None:
        self.store = store
        self.limits = limits
        self.counters = RequestCounters()
        self.latencies = Latencies()
        self.leases: dict[Name, Lease] = {}
        self._arrivals: Arrivals[Lease] = Arrivals()
        self._holds = Holds(store, self._arrivals)
        self.pins = Pins(store, self._holds)
        self._supply = Supply(store, self._holds, limits.overtakes, self)
        self._retracted: OrderedDict[Name, tuple[int, int]] = OrderedDict()  # to their worker and order
        self._next_order = 1
        self._effects: list[Effect] = []
        self._asks = Asks(store.page_size, store.clock, lambda effect: self._effects.append(effect))
        self._take_overs = TakeOvers(self._arrivals, self._asks)

    # -- what the shells ask -------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return [*zero_effects(self.store), *effects]

    def matched_tokens(self, namespace_id: bytes, digests: bytes) -> int:
        """Read-only: how much of the prompt is in the tree, arriving pages too."""
        namespace = self.store.namespaces.get(namespace_id)
        if namespace is None or self.limits.reuse == "off":
            return 0
        return namespace.tree.match(digests).pages * self.store.page_size

    @property
    def running(self) -> int:
        return len(self.leases) - self.waiting_requests

    @property
    def failed_requests(self) -> int:
        """Of the running ones, those that have failed: they wait for their worker's last word or its proven end."""
        return sum(lease.state is LeaseState.FAILED for lease in self.leases.values())

    @property
    def waiting_requests(self) -> int:
        return len(self._supply.queue)

    @property
    def reserved(self) -> int:
        """Of the running ones, those that wait for pages to be spilled."""
        return self._supply.reserved

    @property
    def active_transfers(self) -> int:
        return len(self._asks)

    @property
    def draining_transfers(self) -> int:
        """Of the active ones, those that were ended while copies into their pages may run."""
        return self._asks.draining

    @property
    def transfer_counters(self) -> TransferCounters:
        return self._asks.counters

    @property
    def asked_again(self) -> int:
        return self._asks.asked_again

    def comes_back(self, worker: int, name: Name) -> bool:
        """It was retracted: its place is kept, and it is accepted work."""
        return self._retracted.get(name, (None, 0))[0] == worker

    # -- pages ---------------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        self.store.clock.now = now
        self._supply.pump(now)
        self.store.settle()
        self.store.eviction.write_through()
        self.counters.overtaken = self._supply.queue.overtaken
        self._effects += tier_effects(self.store)

    def on_claimed(self, lease: Lease, fresh: list[int], now: float) -> None:
        """(SupplyEvents)"""
        hold = lease.hold
        lease.state, lease.tree_pages = LeaseState.FILLING, hold.matched
        path = lease.pages[: hold.matched]
        coming = self.store.pool.those(path, PageState.RESTORING)
        self._arrivals.restoring(page for page in coming if page not in self._arrivals)
        adopted = [p for p in path if p in self._arrivals and self._arrivals.follow(p, lease)]
        if not lease.looked_up:
            hit, host = hold.matched * self.store.page_size, hold.host_matched * self.store.page_size
            self.counters.lookup(lease.tokens, hit, host)
            hold.namespace.looked_up(lease.tokens, hit, host)
            self.counters.saved_pages += hold.matched
            lease.looked_up = True
        if not lease.local:
            self._tell(lease.worker, wire.WorkerEvent(admitted=self._admitted(lease)))
            self._fetch(lease, fresh, adopted)
        self._check_ready(lease, now)

    def on_grown(self, lease: Lease, first_page: int) -> None:
        """(SupplyEvents)"""
        grown = wire.Grown(name=lease.name.to_proto(), first_page=first_page, pages=lease.pages[first_page:])
        self._tell(lease.worker, wire.WorkerEvent(grown=grown))

    def on_short(self, lease: Lease, now: float) -> None:
        """(SupplyEvents) The youngest gives its pages back, among those whose pages the growing one may have; one at a
        time, since each brings many.
        """
        namespace = lease.hold.namespace
        mine_only = not namespace.within_hard(0)
        candidates = [
            other
            for other in self.leases.values()
            if other.hold.namespace is namespace or (not mine_only and other.hold.namespace.above_soft)
        ]
        if any(other.state is LeaseState.RETRACTING for other in candidates):
            return
        ready = [other for other in candidates if other.state is LeaseState.READY]
        youngest = max(ready, key=lambda other: other.order)  # `lease` is one
        youngest.state = LeaseState.RETRACTING
        youngest.deadline = now + self.limits.growth_seconds
        youngest.hold.promise(0, 0)
        self._tell(youngest.worker, wire.WorkerEvent(retract=wire.Retract(name=youngest.name.to_proto())))

    def _admitted(self, lease: Lease) -> wire.Admitted:
        page_size = self.store.page_size
        matched = lease.matched * page_size
        return wire.Admitted(
            name=lease.name.to_proto(),
            matched_tokens=matched,
            pages=lease.pages,
            local_tokens=matched if lease.local else 0,
            host_tokens=lease.hold.host_matched * page_size,
        )

    def _fetch(self, lease: Lease, fresh: list[int], adopted: list[int]) -> None:
        """Puts the full delta pages into the tree as arriving, asks for the delta behind what the worker itself holds,
        and for what it adopted.
        """
        for page in fresh:
            self._arrivals.expect(page, lease)
        full = len(lease.digests) // DIGEST_BYTES
        if self.shares_while_filling(lease) and full > lease.matched:
            coming = lease.pages[lease.matched : full]
            self.store.pool.move(coming, PageState.LEASED, PageState.ARRIVING)
            duplicates = self._holds.extend(lease.hold, lease.digests, coming, lease.matched, PROMPT)
            assert not duplicates, "pages behind a full match were in the tree"
            lease.tree_pages = full
        self._asks.first(lease, lease.promised, len(lease.pages) - lease.promised)
        if adopted:
            self._asks.ask_again(lease, adopted)

    def shares_while_filling(self, lease: Lease) -> bool:
        """Guard: while its worker itself is to fill some of its pages nobody else is given these, nor what is behind
        them: a worker that hangs, or is lost, may write them at any time.
        """
        return lease.keep and not lease.to_fill

    # -- ready, failed, ended ------------------------------------------------------------------------------------

    def _readable(self, lease: Lease, pages: list[int], now: float) -> None:
        """The bytes of these pages, which the lease was to bring, are there."""
        namespace = lease.hold.namespace
        namespace.tree.arrived(self.store.pool.those(pages, PageState.ARRIVING))
        namespace.arrivals += 1
        for waiter in self._arrivals.arrived(pages):
            self._check_ready(waiter, now)

    def _check_ready(self, lease: Lease, now: float) -> None:
        if lease.state is not LeaseState.FILLING or lease.missing:
            return
        lease.filled_at = lease.filled_at or now
        if lease.local:
            # Only now: had a restore failed, it would have been admitted once more with other pages.
            self._tell(lease.worker, wire.WorkerEvent(admitted=self._admitted(lease)))
        elif lease.aux is None:
            return
        lease.state = LeaseState.READY
        self._share(lease)
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
        if self.store.events is not None and lease.keep:
            ready.page_tokens_from = (
                self.store.events.wanted_from(lease.hold.namespace.id, lease.digests) * self.store.page_size
            )
        self._tell(lease.worker, wire.WorkerEvent(ready=ready))
        self._asks.complete_empty(lease)
        if not lease.local:
            self._effects.append(SendDone(lease.prefill, lease.name))

    def _share(self, lease: Lease) -> None:
        """What its worker has filled itself enters the tree once all of the prompt is there, if nothing of it has come
        there meanwhile: then its own pages stay its own to its end.
        """
        if lease.local or not lease.keep or not lease.to_fill:
            return
        if lease.hold.namespace.tree.match(lease.digests).device_pages == lease.tree_pages:
            self._keep(lease, len(lease.digests) // DIGEST_BYTES, PROMPT, lease.digests)

    def _keep(self, lease: Lease, full: int, kind: int, digests: bytes) -> None:
        """Its first `full` pages enter the tree, as far as they are not there."""
        fresh = lease.pages[lease.tree_pages : full]
        if fresh:
            duplicates = self._holds.extend(lease.hold, digests, fresh, lease.tree_pages, kind)
            self.store.release(lease.hold.namespace, duplicates)
            lease.tree_pages = full

    def _fail(self, lease: Lease, error: RequestError) -> None:
        """Tells the worker; what it may still touch is kept until it answers with Abort (or is gone)."""
        self.counters.fail(error.code)
        lease.failure = reason_of(error.code)
        self._tell(
            lease.worker, wire.WorkerEvent(failed=wire.Failed(name=lease.name.to_proto(), error=error.to_proto()))
        )
        if lease.queued:
            self._leave_queue(lease)
            del self.leases[lease.name]
            return
        unfilled = [page for page in lease.to_fill if page in lease.filling]
        self._withdraw(lease)
        lease.state = LeaseState.FAILED
        self.store.pool.move(unfilled, PageState.LEASED, PageState.ORPHANED)  # its worker may write them yet
        self._settle(lease)

    def _leave_queue(self, lease: Lease) -> None:
        """It has asked for nothing; still its prefill daemon, which may have computed it, need not wait."""
        self._supply.remove(lease)
        if not lease.local:
            self._effects.append(SendDone(lease.prefill, lease.name))

    def _withdraw(self, lease: Lease) -> None:
        """The request wants nothing more of its prefill daemon and waits for no page."""
        if lease.state is LeaseState.FILLING and not lease.local:
            self._effects.append(SendDone(lease.prefill, lease.name))
        self._arrivals.leave(lease)
        lease.taken.clear()
        self._asks.stop_all(lease, "the request ended")
        lease.hold.promise(0, 0)

    def _end(self, lease: Lease) -> None:
        """The worker touches its pages no more."""
        if lease.queued:
            self._leave_queue(lease)
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
        if lease.state is LeaseState.ENDING:
            self._holds.drop(lease.hold, lease.own)
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
