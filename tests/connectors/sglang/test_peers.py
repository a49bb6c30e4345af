"""The names of prefill engines' daemons, as decode asks for them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from kvferry.connectors.sglang.peers import LOOK_SECONDS, MAX_PEERS, PeerNames


class Asked:
    """Questions that wait for a thread, and what is answered."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.names: dict[str, str] = {}
        self.peers = PeerNames(self.waiting.append, lambda address, rank: self.names.get(address, ""))

    def answer(self) -> None:
        waiting, self.waiting[:] = list(self.waiting), []
        for question in waiting:
            question()


def test_a_host_that_does_not_answer_is_asked_one_question_at_a_time() -> None:
    asked = Asked()
    with mock.patch("time.monotonic", return_value=100.0) as clock:
        for _ in range(50):
            assert asked.peers.find("gone:1", 0) == ""
            clock.return_value += LOOK_SECONDS
        assert len(asked.waiting) == 1
        assert asked.peers.find("well:1", 0) == "" and len(asked.waiting) == 2
        asked.names["well:1"] = "p"
        asked.answer()
        assert asked.peers.find("well:1", 0) == "p"
        assert asked.peers.find("gone:1", 0) == "" and not asked.waiting, "not at once again"
        clock.return_value += LOOK_SECONDS
        assert asked.peers.find("gone:1", 0) == "" and len(asked.waiting) == 1


def test_a_name_that_is_forgotten_is_asked_for_again() -> None:
    asked = Asked()
    asked.names["h:1"] = "p"
    assert asked.peers.find("h:1", 0) == ""
    asked.answer()
    asked.peers.forget("h:1", 1)
    assert asked.peers.find("h:1", 0) == "p", "that was another rank's"
    asked.peers.forget("h:1", 0)
    with mock.patch("time.monotonic", return_value=float("inf")):
        assert asked.peers.find("h:1", 0) == "" and len(asked.waiting) == 1


def test_a_question_that_breaks_is_asked_again() -> None:
    def breaks(address: str, rank: int) -> str:
        raise OSError(address)

    asked = Asked()
    peers = PeerNames(asked.waiting.append, breaks)
    assert peers.find("h:1", 0) == ""
    with pytest.raises(OSError, match="h:1"):
        asked.answer()
    with mock.patch("time.monotonic", return_value=float("inf")):
        assert peers.find("h:1", 0) == "" and len(asked.waiting) == 1


def test_as_many_names_are_kept_as_there_may_be_engines() -> None:
    asked = Asked()
    for number in range(MAX_PEERS + 10):
        asked.names[f"h:{number}"] = "p"
        asked.peers.find(f"h:{number}", 0)
        asked.answer()
    assert len(asked.peers._names) <= MAX_PEERS
    assert asked.peers.find(f"h:{MAX_PEERS + 9}", 0) == "p"
