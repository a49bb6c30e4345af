"""What is expected of the way in which a side answers a worker's message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from tests.simulation.clients.published import READABLE, Published
from tests.simulation.clock import expect
from tests.simulation.prompts import PAGE

if TYPE_CHECKING:
    from kvferry.daemon.core.effects import StartFetch
    from kvferry.daemon.core.lease import Lease
    from kvferry.daemon.sides.workers import Worker
    from tests.simulation.daemons import SimDecode, SimPrefill
    from tests.simulation.workers import Process

Handle = Callable[[wire.WorkerMessage], None]


def admit(side: SimDecode, worker: Worker, message: wire.WorkerMessage, handle: Handle) -> None:
    """A daemon that drains takes nothing but what it had retracted."""
    if not side.draining:
        handle(message)
        return
    core, said = side.ready_core, message.admit.name
    name = Name(said.request_id, said.attempt)
    returns = core.comes_back(worker.number, name)
    handle(message)
    expect(returns or name not in core.leases, f"{name} is admitted by {side.config.name}, which drains")
    side.clock.counts["requests that came back to a daemon that drains" if returns else "requests not taken"] += 1


def begin(side: SimPrefill, message: wire.WorkerMessage, handle: Handle) -> None:
    handle(message)
    if side.draining:
        said = message.begin.name
        entry = side.ready_core.entries.get(Name(said.request_id, said.attempt))
        expect(entry is None or entry.prompt is None, f"a prompt is begun by {side.config.name}, which drains")
        side.clock.counts["prompts not taken"] += 1


def fetch(side: SimPrefill, effect: StartFetch) -> None:
    """Nothing is fetched for who computes elsewhere."""
    said = effect.ask.name
    name = Name(said.request_id, said.attempt)
    entry = side.ready_core.entries.get(name)
    if entry is None or entry.prompt is None:
        return  # it ended while pages were cleared before this; the fetch's stop stands behind it
    prompt = entry.prompt
    worker = side.workers.here.get(prompt.worker)
    job = None if worker is None else cast("Process", worker.events).jobs.get(name)
    expect(job is None or job.fetchable, f"{side.config.name} fetches for {name}, whose worker does not wait for that")


def tokens(side: SimDecode, published: Published, message: wire.WorkerMessage, handle: Handle) -> None:
    """PageTokens and Finish: what was told is published from then on."""
    finish = message.WhichOneof("kind") == "finish"
    body = message.finish if finish else message.page_tokens
    told = message.finish.page_tokens if finish else message.page_tokens
    lease = side.ready_core.leases.get(Name(body.name.request_id, body.name.attempt))
    if lease is None or lease.state not in (LeaseState.READY, LeaseState.RETRACTING) or not _follows(side, lease, told):
        handle(message)
        return
    pages, generations = list(lease.pages), side.pages_memory.generations(lease.pages)
    digests = lease.digests + (message.finish.digests if finish else b"")
    full = (told.first_token + len(told.tokens)) // PAGE
    handle(message)
    published.check_announced(lease.name, told.first_token // PAGE, pages, generations, digests[: full * DIGEST_BYTES])


def _follows(side: SimDecode, lease: Lease, told: wire.PageTokens) -> bool:
    """Whether what is told follows a page of the tree, whose tokens Ready did not ask for."""
    before = told.first_token // PAGE - 1
    return before < 0 or side.cache.pool.state(lease.pages[before]) in READABLE
