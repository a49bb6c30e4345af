"""The receiver: what it believes, what it drops, what it reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.daemon.core.counters import TransferCounters
from kvferry.transfer.geometry.rank_lanes import Heads, Lane
from kvferry.transfer.protocol.receiver import Receiver, Regrant, Scatter, TransferBroken, _Incoming
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, PartHeader, PartNotice, SlotError

EPOCH = 77


LANE = Lane(0, 0, Heads(0, 1), 0, 0, 100)


class Bench:
    """A receiver of pages of 100 bytes through slots of 64 + 250, and a peer that writes what it is told."""

    def __init__(self, slots: int = 4) -> None:
        self.receiver = Receiver(
            epoch=EPOCH, lanes=[LANE], slot_bytes=HEADER_BYTES + 250, slots=slots, counts=TransferCounters()
        )
        self.credits = self.receiver.initial_credits()
        self.headers: dict[int, bytes] = {}

    def part(self, transfer: int, first_page: int, byte_offset: int, nbytes: int) -> PartHeader:
        credit = self.credits.pop(0)
        return PartHeader(
            epoch=EPOCH,
            transfer=transfer,
            slot=credit.slot,
            generation=credit.generation,
            lane=0,
            first_page=first_page,
            byte_offset=byte_offset,
            nbytes=nbytes,
        )

    def notify(self, header: PartHeader) -> list[Scatter | Regrant | TransferBroken]:
        self.headers[header.slot] = header.pack()
        return self.receiver.notification(notice_of(header), self.headers.__getitem__)


def notice_of(header: PartHeader) -> bytes:
    return PartNotice(
        epoch=header.epoch, transfer=header.transfer, slot=header.slot, generation=header.generation
    ).pack()


def no_header(slot: int) -> bytes:
    raise AssertionError(f"the header of slot {slot} must not be read")


def test_one_part_from_credit_to_complete() -> None:
    bench = Bench()
    receiver = bench.receiver
    assert bench.credits == [Credit(slot, 1) for slot in range(4)]
    receiver.open(1, first_page=5, pages=2, page_ids=[30, 20])
    assert bench.notify(bench.part(1, 5, 0, 200)) == [Scatter(0, 1, [30, 20], 5, 0, 200)]
    assert (receiver.free_credits, receiver.scatters_running) == (3, 1)
    result = receiver.scattered(0)
    assert result.credit == Credit(0, 2)
    assert result.arrived == [5, 6]
    assert result.complete
    assert not result.drained
    assert result.broken is None
    assert (receiver.free_credits, receiver.scatters_running, receiver.transfers()) == (4, 0, [])
    assert (receiver.counts.parts, receiver.counts.payload_bytes, receiver.counts.wire_bytes) == (1, 200, 264)
    assert receiver.end(1), "nothing of a complete transfer runs"
    receiver.check()


def test_pages_arrive_when_whole_in_any_order() -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=3, page_ids=[7, 8, 9])
    parts = [(0, 0, 150), (1, 50, 100), (2, 50, 50)]
    scatters = [bench.notify(bench.part(1, *part))[0] for part in reversed(parts)]
    assert [s.page_ids for s in scatters if isinstance(s, Scatter)] == [[9], [8, 9], [7, 8]]
    results = [bench.receiver.scattered(slot) for slot in (2, 0, 1)]
    assert [(r.arrived, r.complete) for r in results] == [([0], False), ([], False), ([1, 2], True)]


def test_no_pages_hold_nothing() -> None:
    receiver = Bench().receiver
    receiver.open(1, first_page=5, pages=0, page_ids=[])
    assert receiver.transfers() == []
    assert receiver.end(1)


def test_a_repeated_or_stale_notification_is_counted_and_ignored() -> None:
    bench = Bench(slots=1)
    bench.receiver.open(1, first_page=0, pages=2, page_ids=[0, 1])
    header = bench.part(1, 0, 0, 100)
    assert len(bench.notify(header)) == 1
    repeat = notice_of(header)
    assert bench.receiver.notification(repeat, no_header) == [], "while its copy runs"
    bench.receiver.scattered(0)
    assert bench.receiver.notification(repeat, no_header) == [], "after its credit went back"
    future = notice_of(header._replace(generation=3))
    assert bench.receiver.notification(future, no_header) == [], "a credit never granted"
    old = notice_of(header._replace(epoch=EPOCH - 1, generation=2))
    assert bench.receiver.notification(old, no_header) == [], "another epoch"
    assert bench.receiver.counts.stale_notifications == 4
    assert bench.receiver.free_credits == 1


def test_parts_of_unknown_transfers_are_dropped_and_their_slot_granted_anew() -> None:
    bench = Bench(slots=1)
    assert bench.notify(bench.part(3, 0, 0, 100)) == [Regrant(Credit(0, 2), 3)]
    assert bench.receiver.counts.dropped_parts == 1
    assert bench.receiver.free_credits == 1


def test_end_without_a_copy_lets_the_pages_go_at_once() -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=1, page_ids=[0])
    late = bench.part(1, 0, 0, 100)
    assert bench.receiver.end(1)
    assert bench.receiver.end(1)
    assert bench.notify(late) == [Regrant(Credit(0, 2), 1)]


def test_end_during_copies_is_drained_by_the_last() -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=3, page_ids=[0, 1, 2])
    for page in (0, 1):
        bench.notify(bench.part(1, page, 0, 100))
    assert not bench.receiver.end(1)
    assert not bench.receiver.end(1)
    assert bench.notify(bench.part(1, 2, 0, 100)) == [Regrant(Credit(2, 2), 1)]
    results = [bench.receiver.scattered(1), bench.receiver.scattered(0)]
    assert [(r.arrived, r.complete, r.drained) for r in results] == [([], False, False), ([], False, True)]
    assert bench.receiver.end(1)
    assert bench.receiver.transfers() == []


@pytest.mark.parametrize(
    ("field", "value"), [("epoch", 1), ("transfer", 2), ("slot", 3), ("generation", 2), ("lane", 1)]
)
def test_content_that_is_not_what_the_notification_says(field: str, value: int) -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=1, page_ids=[0])
    header = bench.part(1, 0, 0, 100)
    wrong = header._replace(**{field: value}).pack()
    with pytest.raises(SlotError, match=rf"part\.{field} is {value}, must be") as raised:
        bench.receiver.notification(notice_of(header), lambda slot: wrong)
    assert raised.value.field == f"part.{field}"
    assert bench.receiver.free_credits == 3, "the slot is granted no more"
    assert (bench.receiver.withheld_slots, bench.receiver.busy_slots) == (1, 0)
    assert bench.receiver.scatters_running == 0
    assert bench.receiver.notification(notice_of(header), no_header) == []
    bench.receiver.check()


def test_content_that_is_no_part() -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=1, page_ids=[0])
    header = bench.part(1, 0, 0, 100)
    with pytest.raises(SlotError, match=r"part\.magic is 0x00000000"):
        bench.receiver.notification(notice_of(header), lambda slot: bytes(HEADER_BYTES))
    assert bench.receiver.free_credits == 3


def test_a_slot_is_granted_anew_only_when_its_write_is_there() -> None:
    bench = Bench()
    header = bench.part(9, 0, 0, 100)
    with pytest.raises(SlotError, match=r"part\.magic"):
        bench.receiver.notification(notice_of(header), lambda slot: bytes(HEADER_BYTES))
    assert bench.receiver.counts.dropped_parts == 0
    assert bench.receiver.free_credits == 3


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", r"notification\.length is 0 bytes, must be 32"),
        (bytes(32), r"notification\.magic"),
        (PartNotice(EPOCH, 1, 4, 1).pack(), r"notification\.slot is 4, must be in 0\.\.3"),
    ],
)
def test_notifications_that_cannot_be(payload: bytes, message: str) -> None:
    bench = Bench()
    with pytest.raises(SlotError, match=message):
        bench.receiver.notification(payload, no_header)
    assert bench.receiver.free_credits == 4


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((4, 0, 100), r"part\.first_page is 4, must be in 5\.\.6"),
        ((7, 0, 100), r"part\.first_page is 7, must be in 5\.\.6"),
        ((5, 100, 10), r"part\.byte_offset is 100, must be less than row_bytes = 100"),
        ((5, 0, 0), r"part\.nbytes is 0, must be in 1\.\.200"),
        ((5, 0, 201), r"part\.nbytes is 201, must be in 1\.\.200"),
        ((6, 99, 2), r"part\.nbytes is 2, must be in 1\.\.1 for a part at byte 199"),
        ((5, 50, 10), r"part\.byte_offset: bytes 50\.\.59 of the transfer came twice"),
    ],
)
def test_a_part_out_of_range_breaks_its_transfer_only(part: tuple[int, int, int], message: str) -> None:
    bench = Bench()
    receiver = bench.receiver
    receiver.open(1, first_page=5, pages=2, page_ids=[0, 1])
    receiver.open(2, first_page=0, pages=1, page_ids=[2])
    assert isinstance(bench.notify(bench.part(1, 5, 40, 20))[0], Scatter)
    broken, regrant = bench.notify(bench.part(1, *part))
    assert isinstance(broken, TransferBroken)
    assert broken.transfer == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(broken.message)
    assert regrant == Regrant(Credit(1, 2), 1)
    assert bench.notify(bench.part(1, 6, 0, 50)) == [Regrant(Credit(2, 2), 1)], "nothing more is believed, nor said"
    assert isinstance(bench.notify(bench.part(2, 0, 0, 100))[0], Scatter)
    assert receiver.scattered(3).complete
    assert not receiver.end(1)
    assert receiver.scattered(0).drained
    assert receiver.free_credits == 4
    receiver.check()


def test_parts_that_scatter_a_transfer_over_too_many_ranges_break_it() -> None:
    bench = Bench(slots=1)
    receiver = bench.receiver
    receiver.open(1, first_page=0, pages=1, page_ids=[0])
    receiver.open(2, first_page=0, pages=1, page_ids=[1])

    def land(transfer: int, start: int, nbytes: int) -> None:
        assert isinstance(bench.notify(bench.part(transfer, 0, start, nbytes))[0], Scatter)
        bench.credits.append(receiver.scattered(0).credit)

    limit = 4 * 1 + 16
    for number in range(limit):
        land(1, 2 * number, 1)
    land(1, 1, 1)  # joins two
    land(1, 2 * limit, 1)
    land(1, 2 * limit + 1, 1)  # joins one
    broken, regrant = bench.notify(bench.part(1, 0, 99, 1))
    assert isinstance(broken, TransferBroken)
    assert broken.message == "part.byte_offset: separate ranges of the transfer are 21, must be at most 20"
    assert isinstance(regrant, Regrant)
    bench.credits.append(regrant.credit)
    land(2, 0, 100)
    assert receiver.transfers() == [1]
    assert receiver.end(1)
    receiver.check()


def test_a_part_larger_than_a_slot_is_refused() -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=9, page_ids=range(9))
    broken = bench.notify(bench.part(1, 0, 0, 251))[0]
    assert isinstance(broken, TransferBroken)
    assert "part.nbytes is 251, must be in 1..250" in broken.message


def test_a_failed_copy_breaks_the_transfer_and_keeps_the_credit() -> None:
    bench = Bench()
    receiver = bench.receiver
    receiver.open(1, first_page=0, pages=3, page_ids=[0, 1, 2])
    for page in (0, 1, 2):
        bench.notify(bench.part(1, page, 0, 100))
    assert receiver.scattered(0).arrived == [0]
    failed = receiver.scatter_failed(1, "checksum differs")
    assert failed.broken == TransferBroken(1, "checksum differs")
    assert failed.credit == Credit(1, 2)
    assert not receiver.end(1)
    again = receiver.scatter_failed(2, "checksum differs")
    assert again.broken is None, "said once"
    assert again.drained
    assert receiver.free_credits == 4
    assert receiver.counts.parts == 1


def test_a_broken_transfer_stays_until_it_is_ended() -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=2, page_ids=[0, 1])
    bench.notify(bench.part(1, 0, 0, 100))
    assert not bench.receiver.scatter_failed(0, "no").drained
    assert bench.notify(bench.part(1, 1, 0, 100)) == [Regrant(Credit(1, 2), 1)], "nothing more of it is believed"
    assert bench.receiver.transfers() == [1]
    assert bench.receiver.end(1)
    assert bench.receiver.transfers() == []


def test_bad_calls_name_the_field() -> None:
    receiver = Bench().receiver
    receiver.open(4, first_page=0, pages=1, page_ids=[0])
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: receiver.open(4, first_page=0, pages=0, page_ids=[]), "transfer is 4, must be greater than 4"),
        (lambda: receiver.open(3, first_page=0, pages=0, page_ids=[]), "transfer is 3, must be greater than 4"),
        (lambda: receiver.open(5, first_page=0, pages=2, page_ids=[1]), "page_ids has 1 entries, must have pages = 2"),
        (lambda: receiver.open(5, first_page=0, pages=2, page_ids=[1, 1]), "page_ids names a page twice"),
        (lambda: receiver.open(5, first_page=-1, pages=1, page_ids=[1]), "first_page -1"),
        (lambda: receiver.open(1 << 64, first_page=0, pages=1, page_ids=[1]), "transfer is 18446744073709551616"),
        (lambda: receiver.scattered(2), "slot is 2, must be one of the 0 being scattered"),
        (lambda: receiver.scatter_failed(2, ""), "slot is 2"),
        (lambda: Receiver(epoch=1, lanes=[], slot_bytes=99, slots=1, counts=TransferCounters()), "lanes has 0"),
        (
            lambda: Receiver(epoch=1, lanes=[LANE], slot_bytes=64, slots=1, counts=TransferCounters()),
            "slot_bytes is 64, must be greater than",
        ),
        (lambda: Receiver(epoch=-1, lanes=[LANE], slot_bytes=99, slots=1, counts=TransferCounters()), "epoch is -1"),
        (lambda: Receiver(epoch=1, lanes=[LANE], slot_bytes=99, slots=0, counts=TransferCounters()), "slots is 0"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert receiver.transfers() == [4]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"payload_sum": 98},
        {"byte_offset": 16},
        {"nbytes": 50},
        {"first_page": 6},
        {"checksum": 0},
    ],
    ids=lambda change: next(iter(change), "nothing"),
)
def test_a_part_with_another_checksum_publishes_nothing_and_breaks_its_transfer(change: dict[str, int]) -> None:
    """Whether the payload, the place that the header gives it, or the checksum itself has changed on its way."""
    bench = Bench()
    receiver = bench.receiver
    receiver.open(1, first_page=5, pages=2, page_ids=[30, 20])
    sent = bench.part(1, 5, 0, 100)
    sent = sent._replace(checksum=sent.checksum_of(99))
    payload_sum = change.pop("payload_sum", 99)
    came = sent._replace(**change)
    assert isinstance(bench.notify(came)[0], Scatter)
    result = receiver.scattered(0, payload_sum)
    assert result.credit == Credit(0, 2), "the slot can be used again"
    receiver.check()
    if came == sent and payload_sum == 99:
        assert (result.arrived, result.broken, receiver.counts.mismatched_parts) == ([5], None, 0)
        return
    assert (result.arrived, result.complete) == ([], False)
    assert result.broken is not None
    assert f"part.checksum is {came.checksum:#018x}, of what came " in result.broken.message
    assert (receiver.counts.parts, receiver.counts.mismatched_parts) == (0, 1)
    assert receiver.end(1), "it is asked for again at once"


def test_a_wrong_checksum_of_a_transfer_that_was_ended_is_counted() -> None:
    bench = Bench()
    bench.receiver.open(1, first_page=0, pages=1, page_ids=[3])
    bench.notify(bench.part(1, 0, 0, 100))
    assert not bench.receiver.end(1)
    result = bench.receiver.scattered(0, 1)
    assert (result.broken, result.drained, bench.receiver.counts.mismatched_parts) == (None, True, 1)
    with pytest.raises(ValueError, match="slot is 0, must be one of the 0 being scattered"):
        bench.receiver.scattered(0, 1)


def test_a_page_that_has_come_on_all_lanes_cannot_come_again() -> None:
    incoming = _Incoming(0, [7, 8], [LANE, LANE])
    incoming.coverage[0].claim(0, 200)
    incoming.missing[1] = 0  # as if it had
    with pytest.raises(AssertionError, match="rows of a page once"):
        incoming.written(0, 0, 200)
