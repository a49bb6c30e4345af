"""The sending half of a session: which bytes of which transfer go into which slot next.

A state machine without I/O. For each free sending slot and credit, `next_actions` names a byte range to gather, with
its header; `gathered` says what to write where; `posted_done` frees the sending slot. A transfer has a cursor on every
lane, which only moves forward, so no byte is sent twice and none before its page is ready. A part takes a sending slot
of its lane's sending rank and a credit of its receiving rank. Lanes take turns, and on each the transfers do, a part
each.

    transfer:       open -> (parts) -> Completed          every byte posted and every post done
                      \\-> end() -> TransferEnded          no gather of it runs and nothing more is posted
                      \\-> gather_failed() -> Failed       likewise
    sending slot:   free -> gathering -> posted -> free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.transfer.geometry.rank_lanes import Lane
from kvferry.transfer.protocol.outgoing import Outgoing
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, CreditPurse, PartHeader, PartNotice, check_unsigned

MAX_PAGES = 1 << 32  # page indexes of a prompt are 32 bits on the wire
PART_ALIGNMENT = 16  # bytes: rows that do not fit in a slot are cut at multiples, so that copies on GPUs are aligned


class Gather(NamedTuple):
    """Copy bytes [byte_offset, byte_offset + nbytes) of the lane's rows of the pages `page_ids`, laid end to end,
    behind `header`, to which the payload's sum is added in a session with checksums.

    The slot is the own sending slot `send_slot`. page_ids[i] holds prompt page first_page + i; every page named is
    touched; byte_offset < row_bytes. `from_rows`: they are rows of the host tier, not pages of the pool.
    """

    transfer: int
    send_slot: int
    credit: Credit
    page_ids: Sequence[int]
    first_page: int
    byte_offset: int
    nbytes: int
    header: PartHeader
    lane: int = 0
    from_rows: bool = False


class PostPart(NamedTuple):
    """Write the first `nbytes` of the sending slot into the peer's slot `remote_slot`."""

    post_id: int
    transfer: int
    send_slot: int
    remote_slot: int
    nbytes: int  # header and payload
    notification: bytes


@dataclass(frozen=True, slots=True)
class Completed:
    """Every byte of the transfer is in the peer's slots. The transfer is forgotten."""

    transfer: int
    pages: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer after end(): no gather of it runs and nothing more is posted; posts in flight may still land in
    slots."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A gather failed: as TransferEnded, but the sender's own doing."""

    transfer: int
    message: str


SenderEvent = Completed | TransferEnded | Failed


