"""A decode core with its pages' contents on the device and on the host, and what workers and the shell know of it."""

from __future__ import annotations

import hashlib
from collections import deque

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import (
    Effect,
    ForgetRows,
    SendDone,
    StartCopy,
    StartTransfer,
    StopTransfer,
    ToWorker,
    ZeroPages,
)
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE

PAGE = 4
PAGES = 14
CLEAN, STALE = b"", b"of somebody else"
NAMESPACES = (bytes(32), b"t" * 32)


class DecodeWorld(RuleBasedStateMachine):
    """Carries the core's effects out, and does what workers, prefill daemons and copies do, checking it on the spot."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.prompts: dict[Name, tuple[list[bytes], bytes, int]] = {}  # full digests, tail digest, tokens
        self.content: dict[int, bytes] = {}  # page -> digest of what was copied to it
        self.local: set[Name] = set()
        self.unfilled: set[Name] = set()  # their workers hold pages themselves that they have not filled in the pool
        self.transfers: dict[int, tuple[Name, int, tuple[int, ...]]] = {}
        self.stopping: list[int] = []
        self.arrived: dict[int, int] = {}
        self.ready: dict[Name, list[int]] = {}
        self.pages: dict[Name, list[int]] = {}
        self.answered: set[Name] = set()  # Failed was sent, Abort is owed
        self.over: set[Name] = set()
        self.workers = {1, 2}
        self.orphaned: set[int] = set()
        self.copies: list[CopyStarted] = []
        self.host_content: dict[int, bytes] = {}
        self.growing: set[Name] = set()
        self.retracting: set[Name] = set()
        self.comes_back: dict[Name, tuple[int, bytes, int]] = {}  # retracted -> worker, namespace, new tokens left
        self.namespace_of: dict[Name, bytes] = {}
        self.effects: deque[Effect] = deque()  # that wait until pages are cleared
        self.zeroing: tuple[int, ...] = ()
        self.let_go: set[Name] = set()  # the worker has said its last word of it
        self.writable: dict[Name, list[int]] = {}  # that its worker was told to fill itself and has not let go of

    @initialize(
        host=st.sampled_from([0, 6, 40]),
        overcommit=st.sampled_from([1.0, 8.0]),
        policy=st.sampled_from(["lru", "lfu", "fifo", "priority"]),
        through=st.sampled_from([0, 0, 2]),
        ahead=st.sampled_from([0.0, 0.0, 0.4]),
        quota=st.sampled_from([Quota(), Quota(), Quota(5, 0), Quota(4, 12, 2, 10)]),
        output_first=st.booleans(),
        zeroes=st.sampled_from(["off", "freed", "also at first"]),
    )
    def configure(
        self,
        host: int,
        overcommit: float,
        policy: str,
        through: int,
        ahead: float,
        quota: Quota,
        output_first: bool,
        zeroes: str,
    ) -> None:
        limits = CacheLimits(
            policy=policy,
            evict_output_first=output_first,
            write_through_hits=through,
            write_ahead=ahead,
            zero_freed=zeroes != "off",
            used_before=zeroes == "also at first",
            quotas={NAMESPACES[1]: quota},
        )
        if limits.used_before:
            self.content = dict.fromkeys(range(PAGES), STALE)
        self.overcommit = overcommit
        self.core = DecodeCore(
            Cache(PAGES, PAGE, host_pages=host, limits=limits),
            DecodeLimits(
                max_tokens=200, page_bytes=64, admission_seconds=40.0, queue=8, overtakes=2, overcommit=overcommit
            ),
        )

    # -- effects -------------------------------------------------------------------------------------------------------

    def run_effects(self) -> None:
        """As a shell does: while pages are cleared, all that follows waits."""
        self.effects += self.core.take_effects()
        while self.effects and not self.zeroing:
            self.run_effect(self.effects.popleft())
            self.effects += self.core.take_effects()

    def run_effect(self, effect: Effect) -> None:
        if isinstance(effect, ZeroPages):
            assert self.core.cache.limits.zero_freed
            self.zeroing = effect.pages
        elif isinstance(effect, StartTransfer):
            name = Name(effect.ask.name.request_id, effect.ask.name.attempt)
            assert effect.ask.first_page * PAGE >= 0
            lease = self.core.leases.get(name)
            if lease is not None:
                assert effect.ask.promised_tokens == max(lease.matched, lease.held_pages) * PAGE
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
        elif isinstance(effect, StartCopy):
            self.copies.append(effect.started)
        elif isinstance(effect, ForgetRows):
            for row in effect.rows:
                self.host_content.pop(row, None)
        else:
            assert isinstance(effect, SendDone)

    def assert_clean(self, pages: list[int]) -> None:
        if self.core.cache.limits.zero_freed:
            assert all(self.content.get(page, CLEAN) == CLEAN for page in pages), "a worker sees what others left"

    def hear(self, effect: ToWorker) -> None:
        kind = effect.event.WhichOneof("kind")
        message = getattr(effect.event, kind)
        name = Name(message.name.request_id, message.name.attempt)
        if name in self.let_go and kind != "ended":
            return  # it crossed the worker's last word
        if kind == "retract":
            assert self.overcommit > 1, "taken back although everything was promised"
            self.retracting.add(name)
            self.growing.discard(name)
        elif kind == "admitted":
            self.pages[name] = list(message.pages)
            self.assert_clean(message.pages[message.matched_tokens // PAGE :])
            if name in self.local:
                # The worker computes what it lacks; the bytes follow from the digests.
                digests, tail, _ = self.prompts[name]
                want = [*digests, tail] if tail else digests
                for index in range(message.local_tokens // PAGE, len(want)):
                    self.content[message.pages[index]] = want[index]
            elif self.core.leases[name].held_pages * PAGE > message.matched_tokens:
                self.unfilled.add(name)
                held = self.core.leases[name].held_pages
                self.writable[name] = message.pages[message.matched_tokens // PAGE : held]
        elif kind == "ready":
            assert name not in self.unfilled, "ready before the worker had filled its own pages"
            digests, tail, _ = self.prompts[name]
            want = [*digests, tail] if tail else digests
            assert [self.content.get(p) for p in self.pages[name]] == want, "a wrong byte would be read"
            self.ready[name] = self.pages[name]
        elif kind == "grown":
            assert message.first_page == len(self.ready[name])
            self.assert_clean(message.pages)
            self.ready[name] += message.pages
            for page in message.pages:
                self.content[page] = b"output of " + str(name).encode()
            self.growing.discard(name)
        elif kind == "failed":
            self.answered.add(name)
            self.forget(name)
        elif kind == "ended":
            self.over.add(name)
            self.answered.discard(name)

    # -- what workers know ---------------------------------------------------------------------------------------------

    def forget(self, name: Name) -> None:
        self.ready.pop(name, None)
        self.growing.discard(name)
        self.retracting.discard(name)
        self.unfilled.discard(name)

    def last_word(self, name: Name) -> None:
        """Its worker touches none of its pages from here on."""
        self.forget(name)
        self.let_go.add(name)
        self.writable.pop(name, None)

    def hears_no_more(self, worker: int) -> None:
        self.effects += self.core.take_effects()
        self.effects = deque(e for e in self.effects if not isinstance(e, ToWorker) or e.worker != worker)

    def names(self, worker: int | None = None) -> list[Name]:
        leases = self.core.leases.values()
        return [lease.name for lease in leases if worker is None or lease.worker == worker]

    def able(self) -> list[Name]:
        """Requests that decode and whose worker is there."""
        return sorted(name for name in self.ready if self.core.leases[name].worker in self.workers)

    def unfilled_there(self) -> list[Name]:
        return sorted(name for name in self.unfilled if self.core.leases[name].worker in self.workers)

    def output_digests(self, name: Name, digests: list[bytes], full: int) -> list[bytes]:
        behind: list[bytes] = []
        parent = digests[-1] if digests else b""
        for _ in range(len(digests), full):
            parent = hashlib.sha256(parent + str(name).encode()).digest()
            behind.append(parent)
        return behind

    # -- what workers, prefill daemons and copies do -------------------------------------------------------------------

    def end_copy(self, number: int, failed: list[int]) -> None:
        started = self.copies.pop(number)
        copy = started.copy
        states = set(self.core.cache.pool.states(copy.device))
        wanted = PageState.RESTORING if copy.kind == RESTORE else PageState.SPILLING
        assert states == {wanted}, "a page was reused while a copy runs"
        for page, row in zip(copy.device, copy.host, strict=True):
            source, target = (
                (self.host_content, self.content) if copy.kind == RESTORE else (self.content, self.host_content)
            )
            came_from, goes_to = (row, page) if copy.kind == RESTORE else (page, row)
            target[goes_to] = b"garbage" if page in failed else source[came_from]
        self.core.copy_ended(started.number, failed, 0, 0.001, self.now)
        self.run_effects()

    def arrive(self, transfer: int, name: Name, first: int, pages: tuple[int, ...], upto: int) -> None:
        done = self.arrived[transfer]
        digests, tail, _ = self.prompts[name]
        whole = [*digests, tail] if tail else digests
        indexes = list(range(first + done, first + upto))
        for index in indexes:
            # A copy may run although the transfer was stopped: it must not hit a page that was given to someone else.
            assert self.core.cache.pool.state(pages[index - first]) in (
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

    def fill_own(self, name: Name) -> None:
        """What the worker holds itself goes into the pool's pages."""
        lease = self.core.leases[name]
        if lease.state is not LeaseState.FILLING or lease.worker not in self.workers:
            return
        self.unfilled.discard(name)
        del self.writable[name]
        digests, _, _ = self.prompts[name]
        for index in range(lease.matched, lease.held_pages):
            assert self.core.cache.pool.state(lease.pages[index]) in (PageState.LEASED, PageState.ARRIVING)
            self.content[lease.pages[index]] = digests[index]
        self.core.filled(lease.worker, name, lease.held_pages * PAGE, self.now)
        self.run_effects()

    def end(self, name: Name, output: int) -> int:
        """Finish with what fits into its pages; returns the tokens."""
        lease = self.core.leases[name]
        total = min(lease.tokens + min(output, lease.max_new_tokens) - 1, len(self.ready[name]) * PAGE)
        digests, _, _ = self.prompts[name]
        behind = self.output_digests(name, digests, total // PAGE)
        for index, digest in enumerate(behind, len(digests)):
            self.content[self.ready[name][index]] = digest
        continues = name in self.retracting
        self.last_word(name)
        self.core.finish(lease.worker, name, total, b"".join(behind), self.now, continues)
        self.run_effects()
        return total
