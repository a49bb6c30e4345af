"""What a prefill engine holds prompts up for, learned from what that has brought."""

from __future__ import annotations

import itertools
import random

import pytest

from kvferry.connectors.worth import SELDOM, TRY_AGAIN, Worth


def test_chats_whose_first_turns_bring_nothing_are_worth_a_wait() -> None:
    worth = Worth()
    for number in range(400):
        assert worth.hold_up(9000)
        worth.waited(9000, 8900 if number % 4 else 0)


@pytest.mark.parametrize(("every", "least"), [(2, 1.0), (5, 0.9), (10, 0.4)])
def test_a_few_that_can_be_fetched_among_many_that_cannot_are_held_up(every: int, least: float) -> None:
    worth, draws = Worth(), random.Random(every)
    good = [draws.random() < 1 / every for _ in range(20_000)]
    held_up = 0
    for whole in good:
        if worth.hold_up(9000):
            worth.waited(9000, 8900 if whole else 0)
            held_up += whole
    assert held_up >= least * sum(good)


def test_what_a_kept_chat_lacks_says_nothing_of_a_chat_that_is_lost() -> None:
    worth = Worth()
    for _ in range(35):
        if worth.hold_up(500):
            worth.waited(500, 0)
    assert not worth.hold_up(500) and worth.hold_up(9000)


def held_up_for_nothing(worth: Worth) -> bool:
    """Whether the next prompt is, of which then nothing comes."""
    held_up = worth.hold_up(9000)
    if held_up:
        worth.waited(9000, 0)
    return held_up


def test_a_wait_that_pays_after_many_that_did_not_is_followed_by_others() -> None:
    worth = Worth()
    held_up = [number for number in range(2000) if held_up_for_nothing(worth)]
    passed = [later - one - 1 for one, later in itertools.pairwise(held_up)]
    assert passed[:8] == [0] * 7 + [TRY_AGAIN + 1]
    assert passed == sorted(passed) and passed[-1] == SELDOM, "the less has come, the seldomer"
    worth.waited(9000, 8900)
    assert worth.hold_up(9000) and worth.hold_up(9000)


@pytest.mark.parametrize(("lacking", "for_nothing"), [(500, 0), (2000, 0), (4096, 2), (8192, 7), (32_000, 13)])
def test_the_less_is_lacking_the_less_is_tried_for_nothing(lacking: int, for_nothing: int) -> None:
    """A wait takes steps of the engine, and of a short prompt's time they are much."""
    worth = Worth()
    for number in range(for_nothing + TRY_AGAIN):
        assert worth.hold_up(lacking) == (number < for_nothing)
        if number < for_nothing:
            worth.waited(lacking, 0)


def test_short_prompts_that_are_all_there_are_held_up_soon() -> None:
    worth, held_up = Worth(), 0
    for _ in range(40):
        if worth.hold_up(1500):
            worth.waited(1500, 1450)
            held_up += 1
    assert held_up > 12 and all(worth.hold_up(1500) for _ in range(9))
