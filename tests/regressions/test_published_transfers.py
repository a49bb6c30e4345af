"""Classes of bugs that were published for systems like this one: those of writes and slots. One test a class."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.memory.interface import PoolMemory
from kvferry.daemon.peers.session import Session, SessionBroken, SessionSetup, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Receiver, Regrant, Scatter
from kvferry.transfer.protocol.sender import Failed, PostPart, Sender, TransferEnded
from kvferry.transfer.protocol.slots import HEADER_BYTES

EPOCH = 7
GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=4, dtype="float16", page_size=4)
PAGE_BYTES = GEOMETRY.page_bytes
SLOT_BYTES = HEADER_BYTES + PAGE_BYTES


def new_session(config: CourierConfig) -> Session:
    memory, lanes = cast(PoolMemory, None), lanes_of(GEOMETRY, 1, 1)
    return Session(SessionSetup("p", config, memory, lanes, 1, checksums=False, times=SessionTimes(0.5, 3.0)))


class Pair:
    """A sender and a receiver with their slots; a write is put where and when the test says."""

    def __init__(self, slots: int = 4) -> None:
        lanes = lanes_of(GEOMETRY, 1, 1)
        self.sender = Sender(lanes=lanes, slot_bytes=SLOT_BYTES, send_slots=slots, remote_slots=slots, epoch=EPOCH)
        self.receiver = Receiver(
            epoch=EPOCH, lanes=lanes, slot_bytes=SLOT_BYTES, slots=slots, counts=TransferCounters()
        )
        self.slots = [bytearray(SLOT_BYTES) for _ in range(slots)]
        self.headers = [b""] * slots  # of sending slots
        self.sender.credits(self.receiver.initial_credits())

    def open(self, transfer: int, page_ids: list[int]) -> None:
        self.receiver.open(transfer, first_page=0, pages=len(page_ids), page_ids=page_ids)
        self.sender.open(transfer, first_page=0, pages=len(page_ids), page_ids=page_ids)
        self.sender.progress(transfer, len(page_ids))

    def posts(self) -> list[PostPart]:
        gathers = self.sender.next_actions()
        for gather in gathers:
            self.headers[gather.send_slot] = gather.header.pack()
        found = [self.sender.gathered(gather.send_slot) for gather in gathers]
        return [post for post in found if post is not None]

    def land(self, post: PostPart) -> list[object]:
        self.slots[post.remote_slot][:HEADER_BYTES] = self.headers[post.send_slot]
        return list(self.receiver.notification(post.notification, lambda slot: self.slots[slot][:HEADER_BYTES]))


def test_one_failed_copy_of_several_frees_no_page_while_the_others_run() -> None:
    pair = Pair()
    pair.open(1, [10, 11, 12])
    scatters = [action for post in pair.posts() for action in pair.land(post)]
    assert len(scatters) == 3
    slots = [cast(Scatter, scatter).slot for scatter in scatters]
    result = pair.receiver.scatter_failed(slots[0], "the copy failed")
    assert result.broken is not None and not result.drained
    assert not pair.receiver.end(1), "copies into its pages run"
    assert not pair.receiver.scattered(slots[1]).drained
    last = pair.receiver.scattered(slots[2])
    assert last.drained and not last.arrived


def test_one_failed_gather_of_several_frees_no_page_while_the_others_run() -> None:
    pair = Pair()
    pair.open(1, [10, 11, 12])
    gathers = pair.sender.next_actions()
    pair.sender.gather_failed(gathers[0].send_slot, "the copy failed")
    assert not pair.sender.released(1) and not pair.sender.poll_events()
    assert pair.sender.gathered(gathers[1].send_slot) is None
    assert not pair.sender.released(1) and not pair.sender.poll_events()
    assert pair.sender.gathered(gathers[2].send_slot) is None
    assert pair.sender.released(1)
    assert pair.sender.poll_events() == [Failed(1, "the copy failed")]


def test_a_page_that_is_reused_after_an_abort_is_not_hit_by_the_write_in_flight() -> None:
    """The write lands in its slot, its transfer is unknown by then, and the part is dropped; its credit comes back."""
    pair = Pair(slots=1)
    pair.open(1, [10])
    (late,) = pair.posts()
    assert pair.receiver.end(1), "no copy runs: the page may be used again at once"
    pair.sender.end(1)
    assert pair.sender.poll_events() == [TransferEnded(1)]
    pair.open(2, [10])  # the same page, for another request
    assert not pair.posts(), "the slot is still the late write's"
    (dropped,) = pair.land(late)
    assert isinstance(dropped, Regrant) and dropped.transfer == 1
    pair.sender.credits([dropped.credit])
    pair.sender.posted_done(late.post_id)
    (fresh,) = pair.posts()
    (scatter,) = pair.land(fresh)
    assert isinstance(scatter, Scatter) and scatter.transfer == 2
    assert not pair.land(late), "its notification comes again: stale"


def test_a_write_without_its_transfer_number_cannot_stand_for_a_newer_one() -> None:
    """A transfer's number is never used again, so what names an old one reaches no page of a new one."""
    pair = Pair()
    pair.open(3, [10])
    with pytest.raises(ValueError, match="must be greater than 3"):
        pair.receiver.open(3, first_page=0, pages=1, page_ids=[11])
    with pytest.raises(ValueError, match="must be greater than 3"):
        pair.receiver.open(2, first_page=0, pages=1, page_ids=[11])


def test_the_same_agent_cannot_be_added_twice() -> None:
    """NIXL leaks a connection and races where an agent is added again: a session takes one CourierUp of its peer."""

    async def twice() -> None:
        config = CourierConfig(slot_bytes=4096, receive_slots=1, send_slots=1)
        session = new_session(config)
        up = peer.CourierUp(metadata=b"agent", receive_address=4096, receive_slots=1, slot_bytes=4096)
        session._dispatch(peer.PeerMessage(courier_up=up))
        with pytest.raises(SessionBroken, match="courier_up twice"):
            session._dispatch(peer.PeerMessage(courier_up=up))

    asyncio.run(twice())


@pytest.mark.parametrize(
    ("up", "named"),
    [
        (peer.CourierUp(), "metadata's length is 0"),
        (peer.CourierUp(metadata=b"x", slot_bytes=1 << 60), "slot_bytes is 1152921504606846976"),
        (peer.CourierUp(metadata=b"x", slot_bytes=4096, receive_slots=1 << 31), "receive_slots is 2147483648"),
        (peer.CourierUp(metadata=bytes(1 << 24), slot_bytes=4096), "metadata's length is 16777216"),
    ],
)
def test_a_couriers_word_with_missing_fields_or_absurd_sizes_ends_the_session(up: peer.CourierUp, named: str) -> None:
    async def hear() -> None:
        config = CourierConfig(slot_bytes=4096, receive_slots=1, send_slots=1)
        session = new_session(config)
        with pytest.raises(SessionBroken, match=named):
            session._dispatch(peer.PeerMessage(courier_up=up))
        with pytest.raises(SessionBroken, match="no known kind"):
            session._dispatch(peer.PeerMessage())

    asyncio.run(hear())
