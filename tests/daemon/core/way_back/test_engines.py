"""A prefill core with an engine that has blocks of its own: how long it waits for what is fetched, and for pages."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.effects import BindPages, OpenSend, SendProgress, StartFetch, StopFetch, WakeAt, ZeroPages
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import BlockShape
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.way_back.choice import (
    ALWAYS,
    AUTO,
    BYTES_PER_SECOND,
    FETCH,
    NO_PAGES,
    NOT_HELD,
    SLOW,
    TOKENS_PER_SECOND,
    WayBackLimits,
)
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from tests.daemon.core.way_back.test_fetches import FULL, TAIL, TOKENS, A, B, Fetching
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, digests

POOL = 12
OTHERS = 8  # pages of B's prompt


class Waiting(Fetching):
    """The engine waits for what may be fetched, and the pool has few pages."""

    def __init__(self, setting: str = ALWAYS, page_bytes: int = 64) -> None:
        super().__init__(setting, pool=POOL, page_bytes=page_bytes)

    def begin_a(
        self, patience: wire.Patience = wire.PATIENCE_FETCH, *, held: int = 0, now: float = 0.0, full: int = FULL
    ) -> None:
        request = wire.Begin(
            name=A.to_proto(),
            digests=digests("x", full),
            tokens=full * PAGE + 1,
            tail_digest=TAIL,
            patience=patience,
            held_tokens=held,
        )
        self.core.begin(1, NAMESPACE, A, request, DEADLINE, now)
        self.take()

    def release_b(self, now: float) -> None:
        self.core.abort(1, B, now)
        self.core.send_ended(1, 0, now)
        self.take()


def full_pool(setting: str = ALWAYS) -> Waiting:
    """Another's pages leave none for A."""
    side = Waiting(setting)
    side.ask(B, 0, "y", OTHERS)
    request = wire.Begin(name=B.to_proto(), digests=digests("y", OTHERS), tokens=OTHERS * PAGE)
    request.patience = wire.PATIENCE_NONE
    side.core.begin(1, NAMESPACE, B, request, DEADLINE, 0.0)
    side.take()
    assert side.told("begun")
    return side


def test_an_engine_that_waits_is_told_when_what_was_fetched_is_there() -> None:
    side = Waiting()
    side.begin_a()
    assert side.state is EntryState.LOOKING and not side.told("begun") and not side.told("proceed")
    side.ask_a(held=3)
    (start,) = side.of(StartFetch)
    assert start.ask.pages == 3
    side.core.fetch_arrived(1, [0, 1, 2], 0.0)
    side.core.fetch_completed(1, 0.0)
    side.take()
    assert side.matched() == 3 and side.choices() == {FETCH: 1}


def test_nothing_is_fetched_for_an_engine_that_does_not_wait() -> None:
    side = Waiting()
    side.ask_a()
    side.begin_a(wire.PATIENCE_NONE)
    assert side.matched() == 0 and not side.of(StartFetch) and not side.of(WakeAt) and side.choices() == {}


@pytest.mark.parametrize("state", ["queued", "parked"])
def test_an_engine_does_not_wait_for_pages_longer_than_for_an_ask(state: str) -> None:
    side = full_pool()
    full = FULL if state == "queued" else POOL - 1
    side.begin_a(now=5.0, full=full)
    assert side.state is (EntryState.WAITING if state == "queued" else EntryState.PARKED)
    (wake,) = side.of(WakeAt)
    assert 5.0 < wake.at == 5.0 + side.core.fetches.judge.patience(full * PAGE + 1)
    side.core.wake(wake.at - 1e-6)
    side.take()
    assert not side.told("proceed")
    side.core.wake(wake.at)
    side.take()
    assert len(side.told("proceed")) == 1 and side.choices() == {NO_PAGES: 1}
    side.core.wake(wake.at + 1)
    side.take()
    assert not side.told("proceed"), "told twice"
    side.ask_a(full=full, held=full)
    side.release_b(6.0)
    assert side.matched() == 0 and side.state is EntryState.COMPUTING, "it computes already: nothing is fetched"
    side.core.progress(1, A, full * PAGE + 1, 7.0)
    side.core.aux(1, A, b"", 7.0)
    side.take()
    assert side.state is EntryState.SERVED


