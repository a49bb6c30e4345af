"""A prefill core whose prompts wait for what is fetched for another: which ones do, and what they have then."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import LookUp, StartFetch
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.way_back.choice import AUTO
from kvferry.radix.digests import DIGEST_BYTES
from tests.daemon.core.way_back.test_fetches import FULL, A, B
from tests.daemon.core.way_back.test_look_ups import ASKER, OTHER, THIRD, Looking, cheap, searching
from tests.regressions.request_cores import PAGE, digests, name

__all__ = ["cheap"]  # the fixture


def followed(pages: int = FULL, held: int = FULL) -> Looking:
    """A fetches all of `x`, and B, of so many pages of it, waits for that."""
    side = Looking()
    side.asked_for(FULL)
    side.another(B, "x", held, pages)
    assert side.core.entries[B].state is EntryState.LOOKING and not (side.of(StartFetch) or side.of(LookUp))
    return side


def test_what_is_being_fetched_is_fetched_once() -> None:
    side = followed()
    free = side.cache.pool.free
    side.step("arrived", 1, list(range(FULL)))
    told = side.told("begun")
    side.step("completed", 1)
    begun = {event.begun.name.request_id: event.begun for event in told + side.told("begun")}
    a, b = begun[A.request_id], begun[B.request_id]
    assert a.matched_tokens == b.matched_tokens == a.fetched_tokens == FULL * PAGE and not b.fetched_tokens
    assert list(a.pages[:FULL]) == list(b.pages[:FULL]) and a.pages[FULL] != b.pages[FULL]
    assert side.cache.pool.free == free + FULL, "its own pages are free again"
    fetches = side.core.fetches
    assert (fetches.counters.opened, fetches.fetched_tokens, fetches.followed_tokens) == (1, FULL * PAGE, FULL * PAGE)
    for session, each in ((ASKER, A), (OTHER, B)):
        side.core.abort(1, each, 0.0)
        side.core.send_ended(session, int.from_bytes(each.request_id, "big"), 0.0)
    side.take()
    counts = side.cache.pool.counts()
    assert side.cache.locks == 0 and counts.leased == 0 and counts.cached == FULL


def test_who_follows_fetches_what_is_lacking_then() -> None:
    side = followed()
    side.step("arrived", 1, [0, 1])
    side.step("stopped", 1, ASKER, "refused")
    side.step("drained", 1)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.first_page, start.ask.pages) == (OTHER, 2, 3)
    assert Name(start.ask.name.request_id, 1) == B


def test_a_prompt_that_has_only_a_beginning_in_common_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Looking()
    side.asked_for(FULL)
    whole = digests("x", 2) + digests("y", FULL)[2 * DIGEST_BYTES :]
    monkeypatch.setattr("tests.daemon.core.way_back.test_look_ups.digests", lambda prompt, pages: whole)
    side.another(B, "x", FULL)
    (start,) = side.of(StartFetch)
    assert start.session == OTHER


def test_who_looked_it_up_meanwhile_follows() -> None:
    side = searching()
    side.another(B, "x", 0)
    assert side.asked_whom() == [ASKER, THIRD]
    side.found(THIRD, FULL, 1)
    assert len(side.of(StartFetch)) == 1
    side.found(THIRD, FULL, 2)
    assert not side.of(StartFetch) and side.core.entries[B].state is EntryState.LOOKING
    side.step("arrived", 1, list(range(FULL)))
    assert len(side.told("begun")) == 1
    side.step("completed", 1)
    assert len(side.told("begun")) == 1


@pytest.mark.parametrize("why", ["aborted", "session"])
def test_who_follows_does_not_end_with_the_first(why: str) -> None:
    side = followed()
    side.step("arrived", 1, [0])
    if why == "aborted":
        side.core.abort(1, A, 0.0)
        side.core.fetch_drained(1, 0.0)
    else:
        side.core.session_down(ASKER, 0.0)
    side.take()
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.first_page) == (OTHER, 1)


def test_who_follows_is_not_begun_where_its_own_session_has_ended() -> None:
    """It is that of the fetch, too, which ends first."""
    side = Looking()
    side.asked_for()
    side.found(OTHER, FULL)
    side.another(B, "x", 0)
    assert side.core.entries[B].state is EntryState.LOOKING
    side.core.session_down(OTHER, 0.0)
    side.take()
    assert {event.begun.name.request_id for event in side.told("begun")} == {A.request_id}
    assert B not in side.core.entries and not side.of(LookUp)


def test_who_follows_and_ends_leaves_nothing() -> None:
    side = followed()
    side.core.abort(1, B, 0.0)
    side.take()
    assert B not in side.core.entries
    side.step("arrived", 1, list(range(FULL)))
    side.step("completed", 1)
    assert len(side.told("begun")) == 1


def test_who_has_all_that_it_could_have_does_not_wait_for_the_end() -> None:
    side = followed(pages=3)
    side.step("arrived", 1, [0, 1])
    assert not side.told("begun")
    side.step("arrived", 1, [2])
    (event,) = side.told("begun")
    assert event.begun.name.request_id == B.request_id and event.begun.matched_tokens == 3 * PAGE
    assert side.state is EntryState.FETCHING


def test_who_has_waited_for_one_fetch_waits_for_no_other() -> None:
    """Nor does anybody wait for its own."""
    side = followed()
    third = name(3)
    side.another(third, "x", FULL)
    assert side.core.entries[third].state is EntryState.LOOKING and not side.of(StartFetch)
    side.step("stopped", 1, ASKER, "refused")
    side.step("drained", 1)
    starts = [Name(start.ask.name.request_id, 1) for start in side.of(StartFetch)]
    assert starts == [B, third]
    side.another(name(4), "x", FULL)
    assert len(side.of(StartFetch)) == 1


def test_what_the_engine_holds_itself_is_not_waited_for() -> None:
    side = Looking()
    side.asked_for(held=3)
    for session in (OTHER, THIRD):
        side.found(session, 0)
    assert side.of(StartFetch)
    side.another(B, "x", 0, engine=3)
    assert side.asked_whom() == [ASKER, THIRD], "the fetch brings the first three"
    side.another(name(3), "x", 0, engine=2)
    assert side.core.entries[name(3)].state is EntryState.LOOKING and not side.of(LookUp)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(("pages", "waits"), [(1, False), (2, True)])
def test_who_would_compute_it_sooner_does_not_wait(pages: int, waits: bool) -> None:
    """The fetch may take a quarter of the time in which its five pages would be computed."""
    side = Looking(AUTO)
    side.asked_for(FULL)
    assert side.of(StartFetch)
    side.another(B, "x", 0, pages)
    assert (B in {entry.name for entry in side.core.fetches._following}) is waits
