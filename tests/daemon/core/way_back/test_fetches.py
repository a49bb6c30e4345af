"""A prefill core that fetches: when it waits, what it believes to have, and how a fetch ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.effects import OpenSend, StartFetch, StopFetch, WakeAt, ZeroPages
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.way_back.choice import (
    ALWAYS,
    AUTO,
    FETCH,
    NO_ASK,
    NO_SESSION,
    NOT_HELD,
    OFF,
    TOKENS_PER_SECOND,
    WayBackLimits,
)
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Prefill, digests, name

A, B = name(1), name(2)
FULL = 5  # pages of A's prompt; a token is behind them
TOKENS = FULL * PAGE + 1
TAIL = b"T" * 32


def ask_of(number: Name, names: bytes, held: int) -> peer.Ask:
    """For these full pages and a token more, of which the decode daemon holds the first."""
    pages = len(names) // DIGEST_BYTES
    return peer.Ask(
        transfer=int.from_bytes(number.request_id, "big"),
        name=number.to_proto(),
        namespace_id=NAMESPACE,
        first_page=pages,
        pages=1,
        tokens=pages * PAGE + 1,
        last_full_digest=names[-DIGEST_BYTES:],
        tail_digest=TAIL,
        held_tokens=held * PAGE,
    )


class Fetching(Prefill):
    """Session 1 has a way back."""

    def __init__(
        self,
        setting: str = ALWAYS,
        *,
        pool: int = 64,
        page_bytes: int = 64,
        zero_freed: bool = False,
        quotas: Mapping[bytes, Quota] | None = None,
    ) -> None:
        super().__init__()
        self.cache = Cache(pool, PAGE, limits=CacheLimits(zero_freed=zero_freed, quotas=quotas))
        self.core = PrefillCore(self.cache, PrefillLimits(table=8, way_back=WayBackLimits(setting, page_bytes)))
        self.core.fetches.session_up(1)

    def begin_a(self, *, warmup: bool = False, now: float = 0.0) -> None:
        request = wire.Begin(
            name=A.to_proto(), digests=digests("x", FULL), tokens=TOKENS, tail_digest=TAIL, warmup=warmup
        )
        self.core.begin(1, NAMESPACE, A, request, DEADLINE, now)
        self.take()

    def asked_b(self, prompt: str, *, session: int = 1) -> None:
        """B, which the session asks for and holds all full pages of."""
        names = digests(prompt, FULL)
        self.core.ask(session, B, ask_of(B, names, FULL), DEADLINE, 0.0)
        request = wire.Begin(name=B.to_proto(), digests=names, tokens=TOKENS, tail_digest=TAIL)
        self.core.begin(1, NAMESPACE, B, request, DEADLINE, 0.0)
        self.take()

    def ask_a(self, held: int = FULL, *, session: int = 1, now: float = 0.0, full: int = FULL) -> None:
        self.core.ask(session, A, ask_of(A, digests("x", full), held), DEADLINE, now)
        self.take()

    @property
    def state(self) -> EntryState:
        return self.core.entries[A].state

    def matched(self) -> int:
        """Pages that the worker is told are held, in the last step."""
        (event,) = self.told("begun")
        return event.begun.matched_tokens // PAGE

    def choices(self) -> dict[str, int]:
        return dict(self.core.fetches.judge.choices)

    def step(self, call: str, *words: object) -> None:
        getattr(self.core, f"fetch_{call}")(*words, 0.0)
        self.take()


def fetching(setting: str = ALWAYS, *, held: int = FULL, zero_freed: bool = False) -> Fetching:
    side = Fetching(setting, zero_freed=zero_freed)
    side.ask_a(held)
    side.begin_a()
    assert side.state is EntryState.FETCHING and not side.told("begun")
    return side


def test_what_decode_holds_is_asked_back_before_the_worker_has_its_pages() -> None:
    side = fetching(held=3)
    (start,) = side.of(StartFetch)
    ask = start.ask
    assert (start.session, ask.first_page, ask.pages, ask.tokens) == (1, 0, 3, TOKENS)
    assert ask.last_full_digest == digests("x", FULL)[-32:] and ask.tail_digest == TAIL
    assert start.page_ids == tuple(side.core.entries[A].hold.pages[:3])
    assert not side.of(OpenSend) and side.choices() == {FETCH: 1}


def test_the_worker_is_told_of_what_has_arrived_and_the_next_prompt_matches_it() -> None:
    side = fetching(held=3)
    side.step("arrived", 1, [0, 1, 2])
    side.step("completed", 1)
    assert side.matched() == 3 and side.state is EntryState.COMPUTING and side.of(OpenSend)
    assert side.told("begun")[0].begun.fetched_tokens == 3 * PAGE
    assert side.core.matched_tokens(NAMESPACE, digests("x", FULL)) == 3 * PAGE
    side.core.progress(1, A, TOKENS, 0.0)
    side.core.aux(1, A, b"token", 0.0)
    side.take()
    assert side.core.fetches.fetched_tokens == 3 * PAGE and side.core.fetches.counters.completed == 1


def test_the_last_token_is_computed_in_any_case() -> None:
    side = Fetching()
    request = wire.Begin(name=A.to_proto(), digests=digests("x", 2), tokens=2 * PAGE)
    ask = peer.Ask(
        transfer=1,
        name=A.to_proto(),
        namespace_id=NAMESPACE,
        tokens=2 * PAGE,
        last_full_digest=digests("x", 2)[-32:],
        held_tokens=2 * PAGE,
    )
    side.core.ask(1, A, ask, DEADLINE, 0.0)
    side.core.begin(1, NAMESPACE, A, request, DEADLINE, 0.0)
    side.take()
    (start,) = side.of(StartFetch)
    assert start.ask.pages == 1


def test_pages_behind_a_gap_do_not_count() -> None:
    side = fetching()
    side.step("arrived", 1, [0, 2, 3])
    side.core.wake(100.0)
    side.take()
    (stop,) = side.of(StopFetch)
    assert stop.transfer == 1 and not side.told("begun"), "a copy into its pages may run"
    side.step("drained", 1)
    assert side.matched() == 1
    assert side.core.matched_tokens(NAMESPACE, digests("x", FULL)) == PAGE


def test_what_came_behind_a_gap_is_cleared_where_pages_are() -> None:
    side = fetching(zero_freed=True)
    side.step("arrived", 1, [0, 2])
    side.step("stopped", 1, 1, "wrong_parts")
    side.step("drained", 1)
    (zero,) = side.of(ZeroPages)
    assert zero.pages == tuple(side.core.entries[A].hold.pages[1:FULL])
    assert side.seen.index(zero) < side.seen.index(next(e for e in side.seen if e not in side.of(ZeroPages)))


@pytest.mark.parametrize("why", ["refused", "wrong_parts"])
def test_a_fetch_that_goes_wrong_costs_time_alone(why: str) -> None:
    side = fetching()
    side.step("arrived", 1, [0])
    side.step("stopped", 1, 1, why)
    side.step("stopped", 1, 1, why)
    assert not side.of(StopFetch), "stopped twice"
    side.step("drained", 1)
    assert side.matched() == 1
    counters = side.core.fetches.counters
    assert (counters.opened, counters.aborted, dict(counters.aborts)) == (1, 1, {why: 1})


def test_a_session_stops_no_other_ones_fetch() -> None:
    side = fetching()
    side.step("stopped", 2, 1, "refused")
    assert not side.of(StopFetch) and side.state is EntryState.FETCHING


def test_what_arrives_when_it_is_stopped_counts_until_no_copy_runs() -> None:
    side = fetching()
    side.core.wake(100.0)
    side.take()
    side.step("arrived", 1, [0, 1])
    side.step("drained", 1)
    assert side.matched() == 2


@pytest.mark.parametrize("who", ["worker", "decode", "deadline"])
def test_the_pages_of_a_request_that_ends_are_kept_until_no_copy_runs(who: str) -> None:
    side = fetching()
    side.step("arrived", 1, [0])
    if who == "worker":
        side.core.abort(1, A, 0.0)
    elif who == "decode":
        side.core.done(1, A, 0.0)
    else:
        side.core.tick(DEADLINE + 1)
    side.take()
    assert side.of(StopFetch) and not side.told("ended")
    counts = side.cache.pool.counts()
    assert counts.leased == FULL and counts.cached == 1
    side.step("drained", 1)
    assert A not in side.core.entries and side.cache.locks == 0
    assert side.cache.pool.counts().leased == 0 and not side.told("begun")
    assert side.core.matched_tokens(NAMESPACE, digests("x", FULL)) == PAGE, "what arrived stays"


def test_the_end_of_its_session_fails_it_and_nothing_is_left() -> None:
    side = fetching()
    side.step("arrived", 1, [0])
    side.core.session_down(1, 0.0)
    side.take()
    assert side.told("failed") and not side.of(StopFetch)
    assert len(side.core.fetches) == 0 and A not in side.core.entries and side.cache.locks == 0


def test_a_request_that_was_ending_ends_with_its_session() -> None:
    side = fetching()
    side.core.abort(1, A, 0.0)
    side.core.session_down(1, 0.0)
    side.take()
    assert A not in side.core.entries and side.told("ended") and side.cache.pool.counts().leased == 0


def test_the_end_of_a_session_ends_its_own_fetches_alone() -> None:
    side = fetching()
    side.core.fetches.session_up(2)
    side.asked_b("y", session=2)
    assert len(side.core.fetches) == 2
    side.core.session_down(2, 0.0)
    side.take()
    assert len(side.core.fetches) == 1 and side.state is EntryState.FETCHING and B not in side.core.entries
    side.step("arrived", 1, list(range(FULL)))
    side.step("completed", 1)
    assert side.matched() == FULL


# -- before an Ask -------------------------------------------------------------------------------------------------


def test_an_ask_is_waited_for_and_not_longer() -> None:
    side = Fetching(AUTO)
    side.begin_a(now=5.0)
    (wake,) = side.of(WakeAt)
    assert side.state is EntryState.LOOKING and not side.told("begun")
    side.core.wake(wake.at - 1e-6)
    side.take()
    assert side.state is EntryState.LOOKING
    side.core.wake(wake.at)
    side.take()
    assert side.matched() == 0 and side.choices() == {NO_ASK: 1}
    side.ask_a(now=wake.at + 1)
    assert side.state is EntryState.COMPUTING and side.of(OpenSend), "it came too late"


def test_one_that_would_be_computed_behind_another_waits_on_meanwhile() -> None:
    side = Fetching(AUTO)
    side.begin_a()
    (wake,) = side.of(WakeAt)
    request = wire.Begin(name=B.to_proto(), digests=digests("y", FULL), tokens=TOKENS, tail_digest=TAIL)
    side.core.begin(1, NAMESPACE, B, request, DEADLINE, 0.0)
    side.take()
    side.core.wake(wake.at)
    side.take()
    (later,) = (each.at for each in side.of(WakeAt))
    assert side.state is EntryState.COMPUTING and side.core.entries[B].state is EntryState.LOOKING
    assert wake.at < later <= TOKENS / TOKENS_PER_SECOND
    side.core.progress(1, A, TOKENS, later)
    side.take()
    side.core.wake(later)
    side.take()
    assert side.core.entries[B].state is EntryState.COMPUTING and side.choices() == {NO_ASK: 2}


def test_an_ask_that_comes_in_time_is_answered() -> None:
    side = Fetching()
    side.begin_a()
    side.ask_a(held=2)
    (start,) = side.of(StartFetch)
    assert start.ask.pages == 2 and side.state is EntryState.FETCHING


def test_an_ask_by_which_nothing_is_held_ends_the_wait() -> None:
    side = Fetching()
    side.begin_a()
    side.ask_a(held=0)
    assert side.matched() == 0 and side.choices() == {NOT_HELD: 1} and side.of(OpenSend)


def test_another_prompts_ask_brings_nothing() -> None:
    side = Fetching()
    ask = peer.Ask(
        transfer=1,
        name=A.to_proto(),
        namespace_id=NAMESPACE,
        tokens=TOKENS,
        last_full_digest=digests("y", FULL)[-32:],
        tail_digest=TAIL,
        held_tokens=FULL * PAGE,
    )
    side.core.ask(1, A, ask, DEADLINE, 0.0)
    side.begin_a()
    assert not side.of(StartFetch) and side.matched() == 0


def test_who_ends_while_an_ask_is_waited_for_leaves_nothing() -> None:
    side = Fetching()
    side.begin_a()
    side.core.abort(1, A, 0.0)
    side.core.wake(100.0)
    side.take()
    assert A not in side.core.entries and side.told("ended") and not side.told("begun")


@pytest.mark.parametrize("why", ["off", "warm-up", "no session", "all matched"])
def test_nothing_is_waited_for_where_nothing_can_come(why: str) -> None:
    side = Fetching(OFF if why == "off" else ALWAYS)
    if why == "no session":
        side.core.session_down(1, 0.0)
    if why == "all matched":
        side.core.fetches.session_down(1)
        side.begin(B, "x", FULL)
        side.compute(B, FULL)
        side.core.fetches.session_up(1)
    side.begin_a(warmup=why == "warm-up")
    assert side.matched() == (FULL if why == "all matched" else 0) and not side.of(WakeAt)


def test_a_session_without_a_way_back_is_not_asked() -> None:
    side = Fetching()
    side.ask_a(session=2)
    side.begin_a()
    assert side.matched() == 0 and side.choices() == {NO_SESSION: 1}


def test_pages_that_another_computed_meanwhile_stay_the_requests_own() -> None:
    side = Fetching()
    last = digests("x", 3)[-32:]
    ask = peer.Ask(transfer=1, name=B.to_proto(), namespace_id=NAMESPACE, tokens=3 * PAGE, last_full_digest=last)
    side.core.ask(2, B, ask, DEADLINE, 0.0)
    side.begin(B, "x", 3)
    assert side.told("begun"), "its session has no way back"
    side.ask_a(2)
    side.begin_a()
    assert side.of(StartFetch)
    side.core.progress(1, B, 3 * PAGE, 0.0)
    side.step("arrived", 1, [0, 1])
    side.step("completed", 1)
    pages = side.core.entries[A].hold.pages[:2]
    assert side.matched() == 2
    assert set(side.cache.pool.states(pages)) == {PageState.LEASED}, "the other's pages are the tree's"


def test_a_namespace_fetches_within_its_quota() -> None:
    """Room for one such prompt: the next one waits for pages of its own, and what was fetched before makes room."""
    side = Fetching(quotas={NAMESPACE: Quota(hard=FULL + 1)})
    space = side.cache.namespace(NAMESPACE)
    side.ask_a()
    side.begin_a()
    assert side.state is EntryState.FETCHING and space.used == FULL + 1
    side.asked_b("y")
    side.step("arrived", 1, list(range(FULL)))
    side.step("completed", 1)
    assert side.matched() == FULL and side.cache.pool.free == 64 - (FULL + 1)
    assert side.core.entries[B].state is EntryState.WAITING
    side.core.abort(1, A, 0.0)
    side.core.send_ended(1, int.from_bytes(A.request_id, "big"), 0.0)
    side.take()
    (start,) = side.of(StartFetch)
    assert A not in side.core.entries and Name(start.ask.name.request_id, 1) == B and start.ask.pages == FULL
    assert space.used == FULL + 1 and space.evicted == FULL, "all that was fetched for A"
    side.step("arrived", 2, list(range(FULL)))
    assert space.used == FULL + 1
