"""The server that takes a request: the rule alone, and through the front end with real look-ups."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.front.routing import (
    DecodeCandidate,
    Lookup,
    PrefillCandidate,
    RoutingRule,
    choose_decode,
    choose_prefill,
    overloaded,
    pages_needed,
)
from tests.support.front_stack import Fault, Stack

PAGE = 16


def server(
    matched: int = 0, load: int = 0, *, outstanding: int = 0, assigned: int = 0, free: int = 1000, waiting: int = 0
) -> DecodeCandidate:
    return DecodeCandidate(outstanding, assigned, Lookup(matched, load, waiting, free))


def choose(*candidates: DecodeCandidate, pages: int = 10) -> int:
    return choose_decode(candidates, pages=pages, page_size=PAGE)


def test_the_longest_match_wins() -> None:
    assert choose(server(16), server(64, load=3), server(32)) == 1


def test_equal_matches_go_to_the_least_loaded_then_to_the_least_used() -> None:
    assert choose(server(32, load=2), server(32, load=1), server(16)) == 1
    assert choose(server(assigned=5), server(assigned=4), server(assigned=9)) == 1


def test_a_server_above_the_load_bound_is_passed_over() -> None:
    assert choose(server(64, load=8), server(), server()) == 0  # bound: 1.5 x 8/3 + 4 = 8
    assert choose(server(64, load=9), server(), server()) == 1  # 1.5 x 3 + 4 = 8.5
    assert choose(server(64, load=5, waiting=5), server(), server()) == 1
    assert choose(server(64, outstanding=10), server(), server()) == 1


def test_the_second_best_match_is_next() -> None:
    assert choose(server(64, load=20), server(0), server(32, load=1)) == 2


def test_a_server_whose_pages_do_not_hold_the_request_is_passed_over() -> None:
    assert choose(server(64, free=6), server(0, free=10), pages=10) == 0  # 10 pages, 4 of them matched
    assert choose(server(64, free=5), server(0, free=10), pages=10) == 1


def test_when_all_are_overloaded_none_is() -> None:
    assert choose(server(16, free=0), server(32, free=0), pages=10) == 1


def test_a_failed_look_up_counts_as_no_match() -> None:
    unknown = DecodeCandidate(outstanding=0, assigned=0, lookup=None)
    assert choose(unknown, server(16, load=3)) == 1
    assert choose(unknown, server(0, load=1)) == 0
    assert choose(unknown) == 0


def test_the_rule_can_be_changed() -> None:
    strict = RoutingRule(load_factor=1.0, load_slack=0.0)
    both = [server(64, load=2), server(0, load=1)]
    assert choose_decode(both, pages=1, page_size=PAGE, rule=strict) == 1


def test_prefill_goes_to_the_fewest_outstanding() -> None:
    assert choose_prefill([PrefillCandidate(2, 0), PrefillCandidate(1, 9), PrefillCandidate(1, 8)]) == 2


@pytest.mark.parametrize(("prompt", "new", "pages"), [(1, 1, 1), (16, 1, 1), (16, 2, 2), (17, 16, 2), (17, 17, 3)])
def test_pages_needed(prompt: int, new: int, pages: int) -> None:
    assert pages_needed(prompt, new, PAGE) == pages


lookups = st.none() | st.builds(
    Lookup, st.integers(0, 20).map(lambda n: n * PAGE), st.integers(0, 30), st.integers(0, 30), st.integers(0, 40)
)
candidates = st.lists(st.builds(DecodeCandidate, st.integers(0, 30), st.integers(0, 99), lookups), min_size=1)


@given(candidates, st.integers(1, 40))
def test_no_fit_server_with_a_longer_match_is_left_aside(servers: list[DecodeCandidate], pages: int) -> None:
    chosen = choose_decode(servers, pages=pages, page_size=PAGE)
    mean = sum(candidate.load for candidate in servers) / len(servers)
    fit = [c for c in servers if not overloaded(c, mean_load=mean, pages=pages, page_size=PAGE)]
    assert servers[chosen].matched_tokens == max(c.matched_tokens for c in fit or servers)
    assert not fit or servers[chosen] in fit


def ask(stack: Stack, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "return_token_ids": True, **fields}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_conversations_stay_where_their_pages_are() -> None:
    with Stack(prefill=2, decode=3) as stack:
        prompts = [f"conversation {c} begins in this way: " + "blah " * 20 for c in range(6)]
        homes: list[str] = []
        for turn in range(3):
            for c, prompt in enumerate(prompts):
                reply = ask(stack, prompt)
                if turn:
                    assert reply["kvferry"]["decode"] == homes[c]
                    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= (len(prompt) - 40) // PAGE * PAGE
                else:
                    homes.append(reply["kvferry"]["decode"])
                prompts[c] = prompt + reply["choices"][0]["text"] + " and then? "
        assert {homes.count(d.address) for d in stack.decode} == {2}
        assert {len(p.prefills) for p in stack.prefill} == {9}
        counts = httpx.get(f"{stack.url}/kvferry/stats").json()["lookups"]
        assert counts == {"asked": 54, "failed": 0, "skipped": 0}


def test_a_loaded_server_is_passed_over() -> None:
    with Stack(decode=2) as stack:
        first = ask(stack, "x" * 100)["kvferry"]["decode"]
        home, other = sorted(stack.decode, key=lambda d: d.address != first)
        home.lookup_load = 100
        assert ask(stack, "x" * 100)["kvferry"]["decode"] == other.address
        home.lookup_load = 0
        home.free_pages = 0
        assert ask(stack, "x" * 100 + "y")["kvferry"]["decode"] == other.address


def test_requests_at_a_time_are_spread_before_any_look_up_shows_them() -> None:
    with Stack(decode=3) as stack:

        async def slow() -> None:
            await asyncio.sleep(0.5)

        for decode in stack.decode:
            decode.before = slow
        threads = [threading.Thread(target=ask, args=(stack, f"request number {i}")) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {len(d.decodes) for d in stack.decode} == {3}


def test_a_daemon_that_does_not_answer_is_skipped_for_a_while() -> None:
    with Stack(decode=2) as stack:
        for i in range(4):
            ask(stack, f"{i}" * 40)
        bad, good = stack.decode
        bad.lookup_fault = Fault(grpc.StatusCode.UNAVAILABLE, "no")
        for _ in range(3):
            assert ask(stack, "z" * 40 + "?")["usage"]["prompt_tokens"] == 41
        assert bad.lookups == 5
        assert good.lookups == 7
        counts = httpx.get(f"{stack.url}/kvferry/stats").json()["lookups"]
        assert counts == {"asked": 12, "failed": 1, "skipped": 2}


def test_one_server_is_not_asked() -> None:
    with Stack() as stack:
        ask(stack, "x" * 40)
        assert stack.decode[0].lookups == 0


def test_a_short_unmatched_part_needs_no_prefill_server() -> None:
    def configure(stack: Stack) -> None:
        stack.decode[0].local_prefill_max_tokens = 20

    with Stack(configure=configure) as stack:
        prefill, decode = stack.prefill[0], stack.decode[0]
        assert ask(stack, "x" * 20)["kvferry"]["prefill"] is None
        assert decode.lookups == 0  # so short that nothing need be known
        assert not prefill.prefills
        assert ask(stack, "y" * 64)["kvferry"]["prefill"] == prefill.address
        assert ask(stack, "y" * 64 + "z" * 20)["kvferry"]["prefill"] is None
        assert decode.decodes[-1].prefill == ""
        assert ask(stack, "y" * 64 + "w" * 21)["kvferry"]["prefill"] == prefill.address
        assert decode.lookups == 3
        assert httpx.get(f"{stack.url}/kvferry/stats").json()["local_prefill"] == 2
        # of a warm-up nothing is matched
        assert ask(stack, "y" * 64 + "z" * 20, kvferry_warmup=True)["kvferry"]["prefill"] == prefill.address
        assert decode.lookups == 3
