"""A prefill core with an engine that has blocks of its own: how long it waits for what is fetched, and for pages."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.effects import StartFetch, WakeAt
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.way_back.choice import ALWAYS, AUTO, FETCH, NO_PAGES, NOT_HELD, SLOW, WayBackLimits
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Prefill, digests, name

A, B = name(1), name(2)
FULL = 5  # pages of a prompt; a token is behind them
TOKENS = FULL * PAGE + 1
TAIL = b"T" * 32
POOL = 12
OTHERS = 8  # pages of B's prompt


class Waiting(Prefill):
    """Session 1 has a way back."""

    def __init__(self, setting: str = ALWAYS, page_bytes: int = 64) -> None:
        super().__init__()
        self.cache = Cache(POOL, PAGE)
        self.core = PrefillCore(self.cache, PrefillLimits(table=8, way_back=WayBackLimits(setting, page_bytes)))
        self.core.fetches.session_up(1)

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

    def ask_a(self, held: int = FULL, *, now: float = 0.0, full: int = FULL) -> None:
        ask = peer.Ask(
            transfer=1,
            name=A.to_proto(),
            namespace_id=NAMESPACE,
            first_page=full,
            pages=1,
            tokens=full * PAGE + 1,
            last_full_digest=digests("x", full)[-32:],
            tail_digest=TAIL,
            held_tokens=held * PAGE,
        )
        self.core.ask(1, A, ask, DEADLINE, now)
        self.take()

    def release_b(self, now: float) -> None:
        self.core.abort(1, B, now)
        self.core.send_ended(1, 0, now)
        self.take()

    @property
    def state(self) -> EntryState:
        return self.core.entries[A].state

    def matched(self) -> int:
        (event,) = self.told("begun")
        return event.begun.matched_tokens // PAGE

    def choices(self) -> dict[str, int]:
        return dict(self.core.fetches.judge.choices)


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
    side = full_pool(AUTO)
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
        bytes_ = round(0.25 * PAGE / 10_000 * 1e9)  # a page takes a quarter of the time of its computation
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
    speed._tokens = 0.0
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
    assert speed.tokens_per_second == pytest.approx(((POOL - 3) * PAGE + 1) / (3.0 - began))
