"""The sending half of a session: which bytes of which transfer go into which slot next.

A state machine without I/O. For each free sending slot and credit, `next_actions` names a byte range to gather;
`gathered` says what to write where; `posted_done` frees the sending slot. The cursor of a transfer only moves
forward, so no byte is sent twice and none before its page is ready. Transfers take turns, a part each.

    transfer:       open -> (parts) -> Completed          every byte posted and every post done
                      \\-> end() -> Ended                  no gather of it runs and nothing more is posted
                      \\-> gather_failed() -> Failed       likewise
    sending slot:   free -> gathering -> posted -> free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.transfer.slots import HEADER_BYTES, Credit, CreditPurse, PartHeader, PartNotice, check_unsigned

MAX_PAGES = 1 << 32  # page indexes of a prompt are 32 bits on the wire


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy bytes [byte_offset, byte_offset + nbytes) of the pages `page_ids`, laid end to end, behind a header.

    The slot is the own sending slot `send_slot`. page_ids[i] holds prompt page first_page + i; every page named is
    touched; byte_offset < page_bytes.
    """

    transfer: int
    send_slot: int
    credit: Credit
    page_ids: Sequence[int]
    first_page: int
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Post:
    """Put `header` at the start of the sending slot and write its first `nbytes` into the peer's slot `remote_slot`."""

    post_id: int
    transfer: int
    send_slot: int
    remote_slot: int
    nbytes: int  # header and payload
    notification: bytes
    header: bytes


@dataclass(frozen=True, slots=True)
class Completed:
    """Every byte of the transfer is in the peer's slots. The transfer is forgotten."""

    transfer: int
    parts: int
    payload_bytes: int
    wire_bytes: int  # payload and headers


@dataclass(frozen=True, slots=True)
class Ended:
    """After end(): no gather of it runs and nothing more is posted; posts in flight may still land in slots."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A gather failed: as Ended, but the sender's own doing."""

    transfer: int
    message: str


SenderEvent = Completed | Ended | Failed


@dataclass(slots=True)
class SenderCounts:
    """Of the session so far; bytes are counted when they are posted."""

    parts: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0


class _Outgoing:
    """One transfer."""

    __slots__ = (
        "ended",
        "failure",
        "first_page",
        "gathers",
        "nbytes",
        "page_ids",
        "parts",
        "posted",
        "queued",
        "ready",
        "sent",
    )

    def __init__(self, first_page: int, page_ids: Sequence[int], page_bytes: int) -> None:
        self.first_page = first_page
        self.page_ids = page_ids
        self.nbytes = len(page_ids) * page_bytes
        self.ready = 0  # bytes from the run's start that are final in the pool
        self.sent = 0  # the cursor: bytes from the run's start given to gathers
        self.parts = 0
        self.gathers = 0  # running
        self.posted = 0  # posts in flight
        self.queued = False  # whether it stands in the round
        self.ended = False
        self.failure: str | None = None

    @property
    def closed(self) -> bool:
        return self.ended or self.failure is not None