class Sender:
    """One per session and direction. Not thread-safe: one owner calls it.

    lanes: between both sides' ranks. slot_bytes: the smaller of both sides' slots, header included. send_slots: own
    sending slots of each rank. remote_slots: the peer's receive slots of each rank. epoch: of the peer's pool, by which
    it knows its own transfers.
    """

    def __init__(
        self, *, lanes: Sequence[Lane], slot_bytes: int, send_slots: int, remote_slots: int, epoch: int
    ) -> None:
        if not lanes or min(lane.row_bytes for lane in lanes) < 1:
            raise ValueError(f"lanes has {len(lanes)}, must have at least 1, with row_bytes of at least 1")
        if slot_bytes <= HEADER_BYTES:
            raise ValueError(f"slot_bytes is {slot_bytes}, must be greater than the header's {HEADER_BYTES}")
        if send_slots < 1:
            raise ValueError(f"send_slots is {send_slots}, must be at least 1")
        check_unsigned("epoch", epoch, 64)
        self._lanes = list(lanes)
        self._cuts = [_cut_bytes(lane.row_bytes, slot_bytes - HEADER_BYTES) for lane in lanes]
        self._epoch = epoch
        self._purse = CreditPurse(remote_slots, 1 + max(lane.receiver for lane in lanes))
        self._send_slots = send_slots
        self._free_slots = [  # by rank
            deque(range(rank * send_slots, (rank + 1) * send_slots))
            for rank in range(1 + max(lane.sender for lane in lanes))
        ]
        self._gathering: dict[int, Gather] = {}  # by sending slot
        self._posted: dict[int, tuple[int, int]] = {}  # post id: (sending slot, transfer)
        self._next_post = 1
        self._transfers: dict[int, Outgoing] = {}
        # By lane: transfers with bytes to send; closed ones are dropped when met.
        self._rounds: list[deque[int]] = [deque() for _ in lanes]
        self._turn = 0  # the lane whose turn it is
        self._events: list[SenderEvent] = []

    @property
    def free_credits(self) -> int:
        """Credits that no part has."""
        return len(self._purse)

    @property
    def free_send_slots(self) -> int:
        """Sending slots that no part has."""
        return sum(map(len, self._free_slots))

    @property
    def posts_in_flight(self) -> int:
        """Posts that the courier has not reported done."""
        return len(self._posted)

    def transfers(self) -> list[int]:
        """The transfers that are neither completed nor ended."""
        return list(self._transfers)

    def credits(self, credits: Sequence[Credit]) -> None:
        """Credits that the receiver granted. Raises SlotError (end the session) if one cannot be."""
        self._purse.add(credits)

    def open(
        self, transfer: int, *, first_page: int, pages: int, page_ids: Sequence[int], from_rows: bool = False
    ) -> None:
        """A transfer of prompt pages first_page..first_page+pages-1, which lie in pool pages `page_ids`, or in those
        rows of the host tier.

        The caller keeps them locked until released(). No page counts as ready until progress() says so. With pages ==
        0 it is completed at once. Raises ValueError if the transfer is open or the numbers disagree.
        """
        check_unsigned("transfer", transfer, 64)
        if transfer in self._transfers:
            raise ValueError(f"transfer {transfer} is open already")
        if pages < 0 or first_page < 0 or first_page + pages > MAX_PAGES:
            raise ValueError(
                f"first_page {first_page} and pages {pages} must not be negative, nor end behind {MAX_PAGES}"
            )
        if len(page_ids) != pages:
            raise ValueError(f"page_ids has {len(page_ids)} entries, must have pages = {pages}")
        if pages == 0:
            self._events.append(Completed(transfer, 0))
            return
        self._transfers[transfer] = Outgoing(first_page, list(page_ids), len(self._lanes), from_rows)

    def progress(self, transfer: int, pages_ready: int) -> None:
        """Prompt pages [0, pages_ready) are final in the pool. Ignored for a transfer that is completed or ended.

        Raises ValueError if it goes back.
        """
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            return
        pages = min(max(pages_ready - outgoing.first_page, 0), len(outgoing.page_ids))
        if pages < outgoing.ready:
            was = outgoing.first_page + outgoing.ready
            raise ValueError(f"pages_ready of transfer {transfer} is {pages_ready}, must be at least {was} as before")
        outgoing.ready = pages
        for lane in range(len(self._lanes)):
            self._queue(lane, transfer, outgoing)

    def end(self, transfer: int) -> None:
        """Posts no more of the transfer. TransferEnded follows, at once for a transfer that is not open (any more)."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            self._events.append(TransferEnded(transfer))
            return
        outgoing.ended = True
        self._close_if_drained(transfer, outgoing)

    def released(self, transfer: int) -> bool:
        """Whether no gather of this transfer runs or will run: its pages are read no more."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            return True
        return outgoing.gathers == 0 and (outgoing.closed or outgoing.unsent == 0)

    def next_actions(self, most: int | None = None) -> list[Gather]:
        """Gathers, as many as sending slots, credits and ready bytes allow and no more than `most`. Answer each by
        gathered or gather_failed."""
        gathers: list[Gather] = []
        idle = 0  # lanes in a row that had nothing, or no slot, or no credit
        while idle < len(self._lanes) and (most is None or len(gathers) < most):
            gather = self._next_on(self._turn)
            self._turn = (self._turn + 1) % len(self._lanes)
            if gather is None:
                idle += 1
            else:
                idle = 0
                gathers.append(gather)
        return gathers

    def gathered(self, send_slot: int) -> PostPart | None:
        """Header and payload are in the sending slot: the write to post, or None if the transfer ended meanwhile."""
        gather, outgoing = self._gather_done(send_slot)
        if outgoing.closed:
            self._undo(gather)
            self._close_if_drained(gather.transfer, outgoing)
            return None
        credit = gather.credit
        self._purse.spend(credit)
        notice = PartNotice(epoch=self._epoch, transfer=gather.transfer, slot=credit.slot, generation=credit.generation)
        post_id = self._next_post
        self._next_post += 1
        self._posted[post_id] = (send_slot, gather.transfer)
        outgoing.posted += 1
        return PostPart(
            post_id=post_id,
            transfer=gather.transfer,
            send_slot=send_slot,
            remote_slot=credit.slot,
            nbytes=gather.nbytes + HEADER_BYTES,
            notification=notice.pack(),
        )

    def gather_failed(self, send_slot: int, message: str) -> None:
        """The copy ended without its bytes: the transfer fails, once no other gather of it runs."""
        gather, outgoing = self._gather_done(send_slot)
        self._undo(gather)
        if outgoing.failure is None:
            outgoing.failure = message
        self._close_if_drained(gather.transfer, outgoing)

    def posted_done(self, post_id: int) -> None:
        """The courier reports that this write is complete at the peer. Raises ValueError for a post not in flight."""
        if post_id not in self._posted:
            raise ValueError(f"post_id is {post_id}, must be one of the {len(self._posted)} posts in flight")
        send_slot, transfer = self._posted.pop(post_id)
        self._free(send_slot)
        outgoing = self._transfers.get(transfer)
        if outgoing is None:  # ended while this was in flight
            return
        outgoing.posted -= 1
        if outgoing.unsent == 0 and outgoing.gathers == 0 and outgoing.posted == 0 and not outgoing.closed:
            del self._transfers[transfer]
            self._events.append(Completed(transfer, len(outgoing.page_ids)))

    def poll_events(self) -> list[SenderEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Recounts everything; for tests."""
        busy = [*self._gathering, *(send_slot for send_slot, _ in self._posted.values())]
        free = [slot for slots in self._free_slots for slot in slots]
        assert sorted([*free, *busy]) == list(range(self._send_slots * len(self._free_slots)))
        assert all(slot // self._send_slots == rank for rank, slots in enumerate(self._free_slots) for slot in slots)
        for gather in self._gathering.values():
            lane = self._lanes[gather.lane]
            assert gather.send_slot // self._send_slots == lane.sender
        self._purse.check(gather.credit for gather in self._gathering.values())
        for transfer, outgoing in self._transfers.items():
            assert 0 <= outgoing.ready <= len(outgoing.page_ids)
            for lane, sent, queued in zip(self._lanes, outgoing.sent, outgoing.queued, strict=True):
                assert 0 <= sent <= outgoing.ready * lane.row_bytes
                assert outgoing.closed or queued == (sent < outgoing.ready * lane.row_bytes)
            ends = [len(outgoing.page_ids) * lane.row_bytes for lane in self._lanes]
            assert outgoing.unsent == sum(sent < end for sent, end in zip(outgoing.sent, ends, strict=True))
            assert outgoing.gathers == sum(gather.transfer == transfer for gather in self._gathering.values())
            assert outgoing.posted == sum(owner == transfer for _, owner in self._posted.values())
            assert not outgoing.closed or outgoing.gathers > 0

    def _queue(self, lane: int, transfer: int, outgoing: Outgoing) -> None:
        ready = outgoing.ready * self._lanes[lane].row_bytes
        if not outgoing.queued[lane] and not outgoing.closed and outgoing.sent[lane] < ready:
            outgoing.queued[lane] = True
            self._rounds[lane].append(transfer)

    def _next_on(self, number: int) -> Gather | None:
        """A part of the transfer whose turn it is on this lane."""
        lane, waiting = self._lanes[number], self._rounds[number]
        if not self._free_slots[lane.sender] or not self._purse.has(lane.receiver):
            return None
        while waiting:
            transfer = waiting.popleft()
            outgoing = self._transfers.get(transfer)
            if outgoing is None or outgoing.closed:
                continue
            outgoing.queued[number] = False
            gather = self._cut(number, transfer, outgoing)
            self._queue(number, transfer, outgoing)
            return gather
        return None

    def _cut(self, number: int, transfer: int, outgoing: Outgoing) -> Gather:
        lane, start = self._lanes[number], outgoing.sent[number]
        nbytes = min(self._cuts[number], outgoing.ready * lane.row_bytes - start)
        assert nbytes > 0
        page, byte_offset = divmod(start, lane.row_bytes)
        last_page = (start + nbytes - 1) // lane.row_bytes
        credit = self._purse.take(lane.receiver)
        header = PartHeader(
            epoch=self._epoch,
            transfer=transfer,
            slot=credit.slot,
            generation=credit.generation,
            lane=number,
            first_page=outgoing.first_page + page,
            byte_offset=byte_offset,
            nbytes=nbytes,
        )
        gather = Gather(
            transfer=transfer,
            send_slot=self._free_slots[lane.sender].popleft(),
            credit=credit,
            page_ids=outgoing.page_ids[page : last_page + 1],
            first_page=header.first_page,
            byte_offset=byte_offset,
            nbytes=nbytes,
            header=header,
            lane=number,
            from_rows=outgoing.from_rows,
        )
        outgoing.sent[number] += nbytes
        if outgoing.sent[number] == len(outgoing.page_ids) * lane.row_bytes:
            outgoing.unsent -= 1
        outgoing.gathers += 1
        self._gathering[gather.send_slot] = gather
        return gather

    def _gather_done(self, send_slot: int) -> tuple[Gather, Outgoing]:
        if send_slot not in self._gathering:
            raise ValueError(f"send_slot is {send_slot}, must be one of the {len(self._gathering)} that are gathering")
        gather = self._gathering.pop(send_slot)
        outgoing = self._transfers[gather.transfer]  # it stays while a gather of it runs
        outgoing.gathers -= 1
        return gather, outgoing

    def _undo(self, gather: Gather) -> None:
        self._free(gather.send_slot)
        self._purse.put_back(gather.credit)

    def _free(self, send_slot: int) -> None:
        self._free_slots[send_slot // self._send_slots].append(send_slot)

    def _close_if_drained(self, transfer: int, outgoing: Outgoing) -> None:
        if outgoing.gathers > 0:
            return
        del self._transfers[transfer]
        if outgoing.failure is not None and not outgoing.ended:
            self._events.append(Failed(transfer, outgoing.failure))
        else:
            self._events.append(TransferEnded(transfer))


def _cut_bytes(row_bytes: int, capacity: int) -> int:
    """The most that a part takes: whole rows where one fits."""
    if row_bytes <= capacity:
        return capacity - capacity % row_bytes
    return capacity - capacity % PART_ALIGNMENT if capacity >= PART_ALIGNMENT else capacity
