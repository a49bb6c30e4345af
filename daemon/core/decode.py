"""The decode daemon's requests: admission by promise, single flight, asking again, leases. Core: no I/O, time is passed
in.

Every public method is one step: it changes the state, then looks again at who waits for pages (level-triggered) and
leaves effects to be carried out. Pages and locks of a lease are given back only when its worker has said that it
touches them no more (or is proven gone) and no copy of its transfers runs.

With an overcommit factor above 1 less than the whole growth of a request is promised. When a request then grows and
no page can be had, the youngest one is retracted: its worker finishes it as it is and admits it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.core.decode_leases import DecodeLimits, LeaseKeeper
from kvferry.daemon.core.decode_scheduler import Growth
from kvferry.daemon.core.effects import Effect, Outbox
from kvferry.daemon.core.errors import RequestError, deadline_exceeded, exhausted, invalid, precondition
from kvferry.daemon.core.lease import Lease, LeaseState
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST, NO_BLOCKS, LeaseBlocks, Name, check_blocks, pages_for
from kvferry.daemon.core.reservations import Holds
from kvferry.daemon.core.single_flight import Arrivals
from kvferry.daemon.core.take_over import TakeOvers
from kvferry.daemon.core.transfers import Asks
from kvferry.daemon.core.way_back.returns import Returns, ReturnSteps
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_AUX_BYTES
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState

__all__ = ["DecodeCore", "DecodeLimits"]

MAX_GROWTHS = 4  # of one request, waiting for pages


class DecodeCore:
    def __init__(self, cache: Cache, limits: DecodeLimits) -> None:
        self.cache = cache
        self.limits = limits
        self._outbox = Outbox(cache)
        self._arrivals: Arrivals[Lease] = Arrivals()
        self._holds = Holds(cache, self._arrivals)
        closed = limits.closed_namespaces
        self._returns = Returns(cache, self._outbox, self._holds, lambda: self.waiting_requests, closed)
        self._asks = Asks(cache.page_size, cache.clock, self._outbox.put, self._returns.held)
        self._take_overs = TakeOvers(self._arrivals, self._asks)
        self._keeper = LeaseKeeper(cache, limits, self._outbox, self._arrivals, self._holds, self._asks, self._returns)
        self._supply = self._keeper.supply
        self.leases = self._keeper.leases
        self.counters = self._keeper.counters
        self.latencies = self._keeper.latencies
        self.pins = self._keeper.pins
        self.returns = ReturnSteps(self._returns, self.leases, self._keeper.returned, self._pump)

    # -- what the shells ask -------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        return self._outbox.take()

    def matched_tokens(self, namespace_id: bytes, digests: bytes) -> int:
        """Read-only: how much of the prompt is in the tree, arriving pages too."""
        namespace = self.cache.namespaces.get(namespace_id)
        if namespace is None or self.limits.reuse == "off":
            return 0
        return namespace.tree.match(digests).pages * self.cache.page_size

    @property
    def running(self) -> int:
        return len(self.leases) - self.waiting_requests

    @property
    def failed_requests(self) -> int:
        """The number of running requests that have failed: they wait for their worker's last word or its proven end."""
        return sum(lease.state is LeaseState.FAILED for lease in self.leases.values())

    @property
    def waiting_requests(self) -> int:
        return len(self._supply.queue)

    @property
    def reserved(self) -> int:
        """The number of running requests that wait for pages to be spilled."""
        return self._supply.reserved

    @property
    def active_transfers(self) -> int:
        return len(self._asks)

    @property
    def draining_transfers(self) -> int:
        """The number of active transfers that were ended while copies into their pages may run."""
        return self._asks.draining

    @property
    def transfer_counters(self) -> TransferCounters:
        return self._asks.counters

    @property
    def asked_again(self) -> int:
        return self._asks.asked_again

    def comes_back(self, worker: int, name: Name) -> bool:
        """Whether the request was retracted: its place is kept, and it is accepted work."""
        return self._keeper.comes_back(worker, name)

    def _pump(self, now: float) -> None:
        self.cache.clock.now = now
        self._supply.pump(now)
        while self._keeper.endings.end_ready():
            self._supply.pump(now)  # their pages are others'
        self._returns.look()
        self.cache.settle()
        self.cache.eviction.write_through()
        self.cache.eviction.write_ahead()
        self.counters.overtaken = self._supply.queue.overtaken
        self._outbox.end_step()

    # -- worker's words ------------------------------------------------------------------------------------------

    def admit(
        self,
        worker: int,
        namespace_id: bytes,
        name: Name,
        request: wire.Admit,
        deadline: float,
        now: float,
        blocks: LeaseBlocks = NO_BLOCKS,
    ) -> None:
        """Takes a checked Admit into the queue, or raises why not. `blocks`: see `block_tier`."""
        if name in self.leases:
            raise precondition(f"name {name} is already in use; a new try takes the next attempt number")
        if request.max_new_tokens < 1 or request.tokens + request.max_new_tokens > self.limits.max_tokens:
            raise invalid(
                f"max_new_tokens is {request.max_new_tokens}; with {request.tokens} prompt tokens it must be 1 to "
                f"{self.limits.max_tokens - request.tokens}"
            )
        if request.held_tokens % self.cache.page_size or request.held_tokens > request.tokens:
            raise invalid(
                f"held_tokens is {request.held_tokens}; it must be a multiple of {self.cache.page_size}, "
                f"at most the prompt's {request.tokens}"
            )
        check_blocks(request, blocks)
        namespace = self.cache.namespace(namespace_id)
        need = pages_for(request.tokens + request.max_new_tokens - 1, self.cache.page_size)
        if need > self.cache.most(namespace):
            self.counters.refused += 1
            quota = f"; its namespace may use {namespace.quota.hard}" if namespace.quota.hard else ""
            raise invalid(
                f"prompt of {request.tokens} + max_new_tokens {request.max_new_tokens} needs {need} pages; "
                f"the pool has {self.cache.pool.pages}{quota}"
            )
        comes_back = self.comes_back(worker, name)
        if self.waiting_requests >= self.limits.queue and not comes_back:
            self.counters.refused += 1
            raise exhausted(f"{self.waiting_requests} requests wait for admission; the bound is {self.limits.queue}")
        self._keeper.admit(worker, namespace, name, request, blocks, deadline, now)
        self._pump(now)

    def filled(self, worker: int, name: Name, tokens: int, now: float) -> None:
        """What the worker holds itself, and nobody is asked for, is in its pages, or has been computed in its
        blocks."""
        lease = self._keeper.lease_of(worker, name)
        if lease.state is LeaseState.FAILED or (lease.held_blocks and lease.decoding):
            return  # it crossed Failed, or Ready, on the way
        held, own = lease.held_pages * self.cache.page_size, lease.to_fill
        once = not lease.held_written and lease.filling.issuperset(own)
        if lease.state is not LeaseState.FILLING or lease.local or tokens != held or not once:
            self._keeper.fail(
                lease, invalid(f"tokens is {tokens}; a decode worker says held_tokens, {held}, once, when admitted")
            )
        else:
            lease.held_written = True
            self._keeper.readable(lease, own, now)
        self._pump(now)

    def page_tokens(self, worker: int, name: Name, first_token: int, tokens: Sequence[int], now: float) -> None:
        """Takes tokens of the prompt's full pages that were not announced when the request became ready."""
        lease = self._keeper.lease_of(worker, name)
        if lease.state is LeaseState.FAILED:
            return  # it crossed Failed on the way
        full = len(lease.digests) // DIGEST_BYTES
        error = self._wrong_page_tokens(lease, first_token, len(tokens), full)
        if error is None and (lease.local or not lease.decoding):
            error = precondition(f"page_tokens of name {name}: not ready, or its prompt is the worker's to compute")
        if error is not None:
            self._keeper.fail(lease, error)
        else:
            assert self.cache.events is not None
            first = first_token // self.cache.page_size
            self.cache.events.announce(lease.hold.namespace.id, lease.digests, first, tokens)
        self._pump(now)

    def _wrong_page_tokens(self, lease: Lease, first: int, tokens: int, full: int) -> RequestError | None:
        """The objection to these tokens of the first `full` pages; None: none."""
        if self.cache.events is None or not lease.keep:
            return precondition(f"page_tokens of name {lease.name}: Ready did not ask for them")
        end = full * self.cache.page_size
        if first % self.cache.page_size or first > end or tokens != end - first:
            return invalid(
                f"page_tokens has {tokens} tokens from first_token {first} on; they must begin at a multiple of "
                f"{self.cache.page_size} and end at {end}"
            )
        return None

    def grow(self, worker: int, name: Name, tokens: int, now: float) -> None:
        lease = self._keeper.lease_of(worker, name)
        if lease.state in (LeaseState.FAILED, LeaseState.RETRACTING):
            return  # the worker has not read what it was told yet
        extra = pages_for(tokens, self.cache.page_size) - len(lease.pages)
        if lease.state is not LeaseState.READY or extra > lease.hold.growth:
            bound = len(lease.pages) + lease.hold.growth
            self._keeper.fail(
                lease,
                invalid(f"tokens {tokens} needs {extra + len(lease.pages)} pages; the promise is {bound}, once ready"),
            )
        elif sum(growth.lease is lease for growth in self._supply.growing) >= MAX_GROWTHS:
            self._keeper.fail(lease, exhausted(f"{MAX_GROWTHS} Grow messages wait already; the bound is {MAX_GROWTHS}"))
        else:
            self._supply.growing.append(Growth(lease, tokens, now + self.limits.growth_seconds))
        self._pump(now)

    def finish(
        self,
        worker: int,
        name: Name,
        tokens: int,
        digests: bytes,
        now: float,
        continues: bool = False,
        page_tokens: wire.PageTokens | None = None,
    ) -> None:
        """Ends the request. `continues`: it was retracted and will come back (a Retract may also have crossed its last
        Finish)."""
        lease = self._keeper.lease_of(worker, name)
        if lease.state is LeaseState.FAILED:
            self.abort(worker, name, now)  # it crossed Failed on the way
            return
        page_size = self.cache.page_size
        full = tokens // page_size
        want = (full - lease.tokens // page_size) * DIGEST_BYTES
        last = min(lease.tokens + lease.max_new_tokens - 1, len(lease.pages) * page_size)
        if not lease.decoding:
            self._keeper.fail(lease, precondition(f"name {name} is not ready; only a ready request finishes"))
        elif not lease.tokens <= tokens <= last:
            self._keeper.fail(lease, invalid(f"tokens is {tokens}; it must be {lease.tokens} to {last}"))
        elif len(digests) != want:
            self._keeper.fail(lease, invalid(f"digests has {len(digests)} bytes; {tokens} tokens need {want}"))
        elif page_tokens is not None and (
            error := self._wrong_page_tokens(lease, page_tokens.first_token, len(page_tokens.tokens), full)
        ):
            self._keeper.fail(lease, error)
        else:
            if lease.state is LeaseState.RETRACTING and continues:
                self._keeper.remember_retracted(lease)
            else:
                self.counters.finished += 1
            if lease.keep:
                self._keeper.keep_all(lease, full, lease.digests + digests, page_tokens)
            self._keeper.endings.finish(lease)
        self._pump(now)

    def abort(self, worker: int, name: Name, now: float) -> None:
        """Ends the request. Idempotent: an unknown name is answered with Ended."""
        lease = self.leases.get(name)
        if lease is None:
            self._outbox.tell_ended(worker, name)
            return
        if lease.worker != worker:
            raise precondition(f"name {name} belongs to another worker")
        if lease.state is not LeaseState.FAILED and lease.state is not LeaseState.ENDING:
            self.counters.aborted += 1
        lease.acknowledge = True
        self._keeper.end(lease)
        self._pump(now)

    def worker_lost(self, worker: int, now: float) -> None:
        """The worker's stream broke: it may still write. Its pages are orphaned until `worker_gone`."""
        lost = [lease for lease in self.leases.values() if lease.worker == worker]
        for lease in lost:
            self.counters.aborted += lease.queued or lease.live
            if lease.queued:
                self._keeper.end(lease)
                continue
            if lease.live:
                self._keeper.withdraw(lease)
            if lease.state is not LeaseState.ENDING:
                lease.state = LeaseState.FAILED
            self._keeper.blocks.wait_no_more(lease)
            own = self.cache.pool.those(lease.own, PageState.LEASED)
            self.cache.pool.move(own, PageState.LEASED, PageState.ORPHANED)
        for lease in lost:
            self._keeper.settle(lease)
        self._pump(now)

    def worker_gone(self, worker: int, now: float) -> None:
        """The worker's end is proven: it writes no more."""
        for lease in [lease for lease in self.leases.values() if lease.worker == worker]:
            if lease.live or lease.queued:
                self.counters.aborted += 1
            self._keeper.end(lease)
        self._pump(now)

    def pool_leaves(self, now: float) -> None:
        """The pool's memory goes with the engine that it is of, whose requests have ended."""
        self.pins.unpin(0)
        self.cache.eviction.ahead = 0  # of the next one it is as much as was asked for
        self._pump(now)

    # -- the other daemon's words --------------------------------------------------------------------------------

    def aux(self, prefill: str, name: Name, blob: bytes, now: float) -> None:
        lease = self.leases.get(name)
        if lease is None or lease.state is not LeaseState.FILLING or lease.local or lease.prefill != prefill:
            return
        if len(blob) > MAX_AUX_BYTES:
            self._keeper.fail(lease, invalid(f"aux has {len(blob)} bytes; the bound is {MAX_AUX_BYTES}"))
        else:
            lease.aux = blob
            lease.aux_at = now
            lease.served_at = lease.served_at or now
            self._keeper.check_ready(lease, now)
        self._pump(now)

    def pages_arrived(self, transfer: int, prompt_pages: Sequence[int], now: float) -> None:
        """Verified bytes of these prompt pages, ascending, are in the transfer's pool pages."""
        moving = self._asks.get(transfer)
        if moving is None:
            return
        lease = moving.lease
        pages = self._arrivals.of(moving.pool_pages(prompt_pages))
        lease.delta_pages += len(pages)
        lease.brings, lease.quiet_since = True, now
        if prompt_pages and prompt_pages[-1] >= lease.matched:  # prompts are computed from their beginning on
            lease.served_at = lease.served_at or now
        self._keeper.readable(lease, pages, now)
        self._pump(now)

    def transfer_completed(self, transfer: int, now: float) -> None:
        """Every page of the transfer has arrived; the receiver knows it no more."""
        moving = self._asks.pop(transfer)
        if moving is not None:
            self.transfer_counters.completed += 1
            self._keeper.settle(moving.lease)
            self._pump(now)

    def transfer_broken(self, transfer: int, message: str, now: float) -> None:
        """Parts of the transfer were wrong or lost: what is missing is asked for again once no copy of it runs."""
        moving = self._asks.get(transfer)
        if moving is None or moving.draining:
            return
        moving.retry, moving.problem = True, message
        self._asks.stop(moving, "broken")
        self._pump(now)

    def transfer_failed(self, transfer: int, error: RequestError, now: float) -> None:
        """The prefill daemon will send no more of it."""
        moving = self._asks.get(transfer)
        if moving is None:
            self._prompt_failed(self._asks.given_up_by(transfer), error)
        elif moving.draining:
            moving.refusal = error
        elif moving.lease.state is not LeaseState.FILLING:
            self._asks.stop(moving, error.message)
        elif not self._take_overs.give_back(moving):
            self._keeper.fail(moving.lease, error.marked_of_prefill())
        self._pump(now)

    def _prompt_failed(self, lease: Lease | None, error: RequestError) -> None:
        """Fails a lease whose pages another brings now: its aux blob will not come."""
        if lease is not None and lease.state is LeaseState.FILLING and lease.aux is None:
            self._keeper.fail(lease, error.marked_of_prefill())

    def transfer_drained(self, transfer: int, now: float) -> None:
        """Called after StopTransfer: no copy into the transfer's pages runs, and none will."""
        moving = self._asks.pop(transfer)
        if moving is None:
            return
        assert moving.draining, f"transfer {transfer} drained before it was stopped"
        lease = moving.lease
        if moving.taker is not None and lease.state is LeaseState.FILLING:
            self.transfer_counters.abort("taken_over")
            if error := self._take_overs.drained(moving):
                self._keeper.fail(lease, error.marked_of_prefill())
        elif moving.retry and lease.state is LeaseState.FILLING:
            self.transfer_counters.fail("wrong_parts")
            still = [page for page in moving.page_ids if page in lease.filling]
            if lease.asks >= MAX_ASKS_PER_REQUEST:
                bound = f"pages were asked for {lease.asks} times; the bound is {MAX_ASKS_PER_REQUEST}"
                self._keeper.fail(lease, exhausted(f"{bound}; at last: {moving.problem}"))
            elif still:
                self._asks.ask_again(lease, still)
        else:
            self.transfer_counters.abort(lease.failure or "request_ended")
        self._keeper.settle(lease)
        self._pump(now)

    def prefill_down(self, prefill: str, error: RequestError, now: float) -> None:
        """No session to that daemon: its requests fail, what arrived stays."""
        for lease in list(self.leases.values()):
            if lease.prefill == prefill and lease.state is LeaseState.FILLING:
                self._keeper.fail(lease, error.marked_of_prefill())
        self._pump(now)

    def copy_ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float, now: float) -> None:
        """A copy between the tiers is over; `failed` are the device ids of pages whose bytes are not right."""
        self._keeper.copy_ended(number, failed, mismatched, seconds, now)
        self._pump(now)

    def stood_still(self, seconds: float, now: float) -> None:
        """This daemon stood still for so long, and has not read what came meanwhile: by that alone nobody is late."""
        for lease in self.leases.values():
            lease.quiet_since = min(lease.quiet_since + seconds, now)
            if lease.served_at is not None:
                lease.served_at = min(lease.served_at + seconds, now)
            if lease.state is LeaseState.RETRACTING:
                lease.deadline += seconds
        for growth in self._supply.growing:
            growth.deadline += seconds

    def tick(self, now: float) -> None:
        self.pins.expire(now)
        self._keeper.endings.end_late()
        self._take_overs.look(self.leases.values(), now)
        for lease in list(self.leases.values()):
            deadline = lease.deadline
            if lease.queued and not lease.resumed:
                deadline = min(deadline, lease.waiting_since + self.limits.admission_seconds)
            if deadline <= now and (lease.queued or lease.state is LeaseState.FILLING):
                waited = now - lease.arrived_at
                what = "admission" if lease.queued else f"{len(lease.missing)} pages or the aux blob"
                self._keeper.fail(lease, deadline_exceeded(f"waited {waited:.3f} s for {what}; the deadline is passed"))
        for lease in [lease for lease in self.leases.values() if lease.state is LeaseState.RETRACTING]:
            if lease.deadline <= now:
                self._keeper.fail(lease, deadline_exceeded("no Finish came after Retract; the deadline is passed"))
        for growth in [growth for growth in self._supply.growing if growth.deadline <= now]:
            lease = growth.lease
            if lease.state is LeaseState.READY:
                self._keeper.fail(
                    lease,
                    exhausted(
                        f"tokens {growth.tokens} need more than the {len(lease.pages)} pages held; waited "
                        f"{self.limits.growth_seconds:g} s, and none could be had"
                    ),
                )
        self._pump(now)
