"""Ends that the worker's half reports: requests that end before their time, daemons that refuse, fail and come back."""

from __future__ import annotations

import pytest

from kvferry.connectors.orders import Begin, Cancel, Drop, Load, News, Orders, Release, Save, StorePages
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import DaemonRefused, connector_of, pool_of
from kvferry.connectors.worker_side import WorkerSide
from kvferry.proto import common_pb2
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.connectors.engine_memory import BLOCK, held_bytes
from tests.connectors.worker_side.engine_pair import (
    FACTS,
    PAGE,
    POOL_PAGES,
    Pair,
    exchange,
    new_name,
    new_prompt,
    push,
    received,
    same,
    sent,
    until,
)


def test_ends_before_their_time_are_reported_once_and_leave_nothing(pair: Pair) -> None:
    decode, prefill = pair.sides["decode"], pair.sides["prefill"]
    name, prompt = new_name(), new_prompt(2 * PAGE)
    # a load whose prefill never comes, cancelled before and after it began
    pair.give("decode", Load("a", name, prompt, "p", 0, (), tuple(range(4))), Cancel("a"))
    assert received(decode, "a") == set(range(4))
    pair.give("decode", Load("b", new_name(), prompt, "p", 0, (), tuple(range(4))))
    until(lambda: pair.stats("decode").requests.running)
    pair.give("decode", Cancel("b"))
    assert received(decode, "b") == set(range(4))
    pair.give("decode", Cancel("b"))  # it was reported already
    # a push that is dropped in the middle
    pair.give("prefill", Begin("c", new_name(), prompt), Save("c", PAGE, tuple(range(4))))
    pair.give("prefill", Drop("c"))
    sent(prefill, "c")
    # one whose blocks are taken away, and computed again in others
    again = new_name()
    pair.give("prefill", Begin("d", again, prompt), Save("d", PAGE, tuple(range(4))))
    pair.give("prefill", preempted=("d",))
    pair.give("prefill", Save("d", 2 * PAGE, (10, 11, 12, 13)), Release("d"))
    sent(prefill, "d")
    pair.give("decode", Load("d", again, prompt, "p", 0, (), (20, 21, 22, 23)))
    assert received(decode, "d") == set()
    assert same(pair, range(12, 14), range(22, 24))
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))
    assert decode.reports.take() == prefill.reports.take() == (set(), set())


def test_a_lease_that_fails_before_the_held_blocks_are_there_gets_none_of_them(pair: Pair) -> None:
    side, name, prompt = pair.sides["decode"], new_name(), new_prompt(2 * PAGE)
    side.take(Orders([Load("a", name, prompt, "p", PAGE, (40, 41), (42, 43))]))  # not computed yet
    until(lambda: pair.stats("decode").requests.running)
    pair.give("prefill", Begin("a", name, prompt))
    until(lambda: pair.stats("prefill").transfers.active)
    pair.give("prefill", Drop("a"))
    sent(pair.sides["prefill"], "a")
    client = side._sessions.client
    assert client is not None
    until(lambda: client._requests[name].failure is not None)
    before = held_bytes(pool_of(client).memory)
    side.forward_done()
    assert received(side, "a") == {42, 43}
    assert (held_bytes(pool_of(client).memory) == before).all(), "its pages were another's already"
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_a_prefill_that_gives_up_is_heard_of_before_the_deadline(pair: Pair) -> None:
    name, prompt = new_name(), new_prompt(2 * PAGE)
    pair.give("decode", Load("a", name, prompt, "p", 0, (), tuple(range(4))))
    pair.give("prefill", Begin("a", name, prompt), Save("a", PAGE, tuple(range(4))))
    until(lambda: pair.stats("prefill").transfers.active)
    pair.give("prefill", Drop("a"))
    assert received(pair.sides["decode"], "a", seconds=4.0) == set(range(4))
    sent(pair.sides["prefill"], "a")
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_a_prompt_that_the_prefill_daemon_has_no_room_for_is_told_to_the_scheduler(pair: Pair) -> None:
    side, prompt = pair.sides["prefill"], new_prompt((POOL_PAGES + 1) * PAGE)
    side.reports.take_news()
    push(pair, "a", new_name(), new_prompt(PAGE), (0, 1))
    sent(side, "a")
    assert side.reports.take_news() is None, "it is in the daemon's hands"
    push(pair, "b", new_name(), prompt, tuple(range(2 * POOL_PAGES + 2)))
    sent(side, "b")
    assert side.reports.take_news() == News(frozenset({"b"}))


