"""KV events of the decode core under the random workers and failures of its model: whoever reads them from the start
knows exactly what is readable on the host, and of the device nothing that is not there.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from kvferry.daemon.core.effects import ToWorker
from kvferry.daemon.core.kv_events import Cleared, Removed, Stored
from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PagePool, PageState
from tests.daemon.core.decode_machine import CoreMachine
from tests.daemon.core.decode_world import PAGE


def tokens_of(digests: list[bytes]) -> list[int]:
    """Made up, and told apart by page."""
    return [int.from_bytes(digest[:3], "big") + i for digest in digests for i in range(PAGE)]


class EventMachine(CoreMachine):
    """Every worker sends tokens when it is asked to, at once; what it finishes with is sent with Finish."""

    def __init__(self) -> None:
        super().__init__()
        self.device: set[bytes] = set()
        self.host: set[bytes] = set()
        self.wanted: dict[Name, int] = {}  # of requests that are ready: the first page whose tokens are wanted
        self.stored = 0

    def hear(self, effect: ToWorker) -> None:
        super().hear(effect)
        if effect.event.WhichOneof("kind") != "ready":
            return
        ready = effect.event.ready
        name = Name(ready.name.request_id, ready.name.attempt)
        if name not in self.ready:
            return
        assert ready.HasField("page_tokens_from") == self.core.leases[name].keep
        if ready.HasField("page_tokens_from"):
            self.wanted[name] = ready.page_tokens_from // PAGE
            assert ready.page_tokens_from % PAGE == 0

    def run_effects(self) -> None:
        super().run_effects()
        for name in sorted(self.ready):
            lease = self.core.leases.get(name)
            first = self.wanted.get(name)
            if lease is None or first is None or lease.local or not lease.decoding:
                continue
            digests, _, _ = self.prompts[name]
            self.wanted[name] = len(digests)
            self.core.page_tokens(lease.worker, name, first * PAGE, tokens_of(digests[first:]), self.now)
        super().run_effects()  # those words are a step, too
        self.read()

    def end(self, name: Name, output: int) -> int:
        core_finish = self.core.finish

        def finish(worker: int, name: Name, tokens: int, digests: bytes, now: float, continues: bool = False) -> None:
            told = None
            if (first := self.wanted.pop(name, None)) is not None:
                whole = self.core.leases[name].digests + digests
                path = [whole[at : at + 32] for at in range(first * 32, len(whole), 32)]
                told = wire.PageTokens(first_token=first * PAGE, tokens=tokens_of(path))
            core_finish(worker, name, tokens, digests, now, continues, told)

        self.core.finish = finish  # type: ignore[method-assign]
        try:
            return super().end(name, output)
        finally:
            self.core.finish = core_finish  # type: ignore[method-assign]

    def read(self) -> None:
        """As a router does, from the events alone."""
        assert self.core.cache.events is not None
        for event in self.core.cache.events.take():
            if isinstance(event, Cleared):
                assert not self.device and not self.host
                continue
            held = self.device if event.medium == "GPU" else self.host
            if isinstance(event, Removed):
                assert held.issuperset(event.digests), "removed what was not stored"
                held.difference_update(event.digests)
                continue
            assert isinstance(event, Stored)
            assert held.isdisjoint(event.digests) and len(set(event.digests)) == len(event.digests), "stored twice"
            held.update(event.digests)
            if event.medium == "CPU":
                assert not event.tokens
                continue
            assert event.parent is None or event.parent in self.device, "a page whose parent is not known"
            assert list(event.tokens) == tokens_of(list(event.digests)), "tokens of another page"
            self.stored += len(event.digests)

    def readable(self, pool: PagePool, content: dict[int, bytes], other: PageState) -> set[bytes]:
        states = (PageState.CACHED, other)
        return {content[page] for page in range(pool.pages) if pool.state(page) in states}

    @invariant()
    def events_tell_the_truth(self) -> None:
        cache = self.core.cache
        if cache.events is None:  # nothing has happened yet
            assert cache.pool.free == cache.pool.pages
            cache.log_events()
        self.read()
        assert self.device <= self.readable(cache.pool, self.content, PageState.SPILLING)
        if cache.host is not None:
            assert self.host == self.readable(cache.host, self.host_content, PageState.RESTORING)
        for name in self.able():
            lease = self.core.leases[name]
            if lease.keep and not lease.local:
                digests, _, _ = self.prompts[name]
                assert self.device.issuperset(digests), "a ready prompt was not announced"

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "core"):
            self.read()
            assert not self.device and not self.host, "the cache is empty and the events do not say so"


TestKvEvents = EventMachine.TestCase
TestKvEvents.settings = settings(
    max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
