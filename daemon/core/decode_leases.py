"""The decode daemon's leases: how one is made, becomes ready, fails and ends. Core: no I/O, time is passed in.

Pages and locks of a lease are given back only when its worker has said that it touches them no more (or is proven gone)
and no copy of its transfers runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.daemon.core.admission_queue import OVERTAKES
from kvferry.daemon.core.blocks.block_tier import BlockCopy, BlockTier
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import Latencies, RequestCounters, reason_of
from kvferry.daemon.core.decode_scheduler import Supply
from kvferry.daemon.core.effects import BindPages, Outbox, SendDone
from kvferry.daemon.core.endings import Endings
from kvferry.daemon.core.errors import RequestError, aborted, exhausted, precondition
from kvferry.daemon.core.lease import Lease, LeaseState
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST, LeaseBlocks, Name, hands_in, pages_for
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.pins import Pins
from kvferry.daemon.core.reservations import Hold, Holds
from kvferry.daemon.core.single_flight import Arrivals
from kvferry.daemon.core.transfers import Asks
from kvferry.daemon.core.way_back.returns import Returns
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState
from kvferry.radix.tree import OUTPUT, PROMPT, RESTORE

MAX_RETRACTED = 4096  # retracted requests that keep their place in the queue until they come back


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
    closed_namespaces: frozenset[bytes] = frozenset()  # of which look-ups of prefill daemons are told nothing


class LeaseKeeper:
    """All leases by name; the events of their supply come here."""

    def __init__(
        self,
        cache: Cache,
        limits: DecodeLimits,
        outbox: Outbox,
        arrivals: Arrivals[Lease],
        holds: Holds,
        asks: Asks,
        returns: Returns,
    ) -> None:
        self.leases: dict[Name, Lease] = {}
        self.counters = RequestCounters()
        self.latencies = Latencies()
        self.supply = Supply(cache, holds, limits.overtakes, self)
        self._cache = cache
        self._limits = limits
        self._outbox = outbox
        self._arrivals = arrivals
        self._holds = holds
        self._asks = asks
        self._returns = returns
        self.pins = Pins(cache, holds)
        self.blocks = cache.stores = BlockTier(cache, self.leases)
        self.endings = Endings(self.blocks, self.counters, self.end)
        self._retracted: OrderedDict[Name, tuple[int, int]] = OrderedDict()  # to their worker and order
        self._next_order = 1

    # -- admitted -----------------------------------------------------------------------------------------------

    def admit(
        self,
        worker: int,
        namespace: Namespace,
        name: Name,
        request: wire.Admit,
        blocks: LeaseBlocks,
        deadline: float,
        now: float,
    ) -> None:
        """A lease of a checked Admit, which waits from now on."""
        need = pages_for(request.tokens + request.max_new_tokens - 1, self._cache.page_size)
        prompt = pages_for(request.tokens, self._cache.page_size)
        order = self._retracted.pop(name)[1] if self.comes_back(worker, name) else None
        reuse = self._limits.reuse == "on" and not request.warmup
        given = hands_in(request)
        lease = Lease(
            name=name,
            worker=worker,
            hold=Hold(
                namespace,
                digests=self._matchable(request) if reuse else b"",
                wanted=prompt,
                growth=need - prompt,
                priority=request.priority,
                readable_only=request.prefill == "",
                overcommit=self._limits.overcommit if order is None else 1.0,
            ),
            digests=request.digests,
            tokens=request.tokens,
            tail_digest=request.tail_digest,
            prefill=request.prefill,
            max_new_tokens=request.max_new_tokens,
            arrived_at=now,
            waiting_since=now,
            deadline=deadline,
            order=self._next_order if order is None else order,
            keep=reuse and not blocks.own,
            held_pages=request.held_tokens // self._cache.page_size,
            blocks=blocks.own,
            held_blocks=blocks.held,
            stores=bool(blocks.own) and given,
            ends_itself=request.ends_itself,
            resumed=order is not None,
            looked_up=order is not None or given,  # what is handed in says nothing about what was found
        )
        self.blocks.claim(lease)
        self._next_order += 1
        self.leases[name] = lease
        self.supply.queue.push(lease)

    def _matchable(self, request: wire.Admit) -> bytes:
        if request.prefill or hands_in(request):
            return request.digests
        # At least one token is left to compute, for its logits.
        return request.digests[: (request.tokens - 1) // self._cache.page_size * DIGEST_BYTES]

    def comes_back(self, worker: int, name: Name) -> bool:
        """Whether the request was retracted: its place is kept, and it is accepted work."""
        return self._retracted.get(name, (None, 0))[0] == worker

    def remember_retracted(self, lease: Lease) -> None:
        """Keeps the lease's place until it comes back."""
        self.counters.retracted += 1
        self._retracted[lease.name] = (lease.worker, lease.order)
        while len(self._retracted) > MAX_RETRACTED:
            self._retracted.popitem(last=False)

    # -- pages ---------------------------------------------------------------------------------------------------

    def on_claimed(self, lease: Lease, fresh: list[int], now: float) -> None:
        """(SupplyEvents)"""
        hold = lease.hold
        lease.state = LeaseState.FILLING
        if lease.blocks:
            fresh, adopted = self._fill_blocks(lease), []
        else:
            lease.tree_pages = hold.matched
            path = lease.pages[: hold.matched]
            coming = self._cache.pool.those(path, PageState.RESTORING)
            self._arrivals.restoring(page for page in coming if page not in self._arrivals)
            adopted = [p for p in path if p in self._arrivals and self._arrivals.follow(p, lease)]
        if not lease.looked_up:
            hit, host = hold.matched * self._cache.page_size, hold.host_matched * self._cache.page_size
            self.counters.lookup(lease.tokens, hit, host)
            hold.namespace.looked_up(lease.tokens, hit, host)
            self.counters.saved_pages += hold.matched
            lease.looked_up = True
        if not lease.local:
            self._outbox.tell(lease.worker, wire.WorkerEvent(admitted=self._admitted(lease)))
            self._fetch(lease, fresh, adopted)
        self.check_ready(lease, now)

    def _fill_blocks(self, lease: Lease) -> list[int]:
        """Has what is held of the prompt, and its engine lacks, copied into its blocks. Returns the pages that prefill
        is to be asked for."""
        self._outbox.put(BindPages(tuple(lease.pages), lease.bound_blocks))
        loading = self.blocks.load(lease)
        self._arrivals.restoring(loading)
        for page in loading:
            self._arrivals.follow(page, lease)
        return lease.pages[lease.promised :]

    def on_grown(self, lease: Lease, first_page: int) -> None:
        """(SupplyEvents)"""
        grown = wire.Grown(name=lease.name.to_proto(), first_page=first_page, pages=lease.pages[first_page:])
        self._outbox.tell(lease.worker, wire.WorkerEvent(grown=grown))

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
        youngest.deadline = now + self._limits.growth_seconds
        youngest.hold.promise(0, 0)
        self._outbox.tell(youngest.worker, wire.WorkerEvent(retract=wire.Retract(name=youngest.name.to_proto())))

    def _admitted(self, lease: Lease) -> wire.Admitted:
        page_size = self._cache.page_size
        matched = lease.matched * page_size
        return wire.Admitted(
            name=lease.name.to_proto(),
            matched_tokens=matched,
            pages=() if lease.blocks else lease.pages,
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
            self._cache.pool.move(coming, PageState.LEASED, PageState.ARRIVING)
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

    # -- copies between the tiers --------------------------------------------------------------------------------

    def copy_ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float, now: float) -> None:
        """A copy between the tiers is over; `failed` are the device ids of pages whose bytes are not right."""
        copy = self.blocks.ended(number, failed, mismatched, seconds)
        if copy is None:
            ended = self._cache.copies.ended(number, failed, mismatched, seconds)
            self._holds.removed(ended.namespace, ended.removed)  # held by nobody: nobody waits for them either
            self._restored(ended.namespace, ended.readable, ended.lost, now)
        else:
            if copy.kind == RESTORE:
                self._loaded(copy, failed, now)
            self.settle(copy.lease)
        for lease in self.blocks.store_waiting():
            self.settle(lease)

    def _loaded(self, copy: BlockCopy, failed: Sequence[int], now: float) -> None:
        wrong = set(failed)
        if wrong:
            first = next(i for i, page in enumerate(copy.device) if page in wrong)
            self.blocks.forget_wrong(copy.lease, copy.first + first)
        readable = [page for page in copy.device if page not in wrong]
        self._restored(copy.lease.hold.namespace, readable, list(failed), now)

    def _restored(self, namespace: Namespace, readable: list[int], lost: list[int], now: float) -> None:
        """Pages came back from the host tier; the bytes of `lost` are not right."""
        waiters = self._arrivals.arrived(readable)
        heirs, stranded = self._arrivals.lost(lost)
        if lost:
            self.pins.shorten(namespace)
        for heir, pages in heirs.items():
            if heir.asks >= MAX_ASKS_PER_REQUEST:
                self.fail(
                    heir, exhausted(f"pages were asked for {heir.asks} times; the bound is {MAX_ASKS_PER_REQUEST}")
                )
            else:
                self._asks.ask_again(heir, pages)
        for lease in stranded:
            # Nothing of it was told to its worker yet: it is admitted once more, with what is readable then.
            self._holds.drop(lease.hold, lease.own)
            lease.state, lease.tree_pages, lease.waiting_since = LeaseState.WAITING, 0, now
            self.supply.queue.push(lease)
        for waiter in waiters:
            self.check_ready(waiter, now)

    # -- ready, failed, ended ------------------------------------------------------------------------------------

    def readable(self, lease: Lease, pages: list[int], now: float) -> None:
        """The bytes of these pages, which the lease was to bring, are there."""
        namespace = lease.hold.namespace
        namespace.tree.arrived(self._cache.pool.those(pages, PageState.ARRIVING))
        namespace.arrivals += 1
        for waiter in self._arrivals.arrived(pages):
            self.check_ready(waiter, now)

    def check_ready(self, lease: Lease, now: float) -> None:
        if lease.state is not LeaseState.FILLING or lease.missing:
            return
        lease.filled_at = lease.filled_at or now
        if lease.local:
            # Only now: had a restore failed, it would have been admitted once more with other pages.
            self._outbox.tell(lease.worker, wire.WorkerEvent(admitted=self._admitted(lease)))
        elif lease.aux is None:
            return
        if lease.blocks and lease.returns:  # its engine may write them once it is told
            self._returns.end_all(lease, aborted("the decode daemon's request has all of its prompt"))
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
            delta_bytes=lease.delta_pages * self._limits.page_bytes,
            elapsed_us=int(elapsed * 1e6),
        )
        if self._cache.events is not None and lease.keep:
            ready.page_tokens_from = (
                self._cache.events.wanted_from(lease.hold.namespace.id, lease.digests) * self._cache.page_size
            )
        self._outbox.tell(lease.worker, wire.WorkerEvent(ready=ready))
        self._asks.complete_empty(lease)
        if not lease.local:
            self._outbox.put(SendDone(lease.prefill, lease.name))
        self.endings.add(lease)

    def _share(self, lease: Lease) -> None:
        """Moves what the lease's worker has filled itself into the tree once all of the prompt is there, if nothing of
        it has come there meanwhile: then its own pages stay its own to its end.
        """
        if lease.local or not lease.keep or not lease.to_fill:
            return
        if lease.hold.namespace.tree.match(lease.digests).device_pages == lease.tree_pages:
            self._keep(lease, len(lease.digests) // DIGEST_BYTES, PROMPT, lease.digests)

    def keep_all(self, lease: Lease, full: int, digests: bytes, page_tokens: wire.PageTokens | None) -> None:
        """All `full` pages of prompt and output enter the tree, which `digests` names; `page_tokens` are announced."""
        page_size, events = self._cache.page_size, self._cache.events
        self._keep(lease, lease.tokens // page_size, PROMPT, lease.digests)
        self._keep(lease, full, OUTPUT, digests)
        if page_tokens is not None and events is not None:
            events.announce(lease.hold.namespace.id, digests, page_tokens.first_token // page_size, page_tokens.tokens)

    def _keep(self, lease: Lease, full: int, kind: int, digests: bytes) -> None:
        """Moves the lease's first `full` pages into the tree, as far as they are not there."""
        fresh = lease.pages[lease.tree_pages : full]
        if fresh:
            duplicates = self._holds.extend(lease.hold, digests, fresh, lease.tree_pages, kind)
            self._cache.release(lease.hold.namespace, duplicates)
            lease.tree_pages = full

    def fail(self, lease: Lease, error: RequestError) -> None:
        """Tells the worker; what it may still touch is kept until it answers with Abort (or is gone)."""
        self.counters.fail(error.code)
        lease.failure = reason_of(error.code)
        self._outbox.tell(
            lease.worker, wire.WorkerEvent(failed=wire.Failed(name=lease.name.to_proto(), error=error.to_proto()))
        )
        if lease.queued:
            self._leave_queue(lease)
            self._remove(lease)
            return
        unfilled = [page for page in lease.to_fill if page in lease.filling]
        self.withdraw(lease)
        lease.state = LeaseState.FAILED
        self._cache.pool.move(unfilled, PageState.LEASED, PageState.ORPHANED)  # its worker may write them yet
        self.settle(lease)

    def _leave_queue(self, lease: Lease) -> None:
        """Takes the lease out of the queue. It has asked for nothing; still its prefill daemon, which may have computed
        it, need not wait."""
        self.supply.remove(lease)
        if not lease.local:
            self._outbox.put(SendDone(lease.prefill, lease.name))

    def withdraw(self, lease: Lease) -> None:
        """The request wants nothing more of its prefill daemon and waits for no page."""
        if lease.state is LeaseState.FILLING and not lease.local:
            self._outbox.put(SendDone(lease.prefill, lease.name))
        self._arrivals.leave(lease)
        lease.taken.clear()
        self._asks.stop_all(lease, "the request ended")
        self._returns.end_all(lease, aborted("the decode daemon's request has ended"))
        lease.hold.promise(0, 0)

    def end(self, lease: Lease) -> None:
        """The worker touches its pages no more."""
        if lease.queued:
            self._leave_queue(lease)
            self._forget(lease)
            return
        if lease.state is LeaseState.ENDING:
            self.blocks.wait_no_more(lease)
        if lease.live:
            self.withdraw(lease)
        lease.state = LeaseState.ENDING
        self.settle(lease)

    def settle(self, lease: Lease) -> None:
        """Settles the lease once no copy of its pages runs: others take over what it was to bring, and if its worker is
        done its pages go.
        """
        if lease.live or lease.transfers or lease.copies or lease.store_waits or lease.returns:
            return
        filled = bool(lease.filling)
        for heir, pages in self._arrivals.hand_over(lease).items():
            self._asks.ask_again(heir, pages)
        if filled:
            self.pins.shorten(lease.hold.namespace)  # it brought in a failed restore's place what they hold
        if lease.state is LeaseState.ENDING:
            self._holds.drop(lease.hold, lease.own)
            self._forget(lease)

    def returned(self, lease: Lease, now: float) -> None:
        """A send of its pages back is over: it may have been what the lease waited for."""
        self.settle(lease)
        self.check_ready(lease, now)

    def _remove(self, lease: Lease) -> None:
        del self.leases[lease.name]
        self.blocks.give_back(lease)

    def _forget(self, lease: Lease) -> None:
        self._remove(lease)
        if lease.acknowledge:
            self._outbox.tell_ended(lease.worker, lease.name)

    def lease_of(self, worker: int, name: Name) -> Lease:
        lease = self.leases.get(name)
        if lease is None or lease.state is LeaseState.ENDING:
            raise precondition(f"name {name} is not a running request")
        if lease.worker != worker:
            raise precondition(f"name {name} belongs to another worker")
        return lease
