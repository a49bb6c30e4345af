"""The sender: cuts, order, credits, ends."""

from __future__ import annotations

import pytest

from kvferry.transfer.geometry.rank_lanes import Heads, Lane
from kvferry.transfer.protocol.sender import Completed, Failed, Gather, Sender, TransferEnded
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, PartHeader, PartNotice, SlotError

EPOCH = 77


def lane(row_bytes: int, sender: int = 0, receiver: int = 0) -> Lane:
    return Lane(sender, receiver, Heads(0, 1), 0, 0, row_bytes)


def make(*, page_bytes: int = 100, capacity: int = 100, send_slots: int = 4, credits: int = 4) -> Sender:
    sender = Sender(
        lanes=[lane(page_bytes)],
        slot_bytes=capacity + HEADER_BYTES,
        send_slots=send_slots,
        remote_slots=max(credits, 1),
        epoch=EPOCH,
    )
    sender.credits([Credit(slot, 1) for slot in range(credits)])
    return sender


def cuts(gathers: list[Gather]) -> list[tuple[int, int, int, list[int]]]:
    return [(g.first_page, g.byte_offset, g.nbytes, list(g.page_ids)) for g in gathers]


def test_one_part_from_open_to_completed() -> None:
    sender = make()
    sender.open(5, first_page=2, pages=1, page_ids=[40])
    assert sender.next_actions() == [], "nothing is ready"
    sender.progress(5, 2)
    assert sender.next_actions() == []
    sender.progress(5, 3)
    (gather,) = sender.next_actions()
    header = PartHeader(epoch=EPOCH, transfer=5, slot=0, generation=1, lane=0, first_page=2, byte_offset=0, nbytes=100)
    assert gather == Gather(5, 0, Credit(0, 1), [40], 2, 0, 100, header)
    assert sender.next_actions() == [], "nothing twice"
    assert not sender.released(5)
    post = sender.gathered(0)
    assert post is not None
    assert (post.transfer, post.send_slot, post.remote_slot, post.nbytes) == (5, 0, 0, 164)
    assert PartNotice.unpack(post.notification) == PartNotice(epoch=EPOCH, transfer=5, slot=0, generation=1)
    assert sender.released(5), "the bytes are in the sending slot"
    assert sender.poll_events() == []
    assert (sender.free_credits, sender.free_send_slots, sender.posts_in_flight) == (3, 3, 1)
    sender.check()
    sender.posted_done(post.post_id)
    assert sender.poll_events() == [Completed(5, 1)]
    assert sender.poll_events() == []
    assert (sender.free_credits, sender.free_send_slots, sender.transfers()) == (3, 4, [])


def test_no_pages_is_complete_at_once() -> None:
    sender = make()
    sender.open(1, first_page=3, pages=0, page_ids=[])
    assert sender.poll_events() == [Completed(1, 0)]
    assert sender.next_actions() == []


def test_slots_smaller_than_a_page() -> None:
    sender = make(page_bytes=100, capacity=64)
    sender.open(1, first_page=7, pages=2, page_ids=[5, 3])
    sender.progress(1, 9)
    assert cuts(sender.next_actions()) == [
        (7, 0, 64, [5]),
        (7, 64, 64, [5, 3]),
        (8, 28, 64, [3]),
        (8, 92, 8, [3]),
    ]


def test_slots_larger_than_a_page() -> None:
    sender = make(page_bytes=10, capacity=64)
    sender.open(1, first_page=0, pages=13, page_ids=list(range(100, 113)))
    sender.progress(1, 20)
    assert cuts(sender.next_actions()) == [
        (0, 0, 60, list(range(100, 106))),
        (6, 0, 60, list(range(106, 112))),
        (12, 0, 10, [112]),
    ]


def test_only_ready_pages_and_no_waiting_for_a_full_slot() -> None:
    sender = make(page_bytes=10, capacity=64)
    sender.open(1, first_page=0, pages=5, page_ids=range(5))
    sender.progress(1, 2)
    sender.progress(1, 2)
    assert cuts(sender.next_actions()) == [(0, 0, 20, [0, 1])]
    sender.progress(1, 5)
    assert cuts(sender.next_actions()) == [(2, 0, 30, [2, 3, 4])]


