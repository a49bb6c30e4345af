"""Parts that come late, and requests that are given up at any time: no foreign byte in any page, and nothing held."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.scripts import imported
from tests.connectors.sglang.engine_on_cpu import HEADS, HOST, Engine
from tests.connectors.sglang.rig import PAGE, Pair, kv_of, new_prompt, stats_of, until
from tests.faults.networks import DelayedNetworks
from tests.support.devices import DeviceStack

ABORTS = 50
AT_ONCE = 6
DEADLINE_SECONDS = 5.0  # for which a half waits whose other half was given up before it had begun
SECONDS = 200.0
DELAYS = (0.0, 0.005, 0.03, 0.1)
CANARY = 0x5A


@dataclass(eq=False)
class Exchange:
    """One prompt on both sides."""

    prompt: list[int]
    theirs: Any
    ours: Any
    admit_at: float  # to decode
    abort_at: float  # by one side; never where it is infinite
    by: str
    chunk: int
    computed: int = -1  # tokens; -1: it has not begun
    admitted: bool = False
    over: set[str] = field(default_factory=set)  # roles


class Turns:
    """The loops of both engines, turn by turn, with prompts that come and go."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.chance = random.Random(seed)
        self.running: list[Exchange] = []
        self.aborted = self.arrived = self.moved = 0
        self.marked: dict[int, bytes] = {}  # decode's free pages, overwritten
        self.freed = 0  # of those, which a request had for less than a turn
        self._watch(pair.decode.allocator)
        self.prompts: list[list[int]] = []
        self.takes = 0.3  # seconds of an exchange, as far as is known

    def _watch(self, allocator: Any) -> None:
        """A prompt may come and go between two looks: its pages were somebody's since they were overwritten."""
        free = allocator.free

        def watched(slots: Any) -> None:
            pages = set((slots // PAGE).tolist())
            self.freed += len(self.marked.keys() & pages)
            self.marked = {page: was for page, was in self.marked.items() if page not in pages}
            free(slots)

        allocator.free = watched

    def add(self) -> None:
        chance = self.chance
        before = chance.choice(self.prompts)[: chance.randint(0, 3) * PAGE] if self.prompts else []
        prompt = new_prompt(len(before) + chance.randint(1, 5 * PAGE), before)
        theirs, ours = self.pair.requests(prompt)
        now, leaves = time.monotonic(), chance.random() < 0.6
        abort_at = now + chance.uniform(0, 1.5 * self.takes) if leaves else float("inf")
        admit_at = now + chance.choice((0.0, 0.0, 0.3))  # decode may be late: the prompt waits
        by = chance.choice(("decode", "prefill"))
        self.running.append(Exchange(prompt, theirs, ours, admit_at, abort_at, by, chance.choice((0, PAGE, 2 * PAGE))))
        self.pair.prefill.queue.add(theirs, HEADS)

    def turn(self) -> None:
        self._prefill()
        self._decode()
        self._look_at_free_pages()
        now = time.monotonic()
        for each in self.running:
            if each.abort_at <= now and self._abort(each):
                each.abort_at = float("inf")
                self.aborted += 1
        for each in self.running:
            if "prefill" in each.over and not each.admitted and each.theirs.finished_reason is not None:
                each.over.add("decode")  # nobody sends it to decode any more
        self.running = [each for each in self.running if len(each.over) < 2]

    def _prefill(self) -> None:
        engine = self.pair.prefill
        begun = engine.queue.pop_bootstrapped()
        for each in self.running:
            if each.theirs in begun:
                make_room(engine, len(each.prompt) + PAGE)
                engine.begin(each.theirs)
                each.computed = len(each.theirs.prefix_indices)
        for each in self.running:
            if 0 <= each.computed < len(each.prompt) and "prefill" not in each.over:
                end = min(each.computed + (each.chunk or len(each.prompt)), len(each.prompt))
                engine.compute_chunk(each.theirs, each.computed, end)
                each.computed = end
        over = [*engine.inflight(), *engine.sent]
        engine.sent.clear()
        for each in self.running:
            if each.theirs in over and "prefill" not in each.over:
                each.over.add("prefill")
                order = each.theirs.disagg_kv_sender.order
                self.moved += order is not None and order.gave_back

    def _decode(self) -> None:
        engine, now = self.pair.decode, time.monotonic()
        for each in self.running:
            if not each.admitted and each.admit_at <= now and "decode" not in each.over:
                engine.admit(each.ours)
                each.admitted = True
        there = engine.turn()
        for each in self.running:
            if each.ours in there:
                got = engine.shared.slots(engine.slots(each.ours, 0, len(each.prompt)))
                assert np.array_equal(got, kv_of(each.prompt, 0, len(each.prompt))), "a wrong byte came to decode"
                assert list(each.ours.output_ids) == [1000 + len(each.prompt)]
                engine.finish(each.ours)
                self.arrived += 1
                self.takes = 0.9 * self.takes + 0.1 * min(1.0, now - each.admit_at)
                self.prompts = [*self.prompts[-8:], each.prompt]
                each.over.add("decode")
            elif each.ours in engine.sent:
                each.over.add("decode")
        engine.sent.clear()

    def _abort(self, each: Exchange) -> bool:
        """As SGLang gives a request up. False: it is none that could be, any more or yet."""
        if each.by in each.over:
            each.abort_at = float("inf")
            return False
        if each.by == "decode":
            queues = [*self.pair.decode.queue.queue, *self.pair.decode.transfers.queue]
            found = [queued.kv_receiver for queued in queues if queued.req is each.ours]
            for receiver in found:
                receiver.abort()
            return bool(found)
        each.theirs.disagg_kv_sender.abort()
        if 0 <= each.computed < len(each.prompt):
            self._give_up_half(each)
        return True

    def _give_up_half(self, each: Exchange) -> None:
        """A prompt that is computed in part: SGLang gives its pages away at once, and to others, who write them."""
        from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache.common import release_kv_cache

        engine = self.pair.prefill
        each.theirs.finished_reason = FINISH_ABORT()
        release_kv_cache(each.theirs, engine.tree, is_insert=False)
        maybe_release_metadata_buffer(each.theirs, engine.row_numbers)
        overwrite(engine)
        each.over.add("prefill")

    def _look_at_free_pages(self) -> None:
        """Nothing is written into pages that decode has given back."""
        engine = self.pair.decode
        free = engine.free_pages
        for page in self.marked.keys() & free:
            assert content(engine, page) == self.marked[page], f"page {page} was written, and is nobody's"
        self.marked = {page: was for page, was in self.marked.items() if page in free}
        for page in free - self.marked.keys():
            slots = range(page * PAGE, (page + 1) * PAGE)
            engine.shared.write(slots, np.full_like(engine.shared.slots(slots), CANARY))
            self.marked[page] = content(engine, page)


def content(engine: Engine, page: int) -> bytes:
    return bytes(engine.shared.slots(range(page * PAGE, (page + 1) * PAGE)).tobytes())


def make_room(engine: Engine, tokens: int) -> None:
    """As SGLang does before it allocates."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if (lacks := tokens - engine.allocator.available_size()) > 0:
        engine.tree.evict(EvictParams(num_tokens=lacks))


def overwrite(engine: Engine) -> None:
    for page in engine.free_pages:
        slots = range(page * PAGE, (page + 1) * PAGE)
        engine.shared.write(slots, np.full_like(engine.shared.slots(slots), CANARY))


def nothing_is_held(pair: Pair) -> bool:
    pair.decode.turn()
    for role, engine in pair.engines.items():
        side = stats_of(pair, role)
        if side.requests.running or side.transfers.active or side.pool.leased or engine.tree.protected_size():
            return False
        if role == "prefill" and side.host.leased:
            return False
        if engine.allocator.available_size() + engine.tree.evictable_size() != engine.allocator.size:
            return False
    return True


class LateParts:
    """In the place of networks: parts alone are held back, and the relay says for how long."""

    def __init__(self, folder: Path) -> None:
        with imported("sglang", ("late_parts",)) as modules:
            first = 23000 + 64 * (os.getpid() % 64)
            self._late = modules.late_parts.LateParts(first, first + 63, folder, DELAYS)
        self.words = ("--ucx-ports", f"{first}-{first + 63}")

    def __enter__(self) -> LateParts:
        if shutil.which("cc") is None:
            pytest.skip("no compiler")
        self._late.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._late.__exit__(*error)

    def place(self, role: str) -> tuple[Sequence[str], str]:
        return ("env", *(f"{name}={value}" for name, value in self._late.preload.items())), HOST

    def delay(self, seconds: float) -> None: ...


class LateNetworks(DelayedNetworks):
    """All that goes between the daemons is held back."""

    words = ()


@pytest.mark.parametrize("late", ["networks", "parts"])
def test_late_parts_and_aborts(one_rank: None, tmp_path: Path, late: str) -> None:
    """Fifty at random times, by either side, while what goes over the wire is held back for as long as it likes."""
    held_back = LateNetworks() if late == "networks" else LateParts(tmp_path)
    with held_back as networks, DeviceStack() as stack, ExitStack() as patches:
        share, words = 0.25, ("--host-bytes", "1MiB")
        options = {"waiting_share": share, "deadline_seconds": DEADLINE_SECONDS, "words": networks.words}
        pair = Pair(stack, patches, prefill_words=words, place=networks.place, **options)
        try:
            until(lambda: all(engine.manager.carrier.there for engine in pair.engines.values()))
            _, ours = pair.exchange(new_prompt(PAGE))  # the daemons have found each other
            pair.decode.finish(ours)
            places = {role: engine.req_pool.available_size() for role, engine in pair.engines.items()}
            seed = random.randrange(1 << 30)
            print(f"seed {seed}")
            turns = Turns(pair, seed)
            end, changes = time.monotonic() + SECONDS, 0.0
            while turns.aborted < ABORTS or turns.arrived < ABORTS / 4:
                assert time.monotonic() < end, f"{turns.aborted} aborts, {turns.arrived} arrived in {SECONDS} s"
                if time.monotonic() >= changes:
                    networks.delay(turns.chance.choice(DELAYS))
                    changes = time.monotonic() + 0.5
                if len(turns.running) < AT_ONCE:
                    turns.add()
                turns.turn()
            networks.delay(0.0)
            until(lambda: turns.turn() or not turns.running)
            until(lambda: nothing_is_held(pair))
            for role, engine in pair.engines.items():
                assert engine.row_numbers.available_size() == 8, role
                assert engine.req_pool.available_size() == places[role], role
            print(f"{turns.aborted} aborts, {turns.arrived} arrived, {turns.moved} by the host tier")
            print(f"{turns.freed} pages had and given back within a turn")
        finally:
            pair.close()
