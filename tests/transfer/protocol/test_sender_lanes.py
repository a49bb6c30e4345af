"""The sender over several lanes: turns, slots and credits of ranks, cuts."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.sender import Completed, Gather, Sender
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, SlotError

GEOMETRY = KVGeometry(layers=1, kv_heads=2, head_dim=16, dtype="int8", page_size=1)  # 64 bytes a page, 32 a head


def make(
    senders: int, receivers: int, *, capacity: int = 32, send_slots: int = 2, credits: list[int] | None = None
) -> Sender:
    """Two slots for each receiving rank; `credits`: of these slots, by default all."""
    sender = Sender(
        lanes=lanes_of(GEOMETRY, senders, receivers),
        slot_bytes=capacity + HEADER_BYTES,
        send_slots=send_slots,
        remote_slots=2,
        epoch=1,
    )
    sender.credits([Credit(slot, 1) for slot in (range(2 * receivers) if credits is None else credits)])
    return sender


def ready(sender: Sender, transfer: int, pages: int) -> None:
    sender.open(transfer, first_page=0, pages=pages, page_ids=range(pages))
    sender.progress(transfer, pages)


def places(gathers: list[Gather]) -> list[tuple[int, int, int, int, int]]:
    return [(g.transfer, g.lane, g.first_page, g.send_slot, g.credit.slot) for g in gathers]


def test_one_rank_to_two() -> None:
    sender = make(1, 2, send_slots=4)
    ready(sender, 5, 2)
    gathers = sender.next_actions()
    assert places(gathers) == [(5, 0, 0, 0, 0), (5, 1, 0, 1, 2), (5, 0, 1, 2, 1), (5, 1, 1, 3, 3)]
    headers = [gather.header for gather in gathers]
    assert [(header.lane, header.slot, header.first_page) for header in headers] == [
        (0, 0, 0),
        (1, 2, 0),
        (0, 1, 1),
        (1, 3, 1),
    ]
    posts = [sender.gathered(gather.send_slot) for gather in gathers]
    assert sender.released(5)
    wire_bytes = 0
    for post in posts:
        assert post is not None
        wire_bytes += post.nbytes
        assert sender.poll_events() == []
        sender.posted_done(post.post_id)
    assert wire_bytes == 128 + 4 * HEADER_BYTES
    assert sender.poll_events() == [Completed(5, 2)]
    sender.check()


def test_a_rank_without_credits_holds_no_other_up() -> None:
    sender = make(1, 2, send_slots=8, credits=[2, 3])
    ready(sender, 1, 2)
    assert places(sender.next_actions()) == [(1, 1, 0, 0, 2), (1, 1, 1, 1, 3)]
    sender.check()
    sender.credits([Credit(1, 1)])
    assert places(sender.next_actions()) == [(1, 0, 0, 2, 1)]
    assert not sender.released(1)


def test_a_rank_without_sending_slots_holds_no_other_up() -> None:
    sender = make(2, 1, send_slots=1)
    ready(sender, 1, 4)
    first = sender.next_actions()
    assert places(first) == [(1, 0, 0, 0, 0), (1, 1, 0, 1, 1)]
    post = sender.gathered(1)
    assert post is not None
    sender.posted_done(post.post_id)
    sender.credits([Credit(1, 2)])
    assert places(sender.next_actions()) == [(1, 1, 1, 1, 1)]
    sender.check()


def test_lanes_and_transfers_take_turns() -> None:
    sender = make(2, 1, send_slots=8, credits=[])
    for transfer in (1, 2):
        ready(sender, transfer, 2)
    order = []
    for generation in range(1, 9):
        sender.credits([Credit(0, generation)])
        (gather,) = sender.next_actions()
        order.append((gather.transfer, gather.lane, gather.first_page))
        assert sender.gathered(gather.send_slot) is not None
    assert order == [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 1)]


def test_an_end_stops_every_lane() -> None:
    sender = make(1, 2, credits=[0, 2])
    ready(sender, 1, 3)
    gathers = sender.next_actions()
    sender.end(1)
    assert [sender.gathered(gather.send_slot) for gather in gathers] == [None, None]
    assert sender.next_actions() == []
    assert sender.transfers() == []
    assert sender.free_credits == 2
    sender.check()


@pytest.mark.parametrize(
    ("capacity", "sizes"),
    [(40, [40 - 8, 32, 32]), (1000, [96]), (31, [16] * 6), (47, [32, 32, 32]), (15, [15] * 6 + [6])],
)
def test_parts_are_whole_rows_or_aligned(capacity: int, sizes: list[int]) -> None:
    sender = Sender(
        lanes=lanes_of(dataclasses.replace(GEOMETRY, kv_heads=1), 1, 1),
        slot_bytes=capacity + HEADER_BYTES,
        send_slots=20,
        remote_slots=20,
        epoch=1,
    )
    sender.credits([Credit(slot, 1) for slot in range(20)])
    ready(sender, 1, 3)
    assert [gather.nbytes for gather in sender.next_actions()] == sizes


def test_credits_of_slots_that_no_rank_has() -> None:
    sender = make(1, 2)
    with pytest.raises(SlotError, match=r"credit\.slot is 4, must be in 0\.\.3"):
        sender.credits([Credit(4, 1)])
