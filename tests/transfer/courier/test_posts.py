"""Writes are of the size that was asked for, whether they are made from lists of all slots or by themselves."""

from __future__ import annotations

from typing import Any, cast

from kvferry.transfer.courier.posts import MAX_PREPARED, Posts, SlotPlaces


class Agent:
    """A handle is (sender's descriptor, receiver's descriptor, remote name, notification)."""

    def __init__(self) -> None:
        self.lists: list[tuple[str, int]] = []  # name and size

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> object:
        return descs

    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str, notif: bytes) -> object:
        return local[0], remote[0], name, notif

    def prep_xfer_dlist(self, agent_name: str, xfer_list: list[tuple[int, int, int]], mem_type: str) -> object:
        self.lists.append((agent_name, xfer_list[0][1]))
        return agent_name, xfer_list

    def make_prepped_xfer(
        self, operation: str, local: Any, at: list[int], remote: Any, to: list[int], notif: bytes
    ) -> object:
        assert local[0] == "NIXL_INIT_AGENT"
        return local[1][at[0]], remote[1][to[0]], remote[0], notif


def made(agent: Agent) -> Posts:
    return Posts(cast(Any, agent), "peer", SlotPlaces.on_host(1000, 2, 100), SlotPlaces.on_host(9000, 3, 100))


def test_a_write_has_its_own_size_and_slots() -> None:
    agent = Agent()
    posts = made(agent)
    for nbytes in (100, 100, 7, 100, 7, 7, 100, 8):
        handle = posts.make(1, 2, nbytes, b"notice")
        assert handle == ((1100, nbytes, 0), (9200, nbytes, 0), "peer", b"notice")
    assert agent.lists == [("NIXL_INIT_AGENT", 100), ("peer", 100), ("NIXL_INIT_AGENT", 7), ("peer", 7)]


def test_a_few_sizes_have_lists() -> None:
    agent = Agent()
    posts = made(agent)
    for nbytes in range(1, MAX_PREPARED + 3):
        for _ in range(2):
            assert posts.make(0, 1, nbytes, b"n") == ((1000, nbytes, 0), (9100, nbytes, 0), "peer", b"n")
    assert len(agent.lists) == 2 * MAX_PREPARED
