"""The receiver over several lanes: a page has arrived when it has on all; slots take only their rank's lanes."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.counters import TransferCounters
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Receiver, ReceiverAction, Scatter, TransferBroken
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, PartHeader, PartNotice, SlotError

GEOMETRY = KVGeometry(layers=1, kv_heads=2, head_dim=16, dtype="int8", page_size=1)  # 64 bytes a page, 32 a head


class Bench:
    """Two slots for each rank, of two rows of one head."""

    def __init__(self, senders: int, receivers: int) -> None:
        lanes = lanes_of(GEOMETRY, senders, receivers)
        self.receiver = Receiver(epoch=1, lanes=lanes, slot_bytes=HEADER_BYTES + 64, slots=2, counts=TransferCounters())
        self.generations = {credit.slot: credit.generation for credit in self.receiver.initial_credits()}

    def write(self, slot: int, lane: int, first_page: int, byte_offset: int, nbytes: int) -> list[ReceiverAction]:
        header = PartHeader(
            epoch=1,
            transfer=1,
            slot=slot,
            generation=self.generations[slot],
            lane=lane,
            first_page=first_page,
            byte_offset=byte_offset,
            nbytes=nbytes,
        )
        notice = PartNotice(epoch=1, transfer=1, slot=slot, generation=self.generations[slot]).pack()
        return self.receiver.notification(notice, lambda _: header.pack())

    def arrive(self, slot: int, lane: int, first_page: int, byte_offset: int, nbytes: int) -> tuple[list[int], bool]:
        (scatter,) = self.write(slot, lane, first_page, byte_offset, nbytes)
        assert isinstance(scatter, Scatter)
        assert (scatter.lane, scatter.byte_offset, scatter.nbytes) == (lane, byte_offset, nbytes)
        result = self.receiver.scattered(slot)
        self.generations[slot] = result.credit.generation
        self.receiver.check()
        return result.arrived, result.complete


@pytest.mark.parametrize(("senders", "receivers", "other"), [(2, 1, 1), (1, 2, 2)])
def test_a_page_arrives_when_it_has_on_all_lanes(senders: int, receivers: int, other: int) -> None:
    """`other`: a slot for the second lane."""
    bench = Bench(senders, receivers)
    bench.receiver.open(1, first_page=4, pages=3, page_ids=[7, 8, 9])
    assert bench.arrive(0, 0, 4, 0, 64) == ([], False)
    assert bench.arrive(other, 1, 5, 0, 64) == ([5], False)
    assert bench.arrive(0, 0, 6, 0, 16) == ([], False)
    assert bench.arrive(other, 1, 4, 0, 32) == ([4], False)
    assert bench.arrive(0, 0, 6, 16, 16) == ([6], True)
    assert bench.receiver.transfers() == []


def test_ranges_are_claimed_on_each_lane() -> None:
    bench = Bench(2, 1)
    bench.receiver.open(1, first_page=0, pages=2, page_ids=[0, 1])
    assert bench.arrive(0, 0, 0, 0, 32) == ([], False)
    assert bench.arrive(1, 1, 0, 0, 32) == ([0], False)
    broken, _ = bench.write(1, 1, 0, 16, 16)
    assert isinstance(broken, TransferBroken)
    assert "bytes 16..31 of the transfer came twice" in broken.message


def test_a_row_ends_where_the_lanes_does() -> None:
    bench = Bench(2, 1)
    bench.receiver.open(1, first_page=0, pages=1, page_ids=[0])
    broken, _ = bench.write(0, 1, 0, 0, 33)
    assert isinstance(broken, TransferBroken)
    assert "part.nbytes is 33, must be in 1..32" in broken.message


@pytest.mark.parametrize(
    ("slot", "lane", "message"),
    [
        (0, 1, r"part\.lane is 1, must be a lane to rank 0, whose slot 0 is"),
        (3, 0, r"part\.lane is 0, must be a lane to rank 1, whose slot 3 is"),
        (0, 2, r"part\.lane is 2, must be in 0\.\.1"),
    ],
)
def test_a_slot_takes_only_its_ranks_lanes(slot: int, lane: int, message: str) -> None:
    bench = Bench(1, 2)
    bench.receiver.open(1, first_page=0, pages=1, page_ids=[0])
    with pytest.raises(SlotError, match=message):
        bench.write(slot, lane, 0, 0, 32)
    assert bench.receiver.free_credits == 3, "the slot is granted no more"


def test_each_rank_has_its_slots() -> None:
    receiver = Receiver(
        epoch=1, lanes=lanes_of(GEOMETRY, 1, 2), slot_bytes=HEADER_BYTES + 1, slots=3, counts=TransferCounters()
    )
    assert receiver.initial_credits() == [Credit(slot, 1) for slot in range(6)]