def test_pages_that_come_in_time_are_fetched_into() -> None:
    side = full_pool()
    side.begin_a()
    side.ask_a()
    assert side.state is EntryState.WAITING and not side.of(StartFetch)
    side.release_b(0.1)
    assert side.state is EntryState.FETCHING and len(side.of(StartFetch)) == 1
    side.core.wake(50.0)
    side.take()
    assert not side.told("proceed"), "a fetch has a deadline of its own"


def test_who_ends_while_it_waits_for_pages_is_told_nothing_more() -> None:
    side = full_pool()
    side.begin_a()
    side.core.abort(1, A, 0.0)
    side.core.wake(100.0)
    side.take()
    assert A not in side.core.entries and not side.told("proceed")


@pytest.mark.parametrize(
    ("held", "decode", "why"), [(3, 3, NOT_HELD), (3, 4, FETCH), (4, 3, NOT_HELD), (FULL, FULL, "")]
)
def test_what_the_engine_holds_itself_is_no_reason_to_fetch(held: int, decode: int, why: str) -> None:
    side = Waiting()
    side.ask_a(decode)
    side.begin_a(held=held * PAGE + 1)
    assert side.choices() == ({why: 1} if why else {})
    if why == FETCH:  # what is fetched is whole: the engine hands in nothing of it
        (start,) = side.of(StartFetch)
        assert (start.ask.first_page, start.ask.pages) == (0, decode)
    else:
        assert side.matched() == 0


def test_what_is_gained_must_be_worth_all_that_moves() -> None:
    full, held = 400, 300
    estimates = []
    for own in (0, held):
        side = Waiting(AUTO)
        side.cache = Cache(1000, PAGE)
        bytes_ = round(
            0.25 * PAGE / TOKENS_PER_SECOND * BYTES_PER_SECOND
        )  # a page takes a quarter of the time of its computation
        side.core = PrefillCore(side.cache, PrefillLimits(table=8, way_back=WayBackLimits(AUTO, bytes_)))
        side.core.fetches.session_up(1)
        side.ask_a(full, full=full)
        side.begin_a(held=own * PAGE, full=full)
        estimates.append(side.choices())
    assert estimates == [{FETCH: 1}, {SLOW: 1}]


def test_more_than_the_prompt_cannot_be_held() -> None:
    side = Waiting()
    with pytest.raises(RequestError, match=f"held_tokens is {TOKENS + 1}; the prompt has {TOKENS} tokens"):
        side.begin_a(held=TOKENS + 1)


@pytest.mark.parametrize("patience", [wire.PATIENCE_NONE, wire.PATIENCE_FETCH])
def test_the_engines_speed_is_of_what_it_computes(patience: wire.Patience) -> None:
    """What it had before does not count; what it computes before its pages are there does, with its time."""
    side = full_pool(AUTO)
    side.core.progress(1, B, OTHERS * PAGE, 0.0)
    side.core.aux(1, B, b"", 0.0)
    speed = side.core.fetches.judge.speed
    speed._done = 0.0
    side.begin_a(patience, held=2 * PAGE, now=1.0, full=POOL - 1)
    if patience == wire.PATIENCE_FETCH:
        side.core.wake(1.5)
    side.core.send_ended(1, 0, 2.0)
    side.core.done(1, B, 2.0)
    side.take()
    side.ask_a(0, now=2.0, full=POOL - 1)
    assert side.state is EntryState.COMPUTING
    side.core.progress(1, A, (POOL - 1) * PAGE + 1, 3.0)
    began = 1.0 if patience == wire.PATIENCE_NONE else 1.5
    assert speed.per_second == pytest.approx(((POOL - 3) * PAGE + 1) / (3.0 - began))