def test_transfers_take_turns() -> None:
    sender = make(send_slots=5, credits=5)
    for transfer in (1, 2, 3):
        sender.open(transfer, first_page=0, pages=4, page_ids=range(4))
        sender.progress(transfer, 4)
    assert [g.transfer for g in sender.next_actions()] == [1, 2, 3, 1, 2]
    sender.check()


def test_a_part_needs_a_credit_and_a_sending_slot() -> None:
    sender = make(credits=1, send_slots=2)
    sender.open(1, first_page=0, pages=3, page_ids=range(3))
    sender.progress(1, 3)
    assert len(sender.next_actions()) == 1
    post = sender.gathered(0)
    assert post is not None
    assert sender.next_actions() == [], "no credit"
    sender.credits([Credit(0, 2)])  # the peer may be quicker than the report of the post
    (second,) = sender.next_actions()
    assert sender.gathered(second.send_slot) is not None
    sender.credits([Credit(0, 3)])
    assert sender.next_actions() == [], "a sending slot is free when its post is done, not when it is posted"
    sender.posted_done(post.post_id)
    assert [g.first_page for g in sender.next_actions()] == [2]


def test_a_slot_granted_anew_before_its_credit_is_spent_is_refused() -> None:
    sender = make(credits=1)
    sender.open(1, first_page=0, pages=2, page_ids=[0, 1])
    for generation in range(2, 5):
        with pytest.raises(SlotError, match=r"credit\.slot is 0"):
            sender.credits([Credit(0, generation)])
    sender.progress(1, 2)
    (gather,) = sender.next_actions()
    with pytest.raises(SlotError, match=r"credit\.slot is 0"):
        sender.credits([Credit(0, 5)])
    sender.check()
    assert sender.gathered(gather.send_slot) is not None
    sender.credits([Credit(0, 6)])
    assert sender.free_credits == 1
    sender.check()


def test_end_keeps_the_credit_of_a_running_gather_for_others() -> None:
    sender = make(credits=1)
    sender.open(1, first_page=0, pages=2, page_ids=[0, 1])
    sender.open(2, first_page=0, pages=1, page_ids=[2])
    sender.progress(1, 2)
    (gather,) = sender.next_actions()
    sender.progress(2, 1)
    sender.end(1)
    sender.end(1)
    assert sender.poll_events() == [], "a gather reads its pages"
    assert not sender.released(1)
    assert sender.gathered(gather.send_slot) is None
    assert sender.poll_events() == [TransferEnded(1)]
    assert sender.released(1)
    (other,) = sender.next_actions()
    assert (other.transfer, other.credit) == (2, gather.credit)


def test_a_transfer_that_drains_is_cut_no_more() -> None:
    sender = make(credits=2, send_slots=2)
    sender.open(1, first_page=0, pages=3, page_ids=[0, 1, 2])
    sender.progress(1, 1)
    (gather,) = sender.next_actions()
    sender.progress(1, 3)
    sender.end(1)
    assert sender.next_actions() == []
    assert sender.gathered(gather.send_slot) is None
    assert sender.poll_events() == [TransferEnded(1)]


def test_end_does_not_wait_for_posts_and_their_end_is_taken() -> None:
    sender = make()
    sender.open(1, first_page=0, pages=1, page_ids=[0])
    sender.progress(1, 1)
    (gather,) = sender.next_actions()
    post = sender.gathered(gather.send_slot)
    assert post is not None
    sender.end(1)
    assert sender.poll_events() == [TransferEnded(1)]
    sender.posted_done(post.post_id)
    assert sender.poll_events() == [], "ended is not completed"
    assert sender.free_send_slots == 4
    sender.check()


def test_end_of_a_queued_transfer_and_of_an_unknown_one() -> None:
    sender = make()
    sender.open(1, first_page=0, pages=1, page_ids=[0])
    sender.progress(1, 1)
    sender.end(1)
    sender.end(9)
    assert sender.poll_events() == [TransferEnded(1), TransferEnded(9)]
    assert sender.next_actions() == []
    assert sender.free_credits == 4
    sender.progress(1, 1)


