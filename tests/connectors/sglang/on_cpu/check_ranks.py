"""Tensor-parallel engines of SGLang's classes: each rank is a process with its share of the heads, and one daemon has
the ranks of one engine. Run it in a process of its own: it forks before it has threads."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from kvferry.connectors.sglang.versions import RUN
from tests.connectors.sglang.rank_process import RankPair, RankProcesses
from tests.connectors.sglang.rig import PAGE, new_prompt, stats_of, until
from tests.support.devices import DeviceStack

PAGE_BYTES = 2048
PAGES, SHARE = 64, 16  # of prefill's pool, and of it what may wait for decode there
TOKENS = 7 * PAGE + 5  # of a prompt of 8 pages
ABORTS, AT_ONCE, DEADLINE_SECONDS = 30, 6, 12.0
SECONDS = 150.0


@pytest.fixture(scope="module")
def processes(sglang: str) -> Iterator[RankProcesses]:
    if sglang not in RUN:
        pytest.skip(f"SGLang {sglang} is known by its interfaces alone")
    with RankProcesses(4 + 4 + 3) as forked:
        yield forked


@pytest.fixture(scope="module")
def pair(processes: RankProcesses) -> Iterator[RankPair]:
    yield from made(processes, {"prefill": 2, "decode": 2})


def made(processes: RankProcesses, ranks: dict[str, int], *, latent: bool = False) -> Iterator[RankPair]:
    with DeviceStack() as stack, ExitStack() as patches:
        yield from pair_of(processes, stack, patches, ranks=ranks, latent=latent)


def pair_of(
    processes: RankProcesses, stack: DeviceStack, patches: ExitStack, *, ranks: dict[str, int], latent: bool
) -> Iterator[RankPair]:
    share = (SHARE - 0.5) / (PAGES + 1)
    words = ("--host-bytes", str(128 * PAGE_BYTES))
    options = {"prefill_words": words, "waiting_share": share, "deadline_seconds": DEADLINE_SECONDS}
    pair = RankPair(processes, stack, patches, ranks=ranks, latent=latent, prefill_tokens=PAGES * PAGE, **options)
    try:
        until(lambda: pair.prefill.stows() and stats_of(pair, "prefill").host.pages >= 128)
        yield pair
    finally:
        pair.close()


def nothing_is_held(pair: RankPair) -> bool:
    pair.decode.look()
    for role, engine in pair.engines.items():
        side, (locked, free, rows) = stats_of(pair, role), engine.holds()
        if side.requests.running or side.transfers.active or locked or free != PAGES * PAGE or rows != 8:
            return False
        if role == "prefill" and side.host.leased:
            return False
    return True


@pytest.mark.parametrize("tokens", [1, PAGE, 5 * PAGE + 3])
def test_each_rank_has_its_heads(pair: RankPair, tokens: int) -> None:
    pair.decode.finished(pair.exchanged(new_prompt(tokens), chunk=2 * PAGE + 3))


def test_what_was_evicted_comes_back_from_the_host_tier(pair: RankPair) -> None:
    first = new_prompt(5 * PAGE + 3)
    pair.decode.finished(pair.exchanged(first))
    pair.decode.settled()
    pair.decode.evict()
    assert pair.decode.kept() == 0
    before = stats_of(pair, "decode").transfers.delta_pages
    room = pair.exchanged(new_prompt(7 * PAGE + 1, before=first))
    assert stats_of(pair, "decode").transfers.delta_pages == before + 3
    pair.decode.finished(room)
    pair.decode.settled()


def test_computed_prompts_that_wait_go_to_the_host_tier(pair: RankPair) -> None:
    """Both ranks give the same pages back in the same step, and the prompts are sent from the tier."""
    prompts = [new_prompt(TOKENS) for _ in range(6)]
    rooms = []
    for prompt in prompts:
        room = pair.give(prompt, "prefill")
        begun: list[int] = []
        until(lambda begun=begun: pair.prefill.ended() or begun.extend(pair.prefill.may_begin()) or begun)
        assert begun == [room]
        pair.prefill.computed(room, 3 * PAGE)
        rooms.append(room)
    given_back = pair.prefill.gave_back()
    assert given_back == rooms[: len(given_back)] and len(given_back) >= 4, "the oldest"
    assert stats_of(pair, "prefill").host.leased >= 4 * 8
    pair.prefill.evict()
    for room, prompt in zip(rooms, prompts, strict=True):
        pair.decode.add(room, prompt, f"r{room}")
        assert pair.decode.came(room), "each byte is right on each rank"
        pair.decode.finished(room)
    left = {*rooms}
    until(lambda: left.difference_update(room for room, sent in pair.prefill.ended() if sent) or not left)
    until(lambda: nothing_is_held(pair))


def test_pages_of_an_aborted_request_are_given_back_untouched(pair: RankPair) -> None:
    room = pair.give(new_prompt(8 * PAGE))
    pair.prefill.bootstrapped(room)
    pair.prefill.computed_part(room, 0, 4 * PAGE)
    before = stats_of(pair, "decode").transfers.delta_pages
    until(lambda: pair.decode.look() == [[], []] and stats_of(pair, "decode").transfers.delta_pages >= before)
    assert pair.decode.given_up(room)
    until(lambda: pair.decode.look()[1] == [room])
    pair.decode.evict()
    pair.prefill.computed_part(room, 4 * PAGE, 8 * PAGE)
    assert not pair.prefill.sent_room(room)
    assert pair.decode.untouched()
    until(lambda: nothing_is_held(pair))


@dataclass(eq=False)
class Exchange:
    prompt: list[int]
    abort_at: float
    by: str
    admit_at: float
    computed: int = -1
    over: set[str] = field(default_factory=set)
    admitted: bool = False


def test_aborts_at_random_times(pair: RankPair) -> None:
    """By either side, with prompts that wait in prefill's tier: no foreign byte on any rank, and nothing held."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    turns = Turns(pair, random.Random(seed))
    end = time.monotonic() + SECONDS
    while turns.aborted < ABORTS or turns.arrived < ABORTS / 3:
        assert time.monotonic() < end, f"{turns.aborted} aborts, {turns.arrived} arrived in {SECONDS} s"
        if len(turns.running) < AT_ONCE:
            turns.add()
        turns.turn()
    until(lambda: turns.turn() or not turns.running, 3 * DEADLINE_SECONDS)
    until(lambda: nothing_is_held(pair))
    print(f"{turns.aborted} aborts, {turns.arrived} arrived, {len(turns.moved)} by the host tier")