# -- into blocks of the engine's own -------------------------------------------------------------------------------

PER_PAGE = 2
BLOCKS = tuple(range(40, 40 + FULL * PER_PAGE))


class InBlocks(Waiting):
    """The engine has blocks of half a page, and names them when it is offered something."""

    def __init__(self, setting: str = ALWAYS) -> None:
        super().__init__(setting)
        self.cache = Cache(64, PAGE, limits=CacheLimits(in_blocks=True, zero_freed=True))
        self.core = PrefillCore(self.cache, PrefillLimits(table=8, way_back=WayBackLimits(setting, 64)))
        self.core.fetches.session_up(1)

    def other_fetches(self, blocks: tuple[int, ...]) -> None:
        """Another request's fetch into these blocks."""
        request = wire.Begin(name=B.to_proto(), digests=digests("y", 2), tokens=2 * PAGE + 1, tail_digest=TAIL)
        request.patience = wire.PATIENCE_FETCH
        self.core.begin(
            1, NAMESPACE, B, request, DEADLINE, 0.0, BlockShape(100, PAGE // PER_PAGE, PAGE).of_begin(request)
        )
        last = digests("y", 2)[-32:]
        ask = peer.Ask(
            transfer=0, name=B.to_proto(), namespace_id=NAMESPACE, first_page=2, pages=1, held_tokens=2 * PAGE
        )
        ask.tokens, ask.last_full_digest, ask.tail_digest = 2 * PAGE + 1, last, TAIL
        self.core.ask(1, B, ask, DEADLINE, 0.0)
        self.core.fetch(1, B, wire.Fetch(name=B.to_proto(), blocks=blocks), 0.0)
        self.take()

    def begin_in_blocks(self, patience: wire.Patience = wire.PATIENCE_FETCH, *, warmup: bool = False) -> None:
        request = wire.Begin(
            name=A.to_proto(),
            digests=digests("x", FULL),
            tokens=TOKENS,
            tail_digest=TAIL,
            patience=patience,
            warmup=warmup,
        )
        shape = BlockShape(100, PAGE // PER_PAGE, PAGE)
        self.core.begin(1, NAMESPACE, A, request, DEADLINE, 0.0, shape.of_begin(request))
        self.take()

    def fetch(self, blocks: tuple[int, ...], held: int = 0) -> None:
        self.core.fetch(1, A, wire.Fetch(name=A.to_proto(), blocks=blocks, held_tokens=held), 0.0)
        self.take()

    def offered(self) -> int:
        (event,) = self.told("proceed")
        return event.proceed.fetch_tokens // PAGE


def offered(held: int = FULL) -> InBlocks:
    side = InBlocks()
    side.begin_in_blocks()
    side.ask_a(held)
    assert side.state is EntryState.OFFERED and side.offered() == held
    assert not side.of(StartFetch) and not side.told("begun")
    return side


def test_an_engine_names_the_blocks_that_are_fetched_into() -> None:
    side = offered(held=3)
    side.fetch(BLOCKS[: 3 * PER_PAGE])
    (start,), (bind,) = side.of(StartFetch), side.of(BindPages)
    assert start.page_ids == bind.pages == tuple(side.core.entries[A].hold.pages[:3])
    assert bind.blocks == BLOCKS[: 3 * PER_PAGE] and side.seen.index(bind) < side.seen.index(start)
    side.core.fetch_arrived(1, [0, 1, 2], 0.0)
    side.core.fetch_completed(1, 0.0)
    side.take()
    assert side.matched() == 3 and side.core.fetches.fetched_tokens == 3 * PAGE
    side.core.progress(1, A, TOKENS, 1.0, (*BLOCKS[3 * PER_PAGE :], 99))
    side.core.aux(1, A, b"", 1.0)
    side.take()
    assert side.state is EntryState.SERVED


def test_what_is_fetched_is_sent_once_the_engine_has_gone_on_behind_it() -> None:
    """An engine hears that a load is over and frees the blocks of a request that was aborted meanwhile, before its
    Abort is said. What it has computed something of it frees behind Ended."""
    side = offered(held=3)
    side.fetch(BLOCKS[: 3 * PER_PAGE])
    side.core.fetch_arrived(1, [0, 1, 2], 0.0)
    side.core.fetch_completed(1, 0.0)
    side.take()
    (send,) = side.of(OpenSend)
    assert side.matched() == 3 and send.pages_ready == 0
    again = peer.Ask(transfer=2, name=A.to_proto(), namespace_id=NAMESPACE, pages=2, tokens=TOKENS, tail_digest=TAIL)
    again.last_full_digest = digests("x", FULL)[-32:]
    side.ask_as(again, A)  # what decode had itself could not be restored
    (send,) = side.of(OpenSend)
    assert send.page_ids == tuple(side.core.entries[A].hold.pages[:2]) and send.pages_ready == 0
    side.core.progress(1, A, 4 * PAGE, 1.0, BLOCKS[3 * PER_PAGE :])
    side.take()
    assert [progress.pages_ready for progress in side.of(SendProgress)] == [4, 4]


def test_blocks_that_the_engine_holds_are_read_and_never_written() -> None:
    side = offered()
    held = PAGE + PAGE // PER_PAGE  # a page, and a block of the next
    side.fetch(BLOCKS, held)
    (start,), (bind,) = side.of(StartFetch), side.of(BindPages)
    assert (start.ask.first_page, start.ask.pages) == (1, FULL - 1)
    assert bind.blocks == (-1, *BLOCKS[PER_PAGE + 1 :])
    side.core.fetch_arrived(1, list(range(1, FULL)), 0.0)
    side.core.fetch_completed(1, 0.0)
    side.take()
    (bind,) = side.of(BindPages)
    assert bind.blocks[: len(BLOCKS)] == BLOCKS, "what is sent of them is read"
    assert side.matched() == FULL and side.core.fetches.fetched_tokens == (FULL - 1) * PAGE


@pytest.mark.parametrize("arrived", [0, 2])
def test_where_nothing_came_the_engine_may_begin_anew_with_other_blocks(arrived: int) -> None:
    side = offered()
    side.fetch(BLOCKS)
    side.core.fetch_arrived(1, list(range(arrived)), 0.0)
    side.core.fetch_stopped(1, 1, "wrong_parts", 0.0)
    side.core.fetch_drained(1, 0.0)
    side.take()
    assert side.matched() == arrived and not side.of(ZeroPages), "the engine's blocks are its own to clear"
    others = tuple(range((FULL + 1) * PER_PAGE - 1))
    side.core.progress(1, A, TOKENS, 1.0, others if arrived == 0 else (99,))
    side.take()
    assert not side.told("failed")
    (bind,) = side.of(BindPages)
    assert bind.blocks[0] == (0 if arrived == 0 else 99)


@pytest.mark.parametrize(("blocks", "held"), [((), 0), (BLOCKS, FULL * PAGE)])
def test_an_engine_that_wants_nothing_computes(blocks: tuple[int, ...], held: int) -> None:
    side = offered()
    side.fetch(blocks, held)
    assert side.matched() == 0 and not side.of(StartFetch)


@pytest.mark.parametrize(
    ("blocks", "held", "why"),
    [
        (BLOCKS[:-1], 0, f"blocks of {FULL * PAGE - PAGE // PER_PAGE} tokens are named; {FULL * PAGE} were offered"),
        (BLOCKS, 1, f"held_tokens is 1; it must be a multiple of {PAGE // PER_PAGE}, and {FULL * PAGE} at most"),
        ((*BLOCKS[:-1], 100), 0, "the engine has blocks 0 to 99"),
        ((*BLOCKS[:-1], BLOCKS[0]), 0, "a prompt's blocks are distinct"),
    ],
)
def test_a_wrong_fetch_fails_its_request_alone(blocks: tuple[int, ...], held: int, why: str) -> None:
    side = offered()
    side.fetch(blocks, held)
    (event,) = side.told("failed")
    assert why in event.failed.error.message and not side.of(StartFetch)
    side.core.abort(1, A, 0.0)
    side.take()
    assert A not in side.core.entries


@pytest.mark.parametrize("over", [False, True])
def test_two_fetches_do_not_write_a_block(over: bool) -> None:
    side = InBlocks()
    side.other_fetches((*BLOCKS[3:6], 99))
    assert len(side.of(StartFetch)) == 1
    if over:
        side.core.fetch_completed(1, 0.0)
    side.begin_in_blocks()
    side.ask_a()
    side.fetch(BLOCKS)
    assert bool(side.of(StartFetch)) is over
    if not over:
        (event,) = side.told("failed")
        assert f"blocks has {BLOCKS[3]}, which is fetched into for another" in event.failed.error.message


def test_a_fetch_behind_the_workers_last_word_is_refused_and_harms_nothing() -> None:
    side = offered(held=3)
    side.fetch(())
    side.core.progress(1, A, TOKENS, 1.0, (*BLOCKS, 99))
    side.core.aux(1, A, b"", 1.0)
    side.take()
    state = side.state
    with pytest.raises(RequestError, match="fetch comes before Begun"):
        side.fetch(BLOCKS)
    assert side.state is state and not side.told("failed")
    side.core.abort(1, A, 2.0)
    with pytest.raises(RequestError, match="fetch comes before Begun"):
        side.fetch(BLOCKS)
    side.core.tail_zeroed(A, 3.0)
    side.core.send_ended(1, 1, 3.0)
    assert A not in side.core.entries


@pytest.mark.parametrize("told", [False, True])
def test_a_fetch_that_crosses_failed_is_no_second_failure(told: bool) -> None:
    side = offered()
    side.core.done(1, A, 0.0)
    side.take()
    assert side.told("failed") and A not in side.core.entries
    if told:
        side.core.abort(1, A, 0.0)
        side.take()
    side.fetch(BLOCKS)
    assert not side.seen


def test_nobody_fetches_what_was_not_offered() -> None:
    side = InBlocks()
    side.begin_in_blocks()
    side.fetch(BLOCKS)
    (event,) = side.told("failed")
    assert "where Proceed says" in event.failed.error.message and not side.of(StartFetch)


@pytest.mark.parametrize("why", ["not waiting", "for pages", "warm-up"])
def test_nothing_is_offered_to_who_does_not_wait_for_it(why: str) -> None:
    side = InBlocks()
    side.ask_a()
    kinds = {"not waiting": wire.PATIENCE_NONE, "for pages": wire.PATIENCE_PAGES, "warm-up": wire.PATIENCE_FETCH}
    side.begin_in_blocks(kinds[why], warmup=why == "warm-up")
    assert side.matched() == 0 and not side.told("proceed")


@pytest.mark.parametrize("who", ["worker", "decode", "session", "deadline"])
@pytest.mark.parametrize("when", ["offered", "fetching"])
def test_a_request_in_blocks_that_ends_gives_them_back_when_no_copy_runs(who: str, when: str) -> None:
    side = offered()
    if when == "fetching":
        side.fetch(BLOCKS)
    if who == "worker":
        side.core.abort(1, A, 0.0)
    elif who == "decode":
        side.core.done(1, A, 0.0)
    elif who == "session":
        side.core.session_down(1, 0.0)
    else:
        side.core.tick(DEADLINE + 1)
    side.take()
    if who != "worker":
        assert side.told("failed")
    runs = when == "fetching" and who != "session"
    assert bool(side.of(StopFetch)) is runs
    if runs:
        if who != "worker":
            side.core.abort(1, A, 0.0)
            side.take()
        assert not side.told("ended"), "a copy may write the engine's blocks"
        side.core.fetch_drained(1, 0.0)
        side.take()
        assert side.told("ended")
    assert A not in side.core.entries and side.cache.locks == 0