class Sender:
    """One per session and direction. Not thread-safe: one owner calls it.

    page_bytes: of a page on this rank. slot_bytes: the smaller of both sides' slots, header included. send_slots: own
    sending slots. remote_slots: the peer's receive slots. epoch: of the peer's pool, by which it knows its own
    transfers.
    """

    def __init__(
        self, *, page_bytes: int, slot_bytes: int, send_slots: int, remote_slots: int, epoch: int, rank: int = 0
    ) -> None:
        if page_bytes < 1:
            raise ValueError(f"page_bytes is {page_bytes}, must be at least 1")
        if slot_bytes <= HEADER_BYTES:
            raise ValueError(f"slot_bytes is {slot_bytes}, must be greater than the header's {HEADER_BYTES}")
        if send_slots < 1:
            raise ValueError(f"send_slots is {send_slots}, must be at least 1")
        check_unsigned("epoch", epoch, 64)
        check_unsigned("rank", rank, 16)
        self._page_bytes = page_bytes
        self._capacity = slot_bytes - HEADER_BYTES
        self._epoch = epoch
        self._rank = rank
        self._purse = CreditPurse(remote_slots)
        self._send_slots = send_slots
        self._free_slots = deque(range(send_slots))
        self._gathering: dict[int, Gather] = {}  # by sending slot
        self._posted: dict[int, tuple[int, int]] = {}  # post id: (sending slot, transfer)
        self._next_post = 1
        self._transfers: dict[int, _Outgoing] = {}
        self._round: deque[int] = deque()  # transfers with bytes to send; closed ones are dropped when met
        self._events: list[SenderEvent] = []
        self.counts = SenderCounts()

    @property
    def free_credits(self) -> int:
        """Credits that no part has."""
        return len(self._purse)

    @property
    def free_send_slots(self) -> int:
        """Sending slots that no part has."""
        return len(self._free_slots)

    @property
    def posts_in_flight(self) -> int:
        """Posts that the courier has not reported done."""
        return len(self._posted)

    def transfers(self) -> list[int]:
        """Those neither completed nor ended."""
        return list(self._transfers)

    def credits(self, credits: Sequence[Credit]) -> None:
        """Credits that the receiver granted. Raises SlotError (end the session) if one cannot be."""
        self._purse.add(credits)

    def open(self, transfer: int, *, first_page: int, pages: int, page_ids: Sequence[int]) -> None:
        """A transfer of prompt pages first_page..first_page+pages-1, which lie in pool pages `page_ids`.

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
            self._events.append(Completed(transfer, 0, 0, 0))
            return
        self._transfers[transfer] = _Outgoing(first_page, list(page_ids), self._page_bytes)

    def progress(self, transfer: int, pages_ready: int) -> None:
        """Prompt pages [0, pages_ready) are final in the pool. Ignored for a transfer that is completed or ended.

        Raises ValueError if it goes back.
        """
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            return
        pages = min(max(pages_ready - outgoing.first_page, 0), len(outgoing.page_ids))
        if pages * self._page_bytes < outgoing.ready:
            was = outgoing.first_page + outgoing.ready // self._page_bytes
            raise ValueError(f"pages_ready of transfer {transfer} is {pages_ready}, must be at least {was} as before")
        outgoing.ready = pages * self._page_bytes
        self._queue(transfer, outgoing)

    def end(self, transfer: int) -> None:
        """Post no more of it. An Ended event follows, at once for a transfer that is not open (any more)."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            self._events.append(Ended(transfer))
            return
        outgoing.ended = True
        self._close_if_drained(transfer, outgoing)

    def released(self, transfer: int) -> bool:
        """Whether no gather of this transfer runs or will run: its pages are read no more."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            return True
        return outgoing.gathers == 0 and (outgoing.closed or outgoing.sent == outgoing.nbytes)

    def next_actions(self) -> list[Gather]:
        """As many gathers as sending slots, credits and ready bytes allow. Answer each by gathered or gather_failed."""
        gathers: list[Gather] = []
        while self._round and self._free_slots and len(self._purse) > 0:
            transfer = self._round.popleft()
            outgoing = self._transfers.get(transfer)
            if outgoing is None or outgoing.closed:
                continue
            outgoing.queued = False
            gathers.append(self._cut(transfer, outgoing))
            self._queue(transfer, outgoing)
        return gathers

    def gathered(self, send_slot: int, checksum: int = 0) -> Post | None:
        """The payload is in the sending slot: the write to post, or None if the transfer ended meanwhile.

        checksum: of the payload, 64 bits; 0 for none.
        """
        check_unsigned("checksum", checksum, 64)
        gather, outgoing = self._gather_done(send_slot)
        if outgoing.closed:
            self._undo(gather)
            self._close_if_drained(gather.transfer, outgoing)
            return None
        credit = gather.credit
        self._purse.spend(credit)
        header = PartHeader(
            epoch=self._epoch,
            transfer=gather.transfer,
            slot=credit.slot,
            generation=credit.generation,
            rank=self._rank,
            first_page=gather.first_page,
            byte_offset=gather.byte_offset,
            nbytes=gather.nbytes,
            checksum=checksum,
        )
        notice = PartNotice(epoch=self._epoch, transfer=gather.transfer, slot=credit.slot, generation=credit.generation)
        post_id = self._next_post
        self._next_post += 1
        self._posted[post_id] = (send_slot, gather.transfer)
        outgoing.posted += 1
        outgoing.parts += 1
        self.counts.parts += 1
        self.counts.payload_bytes += gather.nbytes
        self.counts.wire_bytes += gather.nbytes + HEADER_BYTES
        return Post(
            post_id=post_id,
            transfer=gather.transfer,
            send_slot=send_slot,
            remote_slot=credit.slot,
            nbytes=gather.nbytes + HEADER_BYTES,
            notification=notice.pack(),
            header=header.pack(),
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
        self._free_slots.append(send_slot)
        outgoing = self._transfers.get(transfer)
        if outgoing is None:  # ended while this was in flight
            return
        outgoing.posted -= 1
        if outgoing.sent == outgoing.nbytes and outgoing.gathers == 0 and outgoing.posted == 0 and not outgoing.closed:
            del self._transfers[transfer]
            wire_bytes = outgoing.nbytes + outgoing.parts * HEADER_BYTES
            self._events.append(Completed(transfer, outgoing.parts, outgoing.nbytes, wire_bytes))

    def poll_events(self) -> list[SenderEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Recounts everything; for tests."""
        busy = [*self._gathering, *(send_slot for send_slot, _ in self._posted.values())]
        assert sorted([*self._free_slots, *busy]) == list(range(self._send_slots))
        self._purse.check(gather.credit for gather in self._gathering.values())
        for transfer, outgoing in self._transfers.items():
            assert 0 <= outgoing.sent <= outgoing.ready <= outgoing.nbytes
            assert outgoing.gathers == sum(gather.transfer == transfer for gather in self._gathering.values())
            assert outgoing.posted == sum(owner == transfer for _, owner in self._posted.values())
            assert not outgoing.closed or outgoing.gathers > 0
            assert outgoing.closed or outgoing.queued == (outgoing.sent < outgoing.ready)

    def _queue(self, transfer: int, outgoing: _Outgoing) -> None:
        if not outgoing.queued and not outgoing.closed and outgoing.sent < outgoing.ready:
            outgoing.queued = True
            self._round.append(transfer)

    def _cut(self, transfer: int, outgoing: _Outgoing) -> Gather:
        start = outgoing.sent
        nbytes = min(self._capacity, outgoing.ready - start)
        assert nbytes > 0
        page, byte_offset = divmod(start, self._page_bytes)
        last_page = (start + nbytes - 1) // self._page_bytes
        gather = Gather(
            transfer=transfer,
            send_slot=self._free_slots.popleft(),
            credit=self._purse.take(),
            page_ids=outgoing.page_ids[page : last_page + 1],
            first_page=outgoing.first_page + page,
            byte_offset=byte_offset,
            nbytes=nbytes,
        )
        outgoing.sent += nbytes
        outgoing.gathers += 1
        self._gathering[gather.send_slot] = gather
        return gather

    def _gather_done(self, send_slot: int) -> tuple[Gather, _Outgoing]:
        if send_slot not in self._gathering:
            raise ValueError(f"send_slot is {send_slot}, must be one of the {len(self._gathering)} that are gathering")
        gather = self._gathering.pop(send_slot)
        outgoing = self._transfers[gather.transfer]  # it stays while a gather of it runs
        outgoing.gathers -= 1
        return gather, outgoing

    def _undo(self, gather: Gather) -> None:
        self._free_slots.append(gather.send_slot)
        self._purse.put_back(gather.credit)

    def _close_if_drained(self, transfer: int, outgoing: _Outgoing) -> None:
        if outgoing.gathers > 0:
            return
        del self._transfers[transfer]
        if outgoing.failure is not None and not outgoing.ended:
            self._events.append(Failed(transfer, outgoing.failure))
        else:
            self._events.append(Ended(transfer))
