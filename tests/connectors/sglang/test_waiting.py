"""Which of prefill's computed prompts are moved to the daemon's host tier, and when."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest

from kvferry.client.requests import RequestName
from kvferry.connectors.sglang.transfers import AGAIN_SECONDS, PageTransfer, PromptPlace, SentPrompt
from kvferry.connectors.sglang.waiting import WaitingPrompts

PAGE = 4


@dataclass(eq=False)
class Ahead:
    """As the sender of a prompt is."""

    order: SentPrompt | None
    pages: int

    @property
    def pages_held(self) -> int:
        return 0 if self.order is not None and self.order.gave_back else self.pages


class World:
    def __init__(self, most: float, stows: bool = True) -> None:
        self.moved: list[SentPrompt] = []
        self.says = [True]  # other ranks, of each prompt; the last of it is that of those behind it
        self.waiting = WaitingPrompts(most, self.moved.append, lambda: stows, self.agree)
        self.prompts: list[Ahead] = []  # SGLang has them
        self.count = 0

    def agree(self, own: list[bool]) -> list[bool]:
        others = [*self.says, *self.says[-1:] * len(own)]
        return [mine and theirs for mine, theirs in zip(own, others, strict=False)]

    def add(self, pages: int, born: float, *, computed: bool = True) -> SentPrompt:
        self.count += 1
        transfer = PageTransfer(RequestName(self.count.to_bytes(16, "big"), 1), range(pages * PAGE), PAGE, b"")
        order = SentPrompt(transfer, born=born, computed=computed)
        self.prompts.append(Ahead(order, pages))
        self.waiting.ahead.add(self.prompts[-1])
        return order

    def give_back(self) -> list[SentPrompt]:
        """What SGLang has back since."""
        stored = self.waiting.stored([each.order for each in self.prompts])
        for order in stored:
            order.gave_back = True
        return stored

    def turn(self) -> bool:
        """A prompt asks whether it may be computed."""
        self.waiting.look()
        if there_is := self.waiting.take_in(Ahead(None, 0)):
            return there_is
        self.waiting.make_room([SimpleNamespace(disagg_kv_sender=each) for each in self.prompts])
        return False


def test_the_oldest_go_and_no_more_than_must() -> None:
    world = World(10)
    young, old, middle = world.add(4, 3.0), world.add(4, 1.0), world.add(4, 2.0)
    assert not world.turn()
    assert world.moved == [old] and old.place is PromptPlace.MOVES
    assert not world.turn() and world.moved == [old], "that one is enough, once it is gone"
    assert world.give_back() == []
    old.place = PromptPlace.TIER
    assert not world.turn() and world.moved == [old], "SGLang has its pages not back yet"
    assert world.give_back() == [old] and world.give_back() == []
    assert world.turn()
    world.add(8, 4.0)
    assert not world.turn()
    assert set(world.moved) == {old, middle, young}, "6 too many are held, and one is not enough"


def test_within_the_share_nothing_goes() -> None:
    world = World(10)
    world.add(4, 1.0)
    world.add(5, 2.0)
    assert world.turn() and not world.moved


def test_what_cannot_go() -> None:
    """What is not computed to its end, what decode has asked for, and prompts of which nothing is computed."""
    world = World(10)
    world.add(6, 1.0, computed=False)
    world.add(6, 2.0).place = PromptPlace.ASKED
    world.prompts.append(Ahead(None, 6))
    world.waiting.ahead.add(world.prompts[-1])
    assert not world.turn() and not world.moved


def test_a_daemon_that_takes_none() -> None:
    world = World(10, stows=False)
    world.add(12, 1.0)
    assert not world.turn() and not world.moved


@pytest.mark.parametrize(("seconds", "again"), [(AGAIN_SECONDS / 2, False), (AGAIN_SECONDS, True)])
def test_where_there_was_no_room_it_is_tried_again_later(seconds: float, again: bool) -> None:
    world = World(10)
    order = world.add(12, 1.0)
    order.not_before = 100.0
    with mock.patch("time.monotonic", return_value=100.0 - AGAIN_SECONDS + seconds):
        assert not world.turn()
    assert world.moved == ([order] if again else [])


def test_what_one_rank_alone_would_take_in_keeps_no_room() -> None:
    """Ranks see a prompt end in different steps, and so may find room for different ones: none of them is taken in."""
    world = World(10)
    first, second = Ahead(None, 10), Ahead(None, 10)
    world.waiting.look()
    assert world.waiting.take_in(second) and not world.waiting.take_in(first)
    world.waiting.look()
    assert world.waiting.take_in(first) and not world.waiting.take_in(second), "in the order of the queue, on all ranks"
    world.waiting.ahead.add(first)
    world.waiting.look()
    assert not world.waiting.take_in(second), "what all ranks took in does"


def test_a_prompt_goes_when_all_ranks_would_have_it_go() -> None:
    """Another rank has not computed the oldest to its end, or has found other prompts over."""
    world = World(10)
    old, young = world.add(6, 1.0), world.add(6, 2.0)
    world.says = [False, True]
    assert not world.turn() and not world.moved, "nor does another in its place"
    world.says = [True]
    assert not world.turn() and world.moved == [old]
    assert young.place is PromptPlace.PAGES


def test_pages_are_given_back_when_all_ranks_have_heard_that_they_may_be() -> None:
    world = World(10)
    old = world.add(12, 1.0)
    assert not world.turn() and world.moved == [old]
    old.place, world.says = PromptPlace.TIER, [False]
    assert world.give_back() == []
    world.says = [True]
    assert world.give_back() == [old]
    refused = world.add(12, 1.0)
    assert not world.turn() and world.moved == [old, refused]
    refused.place, refused.not_before = PromptPlace.PAGES, 0.0
    assert world.give_back() == []
    assert not world.turn() and world.moved == [old, refused, refused], "it is asked for again"


def test_what_is_sent_meanwhile_is_not_given_back_again() -> None:
    world = World(10)
    old = world.add(12, 1.0)
    assert not world.turn() and world.moved == [old]
    old.place = PromptPlace.TIER
    world.prompts.clear()  # SGLang has seen it sent, and has its pages back
    assert world.give_back() == []
