"""A sender and a receiver joined by an in-memory link over the memories of their ranks.

The link keeps what the real one promises (a notification follows its write; control messages are in order) and
nothing more: copies, writes, reports and notifications run in any order, are repeated, and meet transfers that ended.
The oracle: a page reported arrived holds exactly its bytes, each rank its heads', and keeps them; pages that no open
transfer owns keep theirs; no byte is posted twice; at the end every transfer is over and every credit and slot is back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvferry.daemon.core.counters import TransferCounters
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.credit_groups import CreditGroups
from kvferry.transfer.protocol.receiver import Receiver, ReceiverAction, Regrant, Scatter, ScatterResult
from kvferry.transfer.protocol.sender import Completed, Failed, Gather, PostPart, Sender
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, PartNotice, SlotError
from tests.transfer.protocol.flow_pools import POISON, POOL_PAGES, Pool, Sizes, expect, read_part, write_part

EPOCH = 1234
MAX_OPEN = 5


@dataclass
class Moving:
    """A transfer as the oracle knows it."""

    transfer: int
    first_page: int
    source: list[int]  # pool pages of the sender
    target: list[int]  # of the receiver
    ready: int = 0  # pages
    arrived: set[int] = field(default_factory=set)
    posted: list[tuple[int, int, int]] = field(default_factory=list)  # lane, bytes of its run
    sender_over: bool = False
    receiver_over: bool = False
    ended: bool = False  # by anyone, before it was complete
    released: bool = False


@dataclass(frozen=True)
class Open:
    transfer: int


@dataclass(frozen=True)
class End:
    transfer: int


class Loop:
    """Both cores, both pools, both sets of slots. Each step_* does one thing; `choice` picks among the possible."""

    def __init__(self, sizes: Sizes, *, notice_may_overtake: bool = False) -> None:
        slot_bytes = sizes.capacity + HEADER_BYTES
        self.sizes = sizes
        self.lanes = lanes_of(sizes.geometry, sizes.senders, sizes.receivers)
        self.row_bytes = sum(lane.row_bytes for lane in self.lanes)
        self.notice_may_overtake = notice_may_overtake  # a transport that breaks its promise
        self.sender = Sender(
            lanes=self.lanes,
            slot_bytes=slot_bytes,
            send_slots=sizes.send_slots,
            remote_slots=sizes.slots,
            epoch=EPOCH,
        )
        self.receiver = Receiver(
            epoch=EPOCH, lanes=self.lanes, slot_bytes=slot_bytes, slots=sizes.slots, counts=TransferCounters()
        )
        self.groups = CreditGroups(self.receiver.slots, self.receiver.ranks)
        self.source = Pool(sizes.geometry, sizes.senders, sizes.source)
        self.target = Pool(sizes.geometry, sizes.receivers, sizes.target)
        self.source_rows = self.source.shape.sending_rows(self.lanes)
        self.target_rows = self.target.shape.receiving_rows(self.lanes)
        self.free_source = list(range(POOL_PAGES))
        self.free_target = list(reversed(range(POOL_PAGES)))
        self.send_slots = [bytearray(slot_bytes) for _ in range(sizes.send_slots * sizes.senders)]
        self.receive_slots = [bytearray(slot_bytes) for _ in range(sizes.slots * sizes.receivers)]
        self.moving: dict[int, Moving] = {}
        self.newest = 0
        self.control: list[Open | End | list[Credit]] = [self.receiver.initial_credits()]
        self.gathers: list[Gather] = []
        self.writes: list[PostPart] = []
        self.reports: list[PostPart] = []
        self.notices: list[bytes] = []
        self.delivered: list[bytes] = []
        self.scatters: list[Scatter] = []
        self.posted_parts = self.payload_bytes = self.wire_bytes = 0
        self.session_over = False
        self.ended_while_copying = 0
        self.kept_credits = 0  # times that some were

    # what pages hold

    def content(self, transfer: int, page: int) -> bytes:
        return random.Random(transfer * 1000 + page).randbytes(self.sizes.geometry.page_bytes)

    # steps

    def step_open(self, choice: int) -> None:
        if sum(not m.released for m in self.moving.values()) >= MAX_OPEN:
            return
        pages = min(choice % 5, len(self.free_source), len(self.free_target))
        self.newest += 1 + choice % 3
        moving = Moving(
            transfer=self.newest,
            first_page=choice % 4,
            source=[self.free_source.pop(choice % len(self.free_source)) for _ in range(pages)],
            target=[self.free_target.pop(choice % len(self.free_target)) for _ in range(pages)],
        )
        self.moving[moving.transfer] = moving
        self.receiver.open(moving.transfer, first_page=moving.first_page, pages=pages, page_ids=moving.target)
        moving.receiver_over = pages == 0
        self.control.append(Open(moving.transfer))

    def step_control(self, choice: int) -> None:
        if not self.control:
            return
        message = self.control.pop(0)
        if isinstance(message, Open):
            m = self.moving[message.transfer]
            self.sender.open(m.transfer, first_page=m.first_page, pages=len(m.source), page_ids=m.source)
        elif isinstance(message, End):
            self.sender.end(message.transfer)
        else:
            self.sender.credits(message)
        self.take_events()

    def step_progress(self, choice: int) -> None:
        transfers = self.sender.transfers()
        if not transfers:
            return
        m = self.moving[transfers[choice % len(transfers)]]
        ready = min(m.ready + 1 + choice % 3, len(m.source))
        for page in range(m.ready, ready):
            self.source.store(m.source[page], self.content(m.transfer, page))
        m.ready = ready
        self.sender.progress(m.transfer, m.first_page + ready)

    def step_gather(self, choice: int) -> None:
        self.gathers += self.sender.next_actions()

    def step_gathered(self, choice: int) -> None:
        if not self.gathers:
            return
        g = self.gathers.pop(choice % len(self.gathers))
        lane, end = self.lanes[g.lane], g.byte_offset + g.nbytes
        expect((len(g.page_ids) - 1) * lane.row_bytes < end, "a gather names a page that it does not read")
        expect(end <= len(g.page_ids) * lane.row_bytes, "a gather reads behind its pages")
        expect(g.nbytes <= self.sizes.capacity, "a part is larger than a slot")
        expect(g.send_slot // self.sizes.send_slots == lane.sender, "a sending slot of another rank")
        expect(g.credit.slot // self.sizes.slots == lane.receiver, "a credit of another rank")
        if lane.row_bytes <= self.sizes.capacity:
            expect(g.byte_offset == 0, "a part begins inside a row that fits in a slot")
            expect(g.nbytes % lane.row_bytes == 0, "a part ends inside one")
        slot = self.send_slots[g.send_slot]
        slot[HEADER_BYTES : HEADER_BYTES + g.nbytes] = read_part(
            self.source.memories[lane.sender], self.source_rows[g.lane], g.page_ids, g.byte_offset, g.nbytes
        )
        post = self.sender.gathered(g.send_slot)
        self.take_events()
        if post is None:
            return
        slot[:HEADER_BYTES] = g.header.pack()
        m = self.moving[g.transfer]
        expect(not m.sender_over, "a part is posted after the transfer's end")
        start = (g.first_page - m.first_page) * lane.row_bytes + g.byte_offset
        before = [(low, high) for number, low, high in m.posted if number == g.lane]
        expect(all(high <= start or start + g.nbytes <= low for low, high in before), "bytes are posted twice")
        m.posted.append((g.lane, start, start + g.nbytes))
        expect(post.nbytes == g.nbytes + HEADER_BYTES, "a post is not header and payload")
        self.posted_parts += 1
        self.payload_bytes += g.nbytes
        self.wire_bytes += post.nbytes
        self.writes.append(post)
        if self.notice_may_overtake and choice % 3 == 0:
            self.notices.append(post.notification)

    def step_gather_failed(self, choice: int) -> None:
        if not self.gathers or choice % 4:
            return
        g = self.gathers.pop(choice % len(self.gathers))
        self.sender.gather_failed(g.send_slot, "gather failed")
        self.take_events()

    def step_write(self, choice: int) -> None:
        if not self.writes:
            return
        post = self.writes.pop(choice % len(self.writes))
        self.receive_slots[post.remote_slot][: post.nbytes] = self.send_slots[post.send_slot][: post.nbytes]
        self.reports.append(post)
        if post.notification not in self.notices + self.delivered:
            self.notices.append(post.notification)

    def step_report(self, choice: int) -> None:
        if self.reports:
            self.sender.posted_done(self.reports.pop(choice % len(self.reports)).post_id)
            self.take_events()

    def step_notice(self, choice: int) -> None:
        if self.notices:
            self.deliver(self.notices.pop(choice % len(self.notices)))

    def step_repeat(self, choice: int) -> None:
        if self.delivered:
            self.deliver(self.delivered[-1 - choice % min(len(self.delivered), 8)])

    def step_other_epoch(self, choice: int) -> None:
        slot = choice % len(self.receive_slots)
        self.deliver(PartNotice(EPOCH - 1, self.newest, slot, 1 + choice % 4).pack())

    def step_scatter(self, choice: int) -> None:
        if not self.scatters:
            return
        s = self.scatters.pop(choice % len(self.scatters))
        self.copy_out(s, s.nbytes)
        self.after_copy(self.receiver.scattered(s.slot))

    def step_scatter_failed(self, choice: int) -> None:
        if not self.scatters or choice % 4:
            return
        s = self.scatters.pop(choice % len(self.scatters))
        self.copy_out(s, s.nbytes // 2)
        self.after_copy(self.receiver.scatter_failed(s.slot, "scatter failed"))

    def step_end(self, choice: int) -> None:
        living = [m for m in self.moving.values() if not m.receiver_over and not m.ended]
        copying = {g.transfer for g in self.gathers} | {s.transfer for s in self.scatters}
        if choice % 4:  # mostly in the middle of something
            living = [m for m in living if m.transfer in copying]
        if living:
            self.end(living[choice % len(living)])

    # what follows from steps

    def end(self, m: Moving) -> None:
        if m.receiver_over:
            return
        m.ended = True
        self.control.append(End(m.transfer))
        if self.receiver.end(m.transfer):
            self.receiver_is_over(m)
        else:
            self.ended_while_copying += 1
        self.give_back_the_rest()

    def give_back(self, credit: Credit) -> None:
        if group := self.groups.add(credit):
            self.control.append(group)
        self.give_back_the_rest()
        self.kept_credits += len(self.groups) > 0

    def give_back_the_rest(self) -> None:
        if not self.receiver.transfers() and (rest := self.groups.rest()):
            self.control.append(rest)

    def deliver(self, payload: bytes) -> None:
        self.delivered.append(payload)
        try:
            actions = self.receiver.notification(payload, lambda slot: self.receive_slots[slot][:HEADER_BYTES])
        except SlotError as error:
            expect(self.notice_may_overtake, f"an honest session is called broken: {error}")
            self.session_over = True
            return
        for action in actions:
            self.act(action)

    def act(self, action: ReceiverAction) -> None:
        if isinstance(action, Scatter):
            self.scatters.append(action)
        elif isinstance(action, Regrant):
            self.give_back(action.credit)
        else:
            expect(self.notice_may_overtake, f"an honest transfer is called broken: {action.message}")
            self.end(self.moving[action.transfer])

    def copy_out(self, s: Scatter, nbytes: int) -> None:
        m = self.moving[s.transfer]
        first = s.first_page - m.first_page
        expect(not m.receiver_over, "a copy runs after its transfer let the pages go")
        expect(m.target[first : first + len(s.page_ids)] == list(s.page_ids), "a copy names pages of others")
        lane, end = self.lanes[s.lane], s.byte_offset + s.nbytes
        expect(end <= len(s.page_ids) * lane.row_bytes, "a copy writes behind its pages")
        expect((len(s.page_ids) - 1) * lane.row_bytes < end, "a copy names a page that it does not write")
        expect(s.slot // self.sizes.slots == lane.receiver, "a copy out of a slot of another rank")
        payload = bytes(self.receive_slots[s.slot][HEADER_BYTES : HEADER_BYTES + nbytes])
        if payload:
            write_part(
                self.target.memories[lane.receiver], self.target_rows[s.lane], s.page_ids, s.byte_offset, payload
            )

    def after_copy(self, result: ScatterResult) -> None:
        m = self.moving[result.transfer]
        self.give_back(result.credit)
        for page in result.arrived:
            expect(not m.ended, "a page of an ended transfer is reported")
            expect(page not in m.arrived, "a page is reported twice")
            m.arrived.add(page)
        self.check_pages(m)
        if result.complete:
            expect(len(m.arrived) == len(m.target), "complete without all pages")
            self.receiver_is_over(m)
        elif result.drained:
            self.receiver_is_over(m)
        elif result.broken is not None:
            self.end(m)

    def take_events(self) -> None:
        for event in self.sender.poll_events():
            m = self.moving[event.transfer]
            expect(not any(g.transfer == event.transfer for g in self.gathers), "over while a gather runs")
            expect(self.sender.released(event.transfer), "over but not released")
            if isinstance(event, Completed):
                expect(not m.sender_over, "completed after its end")
                payload = len(m.source) * self.row_bytes
                expect(payload == sum(end - start for _, start, end in m.posted), "payload")
                expect(event.pages == len(m.source), "pages")
            if not m.sender_over:
                m.sender_over = True
                for page_id in m.source:  # the pages are somebody else's now
                    self.source.fill(page_id, 0xEE)
                self.free_source += m.source
                self.release(m)
            if isinstance(event, Failed):
                self.end(m)

    def receiver_is_over(self, m: Moving) -> None:
        expect(not m.receiver_over, "over twice")
        self.check_pages(m)
        m.receiver_over = True
        self.release(m)

    def release(self, m: Moving) -> None:
        """Pages of ended transfers go at once; those of complete ones are used until the sender knows, too."""
        if m.receiver_over and (m.ended or m.sender_over) and not m.released:
            self.check_pages(m)
            m.released = True
            for page_id in m.target:
                self.target.fill(page_id, POISON)
            self.free_target += m.target

    def check_pages(self, m: Moving) -> None:
        for page in m.arrived:
            i = page - m.first_page
            expect(self.target.holds(m.target[i], self.content(m.transfer, i)), "a page holds foreign bytes")

    def check(self) -> None:
        self.sender.check()
        self.receiver.check()
        for m in self.moving.values():
            if not m.released:
                self.check_pages(m)
        for page_id in self.free_target:
            expect(self.target.is_filled(page_id, POISON), "a free page is written")

    def drain(self) -> None:
        """Everything that is under way goes its way; what cannot end is a violation."""
        for _ in range(2000):  # a part a round, where there is one slot of a few bytes
            for step in (
                self.step_control,
                self.step_progress,
                self.step_gather,
                self.step_gathered,
                self.step_write,
                self.step_report,
                self.step_notice,
                self.step_scatter,
            ):
                step(1)
            for transfer in self.sender.transfers():
                self.step_progress(self.sender.transfers().index(transfer))
            if self.session_over:
                return
            queues = (self.control, self.gathers, self.writes, self.reports, self.notices, self.scatters)
            if not any(queues) and not self.sender.transfers():
                break
        stuck = [m.transfer for m in self.moving.values() if not m.released]
        expect(not stuck, f"transfers {stuck} never end")
        expect(self.sender.free_credits == len(self.receive_slots), "the sender lacks credits")
        expect(self.receiver.free_credits == len(self.receive_slots), "the receiver lacks slots")
        used = 1 + max(lane.sender for lane in self.lanes)
        expect(self.sender.free_send_slots == self.sizes.send_slots * used, "the sender lacks sending slots")
        expect(self.wire_bytes == self.payload_bytes + self.posted_parts * HEADER_BYTES, "headers")
        received = self.receiver.counts
        if not any(m.ended for m in self.moving.values()):
            delta = sum(len(m.source) for m in self.moving.values()) * self.row_bytes
            expect(self.payload_bytes == received.payload_bytes == delta, "more or less than the delta was sent")
            expect(self.posted_parts == received.parts, "parts")
            expect(received.dropped_parts == 0, "dropped parts")
