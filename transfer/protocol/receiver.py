"""The receiving half of a session: which parts are believed, where their bytes go, and when a page has arrived.

A state machine without I/O. A part is believed only if its notification names the credit that is out for the slot
(CreditTable.generation_matches), the header in the slot says the same (check_binding), and its range lies in an open
transfer, was never announced before on its lane (range_error, Coverage.overlaps) and does not scatter the lane's bytes
over more ranges than an honest sender can (Coverage.ranges_with). A page is reported once, when all of its bytes were
copied on every lane (Coverage.covered) and, in a session with checksums, were those that the sender had gathered
(checksum_error); else the transfer is broken and to be asked for again. A part of a transfer that is not open is
dropped, and its slot granted anew.

Where notification and header disagree, the peer or its transport does not keep the protocol, and its write may still
be on the way: SlotError, the slot is granted no more, and the session is to be ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvferry.transfer.geometry.rank_lanes import MAX_LANES, Lane
from kvferry.transfer.protocol.coverage import Coverage
from kvferry.transfer.protocol.slots import (
    HEADER_BYTES,
    Buffer,
    Credit,
    CreditTable,
    PartHeader,
    PartNotice,
    SlotError,
    check_unsigned,
)

MAX_PAGES = 1 << 32  # page indexes of a prompt are 32 bits on the wire

# A sender's cursor only moves forward, so each gap between a lane's ranges of a transfer is parts whose slots are not
# back: slots + 1 ranges at most. Each costs time at every part, so that many more are refused.
RANGES_PER_SLOT = 4
RANGES_BESIDE_SLOTS = 16

ONE_LESS = bytes([0, *range(255)])  # of each byte of a string


class Scatter(NamedTuple):
    """Copy `nbytes` from behind the slot's header to the lane's rows of the pages `page_ids`, laid end to end, from
    byte_offset on.

    page_ids[i] takes prompt page first_page + i; every page named is touched; byte_offset < row_bytes. In a session
    with checksums the copy adds the bytes up, and `scattered` is told.
    """

    slot: int
    transfer: int
    page_ids: Sequence[int]
    first_page: int
    byte_offset: int
    nbytes: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Regrant:
    """A part was dropped; this credit goes back to the sender."""

    credit: Credit
    transfer: int


@dataclass(frozen=True, slots=True)
class TransferBroken:
    """A transfer of which nothing more is believed. Pages reported arrived stay so; end() it, ask again for the
    rest."""

    transfer: int
    message: str


ReceiverAction = Scatter | Regrant | TransferBroken


class ScatterResult(NamedTuple):
    """The result of a copy. A transfer that is complete or drained is forgotten."""

    transfer: int
    credit: Credit  # goes back to the sender
    arrived: list[int]  # prompt page indexes fully here now, ascending; none once the transfer is ended or broken
    complete: bool  # every page of the transfer has arrived
    drained: bool  # the transfer was ended, and this was its last copy: its pages may be used again
    broken: TransferBroken | None = None


class ReceiverCounts(Protocol):
    """Totals to which a receiver adds; parts and bytes are counted when their copy is done."""

    parts: int
    payload_bytes: int
    wire_bytes: int
    mismatched_parts: int  # copied out, with another checksum than their header's
    dropped_parts: int  # of transfers that were not open, or refused for their range
    stale_notifications: int  # of another epoch, or a credit that is not out: repeated, late, or made up


class _Incoming:
    """One transfer."""

    __slots__ = ("broken", "coverage", "ended", "first_page", "missing", "page_ids", "scatters")

    def __init__(self, first_page: int, page_ids: Sequence[int], lanes: Sequence[Lane]) -> None:
        self.first_page = first_page
        self.page_ids = page_ids
        self.coverage = [Coverage(pages=len(page_ids), page_bytes=lane.row_bytes) for lane in lanes]
        self.missing = bytearray([len(lanes)]) * len(page_ids)  # by page, lanes on which its row is not complete
        self.scatters = 0  # running
        self.ended = False
        self.broken = False

    @property
    def closed(self) -> bool:
        return self.ended or self.broken

    @property
    def complete(self) -> bool:
        return all(coverage.complete for coverage in self.coverage)

    def written(self, lane: int, start: int, nbytes: int) -> list[int]:
        """A claimed range of the lane is in its pages: the pages which that completes on all lanes, ascending."""
        rows = self.coverage[lane].written(start, nbytes)
        if len(self.coverage) == 1:
            return rows
        if not rows:
            return []
        first, behind = rows[0], rows[-1] + 1
        assert behind - first == len(rows), "rows of one range"
        owed = self.missing[first:behind]
        assert 0 not in owed, "a lane has its rows of a page once"
        left = self.missing[first:behind] = owed.translate(ONE_LESS)
        return [first + i for i, lanes in enumerate(left) if lanes == 0] if any(left) else rows


class _Running(NamedTuple):
    """A copy out of a slot."""

    incoming: _Incoming
    header: PartHeader
    start: int  # byte of the transfer's run on the lane


class Receiver:
    """One per session and direction. Not thread-safe: one owner calls it.

    epoch: of the own pool. lanes: between both sides' ranks. slot_bytes: of a receive slot, header included. slots:
    receive slots of each rank; numbered from 0, rank by rank. counts: the owner's.
    """

    def __init__(
        self, *, epoch: int, lanes: Sequence[Lane], slot_bytes: int, slots: int, counts: ReceiverCounts
    ) -> None:
        if not 1 <= len(lanes) <= MAX_LANES or min(lane.row_bytes for lane in lanes) < 1:
            raise ValueError(f"lanes has {len(lanes)}, must have 1 to {MAX_LANES}, with row_bytes of at least 1")
        if slot_bytes <= HEADER_BYTES:
            raise ValueError(f"slot_bytes is {slot_bytes}, must be greater than the header's {HEADER_BYTES}")
        check_unsigned("epoch", epoch, 64)
        self._epoch = epoch
        self._lanes = list(lanes)
        self._capacity = slot_bytes - HEADER_BYTES
        self._slots = slots
        self._credits = CreditTable(slots * (1 + max(lane.receiver for lane in lanes)))
        self._max_ranges = RANGES_PER_SLOT * slots + RANGES_BESIDE_SLOTS
        self._transfers: dict[int, _Incoming] = {}
        self._newest_transfer = -1
        self._running: dict[int, _Running] = {}  # by slot
        self.counts = counts

    @property
    def slots(self) -> int:
        """Slots of each rank."""
        return self._slots

    @property
    def ranks(self) -> int:
        """The number of ranks that have slots."""
        return self._credits.slots // self._slots

    @property
    def free_credits(self) -> int:
        """Slots granted and not known to be written."""
        return self._credits.granted

    @property
    def busy_slots(self) -> int:
        """Slots whose part was announced and is not copied out yet."""
        return self._credits.taken

    @property
    def withheld_slots(self) -> int:
        """Slots granted no more, until the session's end."""
        return self._credits.withheld

    @property
    def scatters_running(self) -> int:
        """Copies out of slots that were not reported done."""
        return len(self._running)

    def transfers(self) -> list[int]:
        """The transfers that are neither complete nor drained."""
        return list(self._transfers)

    def initial_credits(self) -> list[Credit]:
        """The first credit of every slot; called once."""
        return [self._credits.grant(slot) for slot in range(self._credits.slots)]

    def open(self, transfer: int, *, first_page: int, pages: int, page_ids: Sequence[int]) -> None:
        """Awaits prompt pages first_page..first_page+pages-1, to lie in pool pages `page_ids`.

        Nothing is held for pages == 0. Raises ValueError if the numbers disagree, or the transfer's number is not
        greater than all before: a number that was used again would let parts of the old transfer in.
        """
        check_unsigned("transfer", transfer, 64)
        if transfer <= self._newest_transfer:
            raise ValueError(f"transfer is {transfer}, must be greater than {self._newest_transfer}, the newest before")
        if pages < 0 or first_page < 0 or first_page + pages > MAX_PAGES:
            raise ValueError(
                f"first_page {first_page} and pages {pages} must not be negative, nor end behind {MAX_PAGES}"
            )
        if len(page_ids) != pages:
            raise ValueError(f"page_ids has {len(page_ids)} entries, must have pages = {pages}")
        if len(set(page_ids)) != pages:
            raise ValueError(f"page_ids names a page twice among its {pages}")
        self._newest_transfer = transfer
        if pages > 0:
            self._transfers[transfer] = _Incoming(first_page, list(page_ids), self._lanes)

    def notification(self, payload: bytes, read_header: Callable[[int], Buffer]) -> list[ReceiverAction]:
        """A notification of the courier: what to do, in order. read_header(slot) gives the slot's first HEADER_BYTES.

        Nothing for one that repeats or is stale. Raises SlotError (end the session) as the module says; an OSError of
        `read_header` is passed on, and ends it as well.
        """
        notice = PartNotice.unpack(payload)
        slot = notice.slot
        if not slot < self._credits.slots:
            raise SlotError("notification.slot", slot, f"in 0..{self._credits.slots - 1}")
        if notice.epoch != self._epoch or not self._credits.take(slot, notice.generation):
            self.counts.stale_notifications += 1
            return []
        # Also for a part that will be dropped: its slot may be granted anew only if the write is known to be in it.
        try:
            header = PartHeader.unpack(read_header(slot))
            self.check_binding(notice, header)
        except (SlotError, OSError):
            self._credits.withhold(slot)
            raise
        incoming = self._transfers.get(notice.transfer)
        if incoming is None or incoming.closed:
            return [self._drop(notice)]
        message = self.range_error(incoming, header)
        if message is not None:
            incoming.broken = True
            return [TransferBroken(notice.transfer, message), self._drop(notice)]
        row_bytes = self._lanes[header.lane].row_bytes
        start = (header.first_page - incoming.first_page) * row_bytes + header.byte_offset
        incoming.coverage[header.lane].claim(start, header.nbytes)
        incoming.scatters += 1
        self._running[slot] = _Running(incoming, header, start)
        page = start // row_bytes
        last_page = (start + header.nbytes - 1) // row_bytes
        return [
            Scatter(
                slot=slot,
                transfer=notice.transfer,
                page_ids=incoming.page_ids[page : last_page + 1],
                first_page=header.first_page,
                byte_offset=header.byte_offset,
                nbytes=header.nbytes,
                lane=header.lane,
            )
        ]

    def check_binding(self, notice: PartNotice, header: PartHeader) -> None:
        """Guard: the slot's content is that of which the notification speaks, on a lane of the slot's rank. Raises
        SlotError naming the field."""
        for field in ("epoch", "transfer", "slot", "generation"):
            value, announced = getattr(header, field), getattr(notice, field)
            if value != announced:
                raise SlotError(f"part.{field}", value, f"{announced} as in the notification of slot {notice.slot}")
        if not header.lane < len(self._lanes):
            raise SlotError("part.lane", header.lane, f"in 0..{len(self._lanes) - 1}")
        rank = notice.slot // self._slots
        if self._lanes[header.lane].receiver != rank:
            raise SlotError("part.lane", header.lane, f"a lane to rank {rank}, whose slot {notice.slot} is")

    def range_error(self, incoming: _Incoming, header: PartHeader) -> str | None:
        """Guard: the part lies in its slot and its transfer, and none of it was announced before, nor are the lane's
        ranges of the transfer too many with it; else the reason."""
        first, pages = incoming.first_page, len(incoming.page_ids)
        row_bytes, coverage = self._lanes[header.lane].row_bytes, incoming.coverage[header.lane]
        if not first <= header.first_page < first + pages:
            return f"part.first_page is {header.first_page}, must be in {first}..{first + pages - 1}"
        if header.byte_offset >= row_bytes:
            return f"part.byte_offset is {header.byte_offset}, must be less than row_bytes = {row_bytes}"
        start = (header.first_page - first) * row_bytes + header.byte_offset
        limit = min(self._capacity, coverage.nbytes - start)
        if not 1 <= header.nbytes <= limit:
            return f"part.nbytes is {header.nbytes}, must be in 1..{limit} for a part at byte {start} of the transfer"
        if coverage.overlaps(start, header.nbytes):
            end = start + header.nbytes
            return f"part.byte_offset: bytes {start}..{end - 1} of the transfer came twice, must come once"
        ranges = coverage.ranges_with(start, header.nbytes)
        if ranges > self._max_ranges:
            return f"part.byte_offset: separate ranges of the transfer are {ranges}, must be at most {self._max_ranges}"
        return None

    def checksum_error(self, header: PartHeader, payload_sum: int) -> str | None:
        """Guard: the bytes that were copied, and their place, are what the sender gathered; else what is not."""
        checksum = header.checksum_of(payload_sum)
        if checksum == header.checksum:
            return None
        return (
            f"part.checksum is {header.checksum:#018x}, of what came {checksum:#018x}: {header.nbytes} bytes from byte "
            f"{header.byte_offset} of page {header.first_page} on"
        )

    def scattered(self, slot: int, payload_sum: int | None = None) -> ScatterResult:
        """The copy out of this slot is done. payload_sum: the `part_checksum` of the bytes that it copied; None in a
        session without checksums. A part with another checksum than its header's is as one whose scatter failed.
        """
        if payload_sum is not None and slot in self._running:
            message = self.checksum_error(self._running[slot].header, payload_sum)
            if message is not None:
                self.counts.mismatched_parts += 1
                return self.scatter_failed(slot, message)
        running = self._scatter_done(slot)
        incoming, header = running.incoming, running.header
        self.counts.parts += 1
        self.counts.payload_bytes += header.nbytes
        self.counts.wire_bytes += header.nbytes + HEADER_BYTES
        arrived: list[int] = []
        complete = False
        if not incoming.closed:
            pages = incoming.written(header.lane, running.start, header.nbytes)
            arrived = [incoming.first_page + page for page in pages]
            complete = incoming.complete and incoming.scatters == 0
            if complete:
                del self._transfers[header.transfer]
        return ScatterResult(
            transfer=running.header.transfer,
            credit=self._credits.give_back(slot),
            arrived=arrived,
            complete=complete,
            drained=self._forget_if_drained(running.header.transfer, incoming),
        )

    def scatter_failed(self, slot: int, message: str) -> ScatterResult:
        """The copy out of this slot is over and its pages do not hold the bytes: the transfer is broken."""
        running = self._scatter_done(slot)
        incoming = running.incoming
        broken = None
        if not incoming.closed:
            broken = TransferBroken(running.header.transfer, message)
        incoming.broken = True
        return ScatterResult(
            transfer=running.header.transfer,
            credit=self._credits.give_back(slot),
            arrived=[],
            complete=False,
            drained=self._forget_if_drained(running.header.transfer, incoming),
            broken=broken,
        )

    def end(self, transfer: int) -> bool:
        """Wants no more of the transfer: later parts are dropped. Idempotent.

        True: no copy into its pages runs (or it is not open any more), and they may be used again at once. False:
        they may be after the ScatterResult that says drained.
        """
        incoming = self._transfers.get(transfer)
        if incoming is None:
            return True
        incoming.ended = True
        return self._forget_if_drained(transfer, incoming)

    def check(self) -> None:
        """Recounts everything; for tests."""
        self._credits.check()
        for transfer, incoming in self._transfers.items():
            assert incoming.scatters == sum(running.header.transfer == transfer for running in self._running.values())
            assert not incoming.ended or incoming.scatters > 0
            assert transfer <= self._newest_transfer

    def _drop(self, notice: PartNotice) -> Regrant:
        self.counts.dropped_parts += 1
        return Regrant(self._credits.give_back(notice.slot), notice.transfer)

    def _scatter_done(self, slot: int) -> _Running:
        if slot not in self._running:
            raise ValueError(f"slot is {slot}, must be one of the {len(self._running)} being scattered")
        running = self._running.pop(slot)
        running.incoming.scatters -= 1
        return running

    def _forget_if_drained(self, transfer: int, incoming: _Incoming) -> bool:
        if not incoming.ended or incoming.scatters > 0:
            return False
        self._transfers.pop(transfer, None)
        return True
