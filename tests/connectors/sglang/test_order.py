"""Which prompt is next, on decode and on prefill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvferry.client.requests import RequestName
from kvferry.connectors.sglang import order
from kvferry.connectors.sglang.order import MOST_ASKED, OVERTAKEN, AskedNames, HeldFirst, asked_first


def name(number: int) -> RequestName:
    return RequestName(number.to_bytes(16, "big"), 1)


class Decode:
    """A queue of SGLang's, and a pool that holds most of what has these letters."""

    def __init__(self, held: str) -> None:
        self.held = held
        self.looked: list[str] = []
        self.turns = HeldFirst()
        self.queue = SimpleNamespace(queue=[], tree_cache=SimpleNamespace(disable=False))

    def add(self, letters: str, *, asks_first: bool = True) -> None:
        for letter in letters:
            receiver = SimpleNamespace(asks_first=asks_first, turn=None)
            self.queue.queue.append(SimpleNamespace(req=letter, kv_receiver=receiver))

    def is_held(self, letter: str, tree: Any) -> bool:
        self.looked.append(letter)
        return letter in self.held

    def order(self) -> str:
        with mock.patch.object(order, "_is_held", self.is_held):
            self.turns.arrange(self.queue)
        return "".join(each.req for each in self.queue.queue)

    def take(self) -> str:
        """The first is taken in."""
        first = self.order()[:1]
        del self.queue.queue[0]
        return first


def test_what_decode_holds_goes_first_else_who_came_first() -> None:
    decode = Decode("bd")
    decode.add("abcd")
    assert decode.order() == "bdac"
    decode.add("eb")
    assert decode.order() == "bdbace"
    assert decode.looked == [*"abcdeb"], "each once"


def test_one_alone_is_not_looked_up() -> None:
    decode = Decode("a")
    decode.add("a")
    assert decode.order() == "a" and not decode.looked
    decode.queue.tree_cache.disable = True
    decode.add("b")
    assert decode.order() == "ab" and not decode.looked, "decode's radix cache is off"


def test_a_prompt_is_overtaken_so_often_and_no_more() -> None:
    decode = Decode("h")
    decode.add("m" + "h" * (OVERTAKEN + 5))
    taken = "".join(decode.take() for _ in range(OVERTAKEN + 2))
    assert taken == "h" * OVERTAKEN + "mh"


def test_beside_a_prefill_that_does_not_hear_of_it_the_order_is_that_of_coming() -> None:
    decode = Decode("bd")
    decode.add("abcd", asks_first=False)
    assert decode.order() == "abcd" and not decode.looked


def test_prefill_computes_first_what_all_ranks_know_to_be_asked_for() -> None:
    requests = [SimpleNamespace(disagg_kv_sender=SimpleNamespace(asked=asked)) for asked in (False, True, False, True)]
    requests.append(SimpleNamespace(disagg_kv_sender=object()))  # SGLang's own, to warm up
    first, second, third, fourth, fifth = requests
    assert asked_first(requests, lambda own: own) == [second, fourth, fifth, first, third]
    other_rank = [True, False, True, True, True]
    agreed = asked_first(requests, lambda own: [a and b for a, b in zip(own, other_rank, strict=True)])
    assert agreed == [fourth, fifth, first, second, third]


def test_so_many_names_are_known() -> None:
    asked = AskedNames()
    for number in range(MOST_ASKED + 1):
        asked.add(name(number))
    assert name(0) not in asked and name(1) in asked and name(MOST_ASKED) in asked
