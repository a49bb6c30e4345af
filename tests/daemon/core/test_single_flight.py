"""Who brings a page that is on its way, when whoever was to bring it goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.daemon.core.single_flight import Arrivals


@dataclass(eq=False)
class Request:
    order: int
    can_ask: bool = True
    missing: set[int] = field(default_factory=set)
    filling: set[int] = field(default_factory=set)


def test_the_oldest_that_can_ask_takes_over() -> None:
    arrivals: Arrivals[Request] = Arrivals()
    filler, local, young, old = Request(1), Request(2, can_ask=False), Request(4), Request(3)
    arrivals.expect(7, filler)
    for waiter in (young, local, old):
        assert not arrivals.follow(7, waiter)
    arrivals.leave(filler)
    assert arrivals.hand_over(filler) == {old: [7]}
    assert (filler.filling, old.filling) == (set(), {7})
    assert arrivals.arrived([7]) == [local, old, young]


def test_nobody_takes_over_from_itself() -> None:
    """It goes on waiting for what another took over from it, and gets back: then it is both."""
    arrivals: Arrivals[Request] = Arrivals()
    first, second = Request(1), Request(2)
    arrivals.expect(7, first)
    arrivals.follow(7, second)
    arrivals.take_over([7], first, second)
    arrivals.leave(first)
    assert arrivals.hand_over(second) == {}
    assert arrivals.abandoned([7]) == 0


def test_who_goes_brings_its_pages_until_they_are_handed_over() -> None:
    """Copies into them may run."""
    arrivals: Arrivals[Request] = Arrivals()
    first, second = Request(1), Request(2)
    arrivals.expect(7, first)
    arrivals.leave(first)
    assert arrivals.abandoned([7]) is None
    assert not arrivals.follow(7, second)
    assert arrivals.hand_over(first) == {second: [7]}


def test_the_next_to_match_an_abandoned_page_brings_it() -> None:
    arrivals: Arrivals[Request] = Arrivals()
    first, second = Request(1), Request(2)
    arrivals.expect(7, first)
    arrivals.leave(first)
    assert arrivals.hand_over(first) == {}
    assert arrivals.abandoned([3, 7]) == 1
    assert arrivals.follow(7, second) and second.filling == {7}
    assert arrivals.abandoned([3, 7]) is None


def test_who_cannot_ask_waits_no_more_for_a_page_whose_restore_failed() -> None:
    arrivals: Arrivals[Request] = Arrivals()
    local, asks = Request(1, can_ask=False), Request(2)
    arrivals.restoring([7, 8])
    for page in (7, 8):
        arrivals.follow(page, local)
        arrivals.follow(page, asks)
    assert arrivals.lost([7]) == ({asks: [7]}, [local])
    assert not local.missing and arrivals.arrived([8]) == [asks]