def test_an_unknown_prefill_daemon_and_other_tokens_fail_the_load(pair: Pair) -> None:
    name, prompt = new_name(), new_prompt(2 * PAGE)
    pair.give("decode", Load("a", name, prompt, "nobody", 0, (), tuple(range(4))))
    assert received(pair.sides["decode"], "a") == set(range(4))
    push(pair, "b", name, prompt, tuple(range(4)))
    pair.give("decode", Load("b", name, new_prompt(2 * PAGE), "p", 0, (), tuple(range(4))))
    assert received(pair.sides["decode"], "b") == set(range(4))
    sent(pair.sides["prefill"], "b")


def test_an_engine_of_other_facts_is_refused_by_name(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for change, message in (
        ({"root_digest": bytes(32)}, "root_digest is .* give the digest chains of both engines the same root"),
        (
            {"digest_tokens": PAGE},
            f"digest_tokens is {BLOCK} here and {PAGE} there; give both engines the same hash block",
        ),
        ({"engine_layout": "other"}, "engine_layout is test, blocks of 8 here and other there"),
    ):
        fields = {name: getattr(FACTS, name) for name in FACTS.__slots__}
        side = pair.side("decode", NamespaceFacts(**{**fields, **change}))
        with pytest.raises(DaemonRefused, match=message) as refused:
            side.start()
        assert f"this engine does not start: {refused.value.__cause__}" in caplog.messages


def test_daemons_that_die_fail_what_runs_and_serve_again_when_they_are_back(pair: Pair) -> None:
    decode, prefill = pair.sides["decode"], pair.sides["prefill"]
    name, prompt = new_name(), new_prompt(2 * PAGE)
    pair.give("decode", Load("a", name, prompt, "p", 0, (), tuple(range(4))))
    until(lambda: pair.stats("decode").requests.running)
    pair.stack.kill(pair.daemons["decode"])
    assert received(decode, "a") == set(range(4))
    pair.give(
        "decode",
        Load("b", new_name(), prompt, "p", 0, (), tuple(range(4))),
        StorePages("c", new_name(), prompt, (1, 2, 3, 4)),
    )
    told: set[str] = set()
    until(lambda: [told.update(names) for names in decode.reports.take()] and told == {"b", "c"})
    assert decode.reports.take_bad() == set(range(4))

    prefill.reports.take_news()
    pair.give("prefill", Begin("d", new_name(), prompt), Save("d", PAGE, tuple(range(4))))
    until(lambda: pair.stats("prefill").requests.running)
    pair.stack.kill(pair.daemons["prefill"])
    pair.give("prefill", Release("d"))
    sent(prefill, "d")
    assert prefill.reports.take_news() == News(frozenset({"d"}), sessions={0: False})

    pair.start("prefill")
    pair.start("decode")
    until(lambda: prefill.reports.take_news() == News(sessions={0: True}))

    def works() -> bool:
        prompt = new_prompt(2 * PAGE)
        return exchange(pair, "e", new_name(), prompt, range(4), range(8, 12)) == set() and same(
            pair, range(4), range(8, 12)
        )

    until(works)
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_without_a_daemon_an_engine_starts_all_the_same(pair: Pair) -> None:
    settings = Settings(f"{pair.stack.folder}/nobody.sock", connect_seconds=0.3)
    engine = pair.engines["decode"]
    connect = connector_of(settings, common_pb2.ROLE_DECODE, FACTS.to_proto(), "alone", engine.mover)
    side = WorkerSide(settings, engine.map, engine.mover, connect)
    side.start()
    try:
        side.take(Orders([Load("a", new_name(), new_prompt(PAGE), "p", 0, (), (1, 2))]))
        assert received(side, "a") == {1, 2}
    finally:
        side.close()


@pytest.mark.parametrize("token", [9, None])
def test_a_prompt_that_is_whole_at_the_daemon_is_not_dropped_for_what_came_after(pair: Pair, token: int | None) -> None:
    """vLLM preempts a request whose last step is under way, and whose end that step is."""
    name, prompt, request = new_name(), new_prompt(2 * PAGE), f"late {token}"
    pair.give("prefill", Begin(request, name, prompt), Save(request, 2 * PAGE, tuple(range(4))))
    pushes = pair.sides["prefill"]._pushes
    until(lambda: request in pushes and pushes[request].handed)
    pair.give("prefill", preempted=(request,))
    pair.give("prefill", Drop(request, token))
    sent(pair.sides["prefill"], request)
    pair.give("decode", Load(request, name, prompt, "p", 0, (), tuple(range(20, 24))))
    bad = received(pair.sides["decode"], request)
    assert bad == (set() if token is not None else set(range(20, 24))), "an aborted one is nobody's"