class Turns:
    """The loops of both engines, turn by turn, with prompts that come and go."""

    def __init__(self, pair: RankPair, chance: random.Random) -> None:
        self.pair, self.chance = pair, chance
        self.running: dict[int, Exchange] = {}
        self.aborted = self.arrived = 0
        self.moved: set[int] = set()

    def add(self) -> None:
        chance, now = self.chance, time.monotonic()
        leaves = chance.random() < 0.6
        abort_at = now + chance.uniform(0, 0.6) if leaves else float("inf")
        by, admit_at = chance.choice(("decode", "prefill")), now + chance.choice((0.0, 0.4))
        prompt = new_prompt(chance.randint(1, 8 * PAGE))
        self.running[self.pair.give(prompt, "prefill")] = Exchange(prompt, abort_at, by, admit_at)

    def turn(self) -> None:
        self._prefill()
        self._decode()
        now = time.monotonic()
        for room, each in self.running.items():
            if each.abort_at <= now and each.by not in each.over and (each.by == "prefill" or each.admitted):
                each.abort_at = float("inf")
                # SGLang gives one that is computed in part away at once, which the whole ones here never are.
                self.aborted += self.pair.engines[each.by].given_up(room)
            if "prefill" in each.over and not each.admitted and each.computed == 0:
                each.over.add("decode")  # nobody sends it to decode any more
        self.running = {room: each for room, each in self.running.items() if len(each.over) < 2}

    def _prefill(self) -> None:
        engine = self.pair.prefill
        for room in engine.may_begin():
            engine.make_room(len(self.running[room].prompt) + PAGE)
            engine.computed(room)
            self.running[room].computed = len(self.running[room].prompt)
        self.moved.update(engine.gave_back())
        for room, sent in engine.ended():
            self._over(room, "prefill", sent)
        for room in engine.refused():
            self._over(room, "prefill", False)

    def _over(self, room: int, role: str, well: bool) -> None:
        if (each := self.running.get(room)) is not None:
            each.over.add(role)
            if not well and not each.admitted:
                each.over.add("decode")

    def _decode(self) -> None:
        engine, now = self.pair.decode, time.monotonic()
        for room, each in self.running.items():
            if not each.admitted and each.admit_at <= now and "decode" not in each.over:
                engine.add(room, each.prompt, f"r{room}")
                each.admitted = True
        there, given_up = engine.look()
        for room, is_right in there:
            assert is_right, f"a wrong byte came to decode in room {room}"
            engine.finished(room)
            self.arrived += 1
            self._over(room, "decode", True)
        for room in given_up:
            self._over(room, "decode", False)


@pytest.mark.parametrize("ranks", [{"prefill": 2, "decode": 2}, {"prefill": 1, "decode": 2}])
def test_latent_kv_that_each_rank_has_whole(processes: RankProcesses, ranks: dict[str, int]) -> None:
    """MLA, also between engines of unlike numbers of ranks."""
    for pair in made(processes, ranks, latent=True):
        first = new_prompt(5 * PAGE + 3)
        pair.decode.finished(pair.exchanged(first, chunk=2 * PAGE))
        pair.decode.settled()
        pair.decode.evict()
        pair.decode.finished(pair.exchanged(new_prompt(6 * PAGE, before=first)))
        until(lambda pair=pair: nothing_is_held(pair))