def test_a_failed_gather_fails_the_transfer_once_no_other_runs() -> None:
    sender = make()
    sender.open(1, first_page=0, pages=3, page_ids=[0, 1, 2])
    sender.progress(1, 2)
    first, second = sender.next_actions()
    sender.gather_failed(first.send_slot, "no such page")
    sender.progress(1, 3)
    assert sender.next_actions() == []
    assert sender.poll_events() == []
    assert sender.gathered(second.send_slot) is None
    assert sender.poll_events() == [Failed(1, "no such page")]
    assert (sender.free_credits, sender.free_send_slots) == (4, 4)


def test_an_ended_transfer_whose_gather_fails_is_ended() -> None:
    sender = make()
    sender.open(1, first_page=0, pages=1, page_ids=[0])
    sender.progress(1, 1)
    (gather,) = sender.next_actions()
    sender.end(1)
    sender.gather_failed(gather.send_slot, "late")
    assert sender.poll_events() == [TransferEnded(1)]


def test_completed_waits_for_every_post() -> None:
    sender = make()
    sender.open(1, first_page=0, pages=2, page_ids=[0, 1])
    sender.progress(1, 2)
    posts = [sender.gathered(g.send_slot) for g in sender.next_actions()]
    first, second = (post for post in posts if post is not None)
    assert first.nbytes + second.nbytes == 328
    sender.posted_done(second.post_id)
    assert sender.poll_events() == []
    sender.posted_done(first.post_id)
    assert sender.poll_events() == [Completed(1, 2)]


def test_completed_waits_for_every_gather() -> None:
    sender = make()
    sender.open(1, first_page=0, pages=2, page_ids=[0, 1])
    sender.progress(1, 2)
    gathers = sender.next_actions()
    for gather, events in zip(gathers, ([], [Completed(1, 2)]), strict=True):
        post = sender.gathered(gather.send_slot)
        assert post is not None
        sender.posted_done(post.post_id)
        assert sender.poll_events() == events, "while another gather of it runs no post of it does"


def test_bad_calls_name_the_field() -> None:
    sender = make()
    sender.open(1, first_page=4, pages=2, page_ids=[0, 1])
    with pytest.raises(ValueError, match="transfer 1 is open already"):
        sender.open(1, first_page=0, pages=0, page_ids=[])
    with pytest.raises(ValueError, match="page_ids has 1 entries, must have pages = 2"):
        sender.open(2, first_page=0, pages=2, page_ids=[0])
    with pytest.raises(ValueError, match="first_page -1"):
        sender.open(2, first_page=-1, pages=1, page_ids=[0])
    with pytest.raises(SlotError, match="transfer is 18446744073709551616"):
        sender.open(1 << 64, first_page=0, pages=1, page_ids=[0])
    sender.progress(1, 6)
    with pytest.raises(ValueError, match="pages_ready of transfer 1 is 5, must be at least 6"):
        sender.progress(1, 5)
    with pytest.raises(ValueError, match="send_slot is 3, must be one of the 0 that are gathering"):
        sender.gathered(3)
    with pytest.raises(ValueError, match="send_slot is 3"):
        sender.gather_failed(3, "")
    with pytest.raises(ValueError, match="post_id is 1, must be one of the 0 posts in flight"):
        sender.posted_done(1)
    with pytest.raises(SlotError, match=r"credit\.generation is 1, must be greater than 1"):
        sender.credits([Credit(0, 1)])
    (first, _) = sender.next_actions()
    assert sender.gathered(first.send_slot) is not None, "a refused call changed nothing"


@pytest.mark.parametrize(
    ("field", "value"),
    [("slot_bytes", HEADER_BYTES), ("send_slots", 0), ("epoch", -1)],
)
def test_bad_sizes_name_the_field(field: str, value: int) -> None:
    sizes = {"slot_bytes": HEADER_BYTES + 1, "send_slots": 1, "remote_slots": 1, "epoch": 1}
    Sender(lanes=[lane(1)], **sizes)
    with pytest.raises(ValueError, match=f"{field} is {value}, must be"):
        Sender(lanes=[lane(1)], **{**sizes, field: value})
