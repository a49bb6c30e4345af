"""A decode core over blocks of its engine's, at random: the engine's memory, the host tier, what requests read, and
when the engine has its blocks back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.daemon.core import tier_copies
from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import (
    BindPages,
    ForgetRows,
    SendDone,
    StartCopy,
    StartTransfer,
    StopTransfer,
    ToWorker,
)
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.limits import BlockShape, Name
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE

PAGE, BLOCK, BLOCKS = 4, 2, 40
SPACE = bytes(32)
PER_PAGE = PAGE // BLOCK
MAX_COPIES = tier_copies.MAX_COPIES
SHAPE = BlockShape(BLOCKS, BLOCK, PAGE)
CANARY = b"the engine's"


@dataclass
class Job:
    """A request as its engine knows it."""

    worker: int
    digests: list[bytes]  # of its full pages
    tokens: int
    start: int  # tokens that the engine holds itself
    end: int  # behind the last that is to be written, or read
    blocks: list[int]  # from `start` on, until `end`
    prefill: bool
    stores: bool
    ends_itself: bool = False
    bound: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by page
    readable: int = 0  # tokens, once ready
    state: str = "admitted"  # ready, finished, owes an abort, aborted

    def content(self, block: int) -> bytes:
        """What belongs into the block of this index of the prompt."""
        page = block // PER_PAGE
        name = (
            self.digests[page]
            if page < len(self.digests)
            else self.digests[-1] + b" and behind it"
            if self.digests
            else b"short"
        )
        return name + bytes([block % PER_PAGE])


class BlockMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.count = 0.0, 0
        self.memory = [CANARY] * BLOCKS
        self.free = set(range(BLOCKS))
        self.jobs: dict[Name, Job] = {}
        self.rows: dict[int, list[bytes]] = {}
        self.copies: list[CopyStarted] = []
        self.transfers: dict[int, tuple[Name, int, tuple[int, ...]]] = {}
        self.arrived: dict[int, int] = {}
        self.stopping: list[int] = []
        self.bound: dict[int, tuple[int, ...]] = {}
        self.workers, self.lost = {1, 2}, set[int]()
        self.ready_and_over: set[Name] = set()

    @initialize(
        host=st.sampled_from([0, 4, 12, 60]),
        quota=st.sampled_from([Quota(), Quota(2, 3, 2, 8)]),
        most=st.sampled_from([1, MAX_COPIES]),
    )
    def configure(self, host: int, quota: Quota, most: int) -> None:
        tier_copies.MAX_COPIES = most
        limits = CacheLimits(in_blocks=True, default_quota=quota)
        cache = Cache(2 * BLOCKS, PAGE, host_pages=host, limits=limits)
        decode = DecodeLimits(max_tokens=64, page_bytes=64, admission_seconds=40.0, queue=8)
        self.core = DecodeCore(cache, decode)

    # -- effects ------------------------------------------------------------------------------------------------------

    def run_effects(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                if isinstance(effect, BindPages):
                    for i, page in enumerate(effect.pages):
                        self.bound[page] = effect.blocks[i * PER_PAGE : (i + 1) * PER_PAGE]
                elif isinstance(effect, StartTransfer):
                    name = Name(effect.ask.name.request_id, effect.ask.name.attempt)
                    self.transfers[effect.ask.transfer] = (name, effect.ask.first_page, effect.page_ids)
                    self.arrived[effect.ask.transfer] = 0
                elif isinstance(effect, StopTransfer):
                    if effect.transfer in self.transfers:
                        self.stopping.append(effect.transfer)
                    else:
                        self.core.transfer_drained(effect.transfer, self.now)
                elif isinstance(effect, StartCopy):
                    self.copies.append(effect.started)
                elif isinstance(effect, ForgetRows):
                    for row in effect.rows:
                        self.rows.pop(row, None)
                elif isinstance(effect, ToWorker):
                    self.hear(effect)
                else:
                    assert isinstance(effect, SendDone)

    def hear(self, effect: ToWorker) -> None:
        kind = effect.event.WhichOneof("kind")
        message = getattr(effect.event, kind)
        name = Name(message.name.request_id, message.name.attempt)
        if name in self.ready_and_over:
            assert kind in ("ended", "failed")  # the latter where a worker errs
            return
        job = self.jobs[name]
        if effect.worker not in self.workers:
            return
        if kind == "admitted":
            assert not message.pages
            job.readable = message.local_tokens
        elif kind == "ready" and job.state == "admitted":
            job.state = "ready"
            job.readable = job.end if job.prefill else min(job.readable, job.end)
            if not job.stores:
                self.check_read(job)
                if job.ends_itself:
                    self.ready_and_over.add(name)
                    self.give_back(name)
        elif kind == "failed":
            job.state = "owes an abort" if job.state != "finished" else job.state
        elif kind == "ended":
            self.give_back(name)

    def check_read(self, job: Job) -> None:
        for index in range(job.start // BLOCK, -(-job.readable // BLOCK)):
            block = job.blocks[index - job.start // BLOCK]
            assert self.memory[block] == job.content(index), "a wrong byte would be read"

    def give_back(self, name: Name) -> None:
        """The engine reuses the blocks: nothing may touch them any more."""
        job = self.jobs.pop(name)
        for block in job.blocks:
            self.memory[block] = CANARY
        self.free |= set(job.blocks)

    def write(self, page: int, contents: list[bytes]) -> None:
        for block, content in zip(self.bound[page], contents, strict=True):
            if block >= 0:
                assert block not in self.free, "a block of the engine's own is written"
                self.memory[block] = content

    def read(self, page: int) -> list[bytes]:
        assert all(block >= 0 and block not in self.free for block in self.bound[page]), (
            "a block is read that is not its"
        )
        return [self.memory[block] for block in self.bound[page]]

    # -- what the engine does ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.workers)
    @rule(
        data=st.data(),
        branch=st.integers(0, 2),
        tokens=st.integers(1, 22),
        kind=st.sampled_from(["prefill", "restore", "store"]),
        alone=st.booleans(),
    )
    def admit(self, data: st.DataObject, branch: int, tokens: int, kind: str, alone: bool) -> None:
        digests = [hashlib.sha256(bytes([branch if i > 1 else 0, i])).digest() for i in range(tokens // PAGE)]
        start, end = BLOCK * data.draw(st.integers(0, (tokens - 1) // BLOCK)), tokens
        if kind == "store":
            start, tokens = 0, len(digests) * PAGE
            end = tokens
        elif kind == "restore":
            end = (tokens - 1) // PAGE * PAGE
        size = -(-end // BLOCK) - start // BLOCK
        if size < 1 or size > len(self.free):
            return
        blocks = sorted(self.free)[:size]
        self.free -= set(blocks)
        self.count += 1
        name = Name(self.count.to_bytes(16, "big"), 1)
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        asks, stores = kind == "prefill", kind == "store"
        job = self.jobs[name] = Job(worker, digests, tokens, start, end, blocks, asks, stores, alone)
        if job.stores:
            for index, block in enumerate(blocks):
                self.memory[block] = job.content(index)
        request = wire.Admit(
            name=name.to_proto(),
            digests=b"".join(digests),
            tokens=tokens,
            tail_digest=bytes(32) if tokens % PAGE else b"",
            prefill="p" if job.prefill else "",
            max_new_tokens=1,
            held_tokens=tokens if job.stores else start // PAGE * PAGE,
            blocks=blocks,
            blocks_from=start,
            ends_itself=alone,
        )
        try:
            self.core.admit(worker, SPACE, name, request, self.now + 30, self.now, SHAPE.named_by(request))
        except RequestError:
            self.give_back(name)
        self.run_effects()

    def of_state(self, *states: str) -> list[Name]:
        return sorted(n for n, job in self.jobs.items() if job.state in states and job.worker in self.workers)

    def to_finish(self) -> list[Name]:
        return [name for name in self.of_state("ready") if not self.jobs[name].ends_itself]

    @precondition(lambda self: self.to_finish())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.to_finish()))
        job = self.jobs[name]
        job.state = "finished"
        self.core.finish(job.worker, name, job.tokens, b"", self.now)
        self.run_effects()

    @precondition(lambda self: self.of_state("admitted", "ready", "owes an abort"))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.of_state("admitted", "ready", "owes an abort")))
        self.jobs[name].state = "aborted"
        self.core.abort(self.jobs[name].worker, name, self.now)
        self.run_effects()

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def worker_is_lost(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        self.workers.discard(worker)
        self.lost.add(worker)
        self.core.worker_lost(worker, self.now)
        self.run_effects()

    @precondition(lambda self: self.lost)
    @rule()
    def worker_is_gone(self) -> None:
        worker = self.lost.pop()
        self.core.worker_gone(worker, self.now)
        self.run_effects()
        self.workers.add(worker + 2)
        for name in [name for name, job in self.jobs.items() if job.worker == worker]:
            if name not in self.core.leases:
                self.give_back(name)  # the mapping kept the memory as long as copies ran

    # -- what prefill and copies do ------------------------------------------------------------------------------------

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), aux=st.booleans())
    def part_arrives(self, data: st.DataObject, aux: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.transfers)))
        self.arrive(number, data.draw(st.integers(self.arrived[number], len(self.transfers[number][2]))), aux)

    def arrive(self, number: int, upto: int, aux: bool) -> None:
        name, first, pages = self.transfers[number]
        done = self.arrived[number]
        job = self.jobs.get(name)
        if pages and upto > done:
            assert job is not None, "a copy into the pages of a request that has ended"
            for index in range(first + done, first + upto):
                contents = [job.content(index * PER_PAGE + i) for i in range(PER_PAGE)]
                self.write(pages[index - first], contents)
        self.arrived[number] = upto
        if number not in self.stopping:
            self.core.pages_arrived(number, list(range(first + done, first + upto)), self.now)
            if upto == len(pages) and pages:
                del self.transfers[number]
                self.core.transfer_completed(number, self.now)
            if aux and name in self.core.leases:
                self.core.aux("p", name, b"first", self.now)
        self.run_effects()

    @precondition(lambda self: self.stopping)
    @rule()
    def transfer_drains(self) -> None:
        number = self.stopping.pop(0)
        self.transfers.pop(number, None)
        self.core.transfer_drained(number, self.now)
        self.run_effects()

    @precondition(lambda self: set(self.transfers) - set(self.stopping))
    @rule(data=st.data(), lost=st.booleans())
    def transfer_goes_wrong(self, data: st.DataObject, lost: bool) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.transfers) - set(self.stopping))))
        if lost:
            self.core.transfer_broken(number, "a wrong sum", self.now)
        else:
            self.core.transfer_failed(number, unavailable("no"), self.now)
        self.run_effects()

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), wrong=st.sampled_from([False, False, True]))
    def copy_ends(self, data: st.DataObject, wrong: bool) -> None:
        number = data.draw(st.integers(0, len(self.copies) - 1))
        self.end_copy(number, [data.draw(st.sampled_from(self.copies[number].copy.device))] if wrong else [])

    def end_copy(self, number: int, failed: list[int]) -> None:
        started = self.copies.pop(number)
        copy = started.copy
        assert set(self.core.cache.pool.states(copy.device)) <= {PageState.LEASED, PageState.ORPHANED}
        for i, (page, row) in enumerate(zip(copy.device, copy.host, strict=True)):
            if copy.kind == RESTORE:
                self.write(page, [b"garbage"] * PER_PAGE if page in failed else self.rows[row])
            else:
                self.rows[row] = [b"garbage"] * PER_PAGE if page in failed else self.read(page)
                digest = copy.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]
                if page not in failed:
                    assert self.rows[row] == [digest + bytes([k]) for k in range(PER_PAGE)]
        self.core.copy_ended(started.number, failed, len(failed), 0.001, self.now)
        self.run_effects()

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.run_effects()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "core"):
            return
        cache = self.core.cache
        cache.settle()
        counts = cache.pool.counts()
        assert not counts.cached and not counts.arriving and not counts.restoring and not counts.spilling
        held = sum(len(lease.pages) for lease in self.core.leases.values())
        assert counts.leased + counts.orphaned == held
        for namespace in cache.namespaces.values():
            namespace.tree.check()
            assert namespace.tree.pages == 0
        if cache.host is not None:
            stored = sum(len(each.copy.host) for each in self.copies if each.copy.kind != RESTORE)
            blocks = self.core._keeper.blocks
            stored += sum(map(blocks.rows_behind, cache.namespaces.values()))  # of copies that have ended
            assert cache.host_pages == sum(n.tree.host_pages for n in cache.namespaces.values()) + stored
        if not self.core.leases:
            assert not cache.locks and not cache.promised and not self.copies
            blocks = self.core._keeper.blocks
            assert not blocks._behind and not blocks._waiting and not any(blocks._storing.values())

    def teardown(self) -> None:
        tier_copies.MAX_COPIES = MAX_COPIES
        if not hasattr(self, "core"):
            return
        for name in self.of_state("admitted", "ready", "owes an abort"):
            self.core.abort(self.jobs[name].worker, name, self.now)
        for worker in self.workers | self.lost:
            self.core.worker_lost(worker, self.now)
            self.core.worker_gone(worker, self.now)
        self.core.take_effects()
        for started in self.copies:  # none begins behind them: what waits has ended with its worker
            self.core.copy_ended(started.number, [], 0, 0.0, self.now)
        for number in list(self.transfers):
            self.core.transfer_drained(number, self.now)
        self.core.take_effects()
        assert not self.core.leases and not self.core.cache.locks


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class LongBlockMachine(BlockMachine):
    """Another class: a machine's test case is one object."""


TestBlocksLong = pytest.mark.nightly(pytest.mark.timeout(1800)(LongBlockMachine.TestCase))
TestBlocksLong.settings = settings(max_examples=600, stateful_step_count=40, deadline=None)
