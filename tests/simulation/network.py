"""Sessions over a network that delays, and NIXL that reorders, repeats, fails, flips bits and lands late.

The product's own sessions run here; what is made up is under them: the stream, the couriers, the copies. Each stream
keeps its order. Writes, their notifications and their reports take any time and any order, but a notification follows
its write (unless `early`: a transport that breaks this). A failed write may land long after its failure was reported,
whole, in part or not at all. A partition loses what is under way; each side notices on its own, later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.peers.link import PeerLink
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import Session, SessionBroken, SessionMeters, SessionSetup, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.link import CourierConfig, CourierLink
from kvferry.transfer.courier.messages import Connected, Notification, PostDone, PostFailed
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Receiver
from kvferry.transfer.protocol.slots import HEADER_BYTES, PartNotice
from tests.simulation.clock import Clock, Pipe, Violation, expect
from tests.simulation.prompts import GEOMETRY

if TYPE_CHECKING:
    from tests.simulation.daemons import SimDecode, SimPrefill
    from tests.simulation.faults import Faults

TIMES = SessionTimes(0.5, 3.0)


class SimCourier:
    """One side's: its slots, and the writes that it has posted."""

    def __init__(self, clock: Clock, faults: Faults, wire: Wire, receive: int, send: int, slot_bytes: int) -> None:
        self._clock, self._faults, self._wire = clock, faults, wire
        self._receive = [bytearray(slot_bytes) for _ in range(receive)]
        self._send = [bytearray(slot_bytes) for _ in range(send)]
        self.session: Session | None = None
        self.remote: SimCourier | None = None
        self.reaped = False
        self.host_slots = self

    def receive_slot(self, slot: int) -> memoryview:
        return memoryview(self._receive[slot])

    def send_slot(self, slot: int) -> memoryview:
        return memoryview(self._send[slot])

    def expect(self, active: int) -> None:
        pass

    def post(self, post_id: int, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> None:
        clock, faults = self._clock, self._faults
        takes = clock.between(0.00005, 0.003)
        counts = clock.counts
        counts["parts"] += 1
        if clock.chance(faults.post_fails):
            counts["writes that failed"] += 1
            clock.after(takes, self._hear, PostFailed(post_id, "injected"))
            if clock.chance(0.7):
                counts["failed writes that landed late"] += 1
                clock.after(takes + clock.between(0.0, 0.05), self._land, send_slot, remote_slot, nbytes, notification)
            return
        if clock.chance(0.1):  # its payload is there before its header
            clock.after(takes * 0.7, self._land_payload, send_slot, remote_slot, nbytes)
        if faults.early and clock.chance(0.05):
            counts["notifications before their write"] += 1
            clock.after(takes * 0.5, self._notify, notification)
        clock.after(takes, self._landed, post_id, send_slot, remote_slot, nbytes, notification)

    def _landed(self, post_id: int, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> None:
        clock = self._clock
        if self._wire.cut or self.reaped:
            # What its process or the network still holds may come, or not.
            if clock.chance(0.5):
                clock.counts["writes that landed after a break"] += 1
                clock.after(clock.between(0.0, 0.5), self._land, send_slot, remote_slot, nbytes, notification)
            return
        self._land(send_slot, remote_slot, nbytes, notification)
        clock.after(clock.between(0.00002, 0.001), self._hear, PostDone(post_id))

    def _land(self, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> None:
        clock = self._clock
        self._put(send_slot, remote_slot, 0, nbytes)
        clock.after(clock.between(0.00001, 0.002), self._notify, notification)
        if clock.chance(self._faults.repeats):
            clock.counts["repeated notifications"] += 1
            clock.after(clock.between(0.0001, 0.02), self._notify, notification)

    def _land_payload(self, send_slot: int, remote_slot: int, nbytes: int) -> None:
        self._put(send_slot, remote_slot, 64, nbytes)

    def _put(self, send_slot: int, remote_slot: int, start: int, end: int) -> None:
        assert self.remote is not None
        if not self.remote.reaped:
            self.remote._receive[remote_slot][start:end] = self._send[send_slot][start:end]
            if self._faults.flips and self._clock.chance(self._faults.flips):
                self._flip(self.remote._receive[remote_slot], end)

    def _flip(self, slot: bytearray, end: int) -> None:
        """A bit of the payload, or of the header."""
        random = self._clock.random
        at = random.randrange(HEADER_BYTES, end) if random.random() < 0.7 else random.randrange(HEADER_BYTES)
        slot[at] ^= 1 << random.randrange(8)
        self._clock.counts["parts with a flipped bit"] += 1

    def _notify(self, payload: bytes) -> None:
        """In every other seed the courier tells the header, as those on GPUs do: what it was when it read it, a while
        before its daemon hears of it. In the others the session reads it."""
        clock = self._clock
        assert self.remote is not None
        if self.remote.reaped:
            return
        if clock.seed % 2:
            self.remote._hear(Notification(payload, b""))
            return
        clock.counts["headers told by couriers"] += 1
        header = bytes(self.remote._receive[PartNotice.unpack(payload).slot][:HEADER_BYTES])
        clock.after(clock.between(0.0, 0.002), self.remote._hear, Notification(payload, header))

    def _hear(self, event: Connected | PostDone | PostFailed | Notification) -> None:
        if not self.reaped:
            assert self.session is not None
            self.session._on_courier(event)


class SimSession(Session):
    """What both ends have here in place of a stream, a courier process and a task."""

    clock: Clock
    wire: Wire
    courier: SimCourier
    pipe: Pipe
    remote_session: SimSession
    over = False

    def send(self, message: peer.PeerMessage) -> None:
        if not self.closed:
            self.pipe.send(self.remote_session.receive, message)

    def receive(self, message: peer.PeerMessage) -> None:
        if self.closed or self.wire.cut:
            return
        try:
            self._dispatch(message)
        except SessionBroken as broken:
            self.break_off(str(broken))

    def begin(self) -> None:
        """The courier is up; the other side's is, too."""
        self._link = cast(CourierLink, self.courier)
        self._parts = self.open_parts(self._link)
        if self.checksums:
            self._parts.begin_sums()
        self.clock.after(self.clock.between(0.001, 0.02), self.courier._hear, Connected())

    def break_off(self, reason: str) -> None:
        if self._broken.done():
            return
        super().break_off(reason)
        self.wire.judge(self, reason)
        self.closed, self.up = True, False
        if not self.wire.cut:
            self.clock.after(self.clock.between(0.0001, 0.01), self.remote_session.break_off, "the stream ended")
        self._reap_when_done()

    def copy_ends(self) -> None:
        super().copy_ends()
        if self.closed:
            self._reap_when_done()

    def _reap_when_done(self) -> None:
        if self._copies == 0:
            self.clock.after(self.clock.between(0.0005, 0.02), self._reap)

    def _reap(self) -> None:
        if self.over:
            return
        self.courier.reaped = self.over = True
        self.wire.over(self)


class SimReceiving(SimSession, ReceivingSession):
    pass


class SimSending(SimSession, SendingSession):
    pass


class Wire:
    """One session between two daemons, until both its ends are torn down."""

    def __init__(self, peering: Peering, number: int) -> None:
        clock, faults = peering.clock, peering.faults
        decode, prefill = peering.decode, peering.prefill
        self.peering, self.prefill, self.number = peering, prefill, number
        self.cut = False
        self.injected = False
        setting = peering.setting
        lanes = lanes_of(GEOMETRY, 1, 1)
        checksums = decode.setting.checksums or prefill.setting.checksums
        self.receiver = Receiver(
            epoch=decode.tiers.epoch,
            lanes=lanes,
            slot_bytes=setting.slot_bytes,
            slots=setting.slots,
            counts=decode.ready_core.transfer_counters,
        )
        setup = SessionSetup(
            remote=prefill.config.name,
            courier=_config(setting.slot_bytes, setting.slots, 0),
            memory=decode.tiers.memory,
            lanes=lanes,
            remote_ranks=1,
            checksums=checksums,
            times=TIMES,
        )
        meters = SessionMeters(decode.ready_core.transfer_counters, decode.ready_core.latencies)
        self.receiving = SimReceiving(setup, meters, receiver=self.receiver, events=peering.link, pages=decode)
        self.sending = prefill.take_session(decode, _config(setting.slot_bytes, 0, setting.send_slots), checksums)
        for session, receive, send in (
            (self.receiving, setting.slots, 0),
            (self.sending, 0, setting.send_slots),
        ):
            session.clock, session.wire = clock, self
            session.courier = SimCourier(clock, faults, self, receive, send, setting.slot_bytes)
            session.courier.session = session
            session.pipe = Pipe(clock, 0.00005, 0.005)
        for one, other in ((self.receiving, self.sending), (self.sending, self.receiving)):
            one.remote_session = other
            one.courier.remote = other.courier
            one.remote_slots = setting.slots if one is self.sending else 0
            one.remote_slot_bytes = setting.slot_bytes
        self.receiving.begin()
        self.sending.begin()

    def judge(self, session: SimSession, reason: str) -> None:
        """Only faults of the network may break a session."""
        self.peering.clock.counts["session ends"] += 1
        honest = "injected" in reason or reason == "the stream ended" or self.injected
        faults = self.peering.faults
        wrong = (faults.early or faults.flips) and ("part." in reason or "came twice" in reason)
        expect(honest or wrong, f"an honest session is broken off by {type(session).__name__}: {reason}")

    def partition(self) -> None:
        """Nothing arrives any more; each side notices in its own time."""
        clock = self.peering.clock
        self.cut = self.injected = True
        clock.after(clock.between(0.05, 3.0), self.receiving.break_off, "injected: nothing was heard")
        clock.after(clock.between(0.05, 3.0), self.sending.break_off, "injected: nothing was heard")

    def break_stream(self) -> None:
        self.injected = True
        side = self.receiving if self.peering.clock.chance(0.5) else self.sending
        side.break_off("injected: the stream broke")

    def over(self, session: SimSession) -> None:
        if session is self.receiving:
            self.peering.down(unavailable("the session ended"))
        else:
            self.prefill.session_over(self.sending)


class Peering:
    """A decode daemon's link to a prefill daemon: one session after the other, as `PeerLink.run` has them."""

    def __init__(self, clock: Clock, faults: Faults, decode: SimDecode, prefill: SimPrefill) -> None:
        self.clock, self.faults, self.decode, self.prefill = clock, faults, decode, prefill
        self.setting = decode.setting
        self.link: PeerLink = decode.links[prefill.config.name]
        self.wire: Wire | None = None
        self.wires = 0
        clock.after(clock.between(0.0, 0.02), self._dial)

    def _dial(self) -> None:
        if self.decode.dead:
            return
        if self.prefill.dead:
            self.clock.after(self.clock.between(0.02, 0.2), self._dial)
            return
        self.wires += 1
        self.wire = Wire(self, self.wires)
        self.link.session = self.wire.receiving
        self.link._asked.clear()

    def down(self, error: RequestError) -> None:
        self.link.session = self.wire = None
        self.link.state = "down"
        self.link._pending.clear()
        if self.decode.dead:
            return
        self.decode.on_link_down(self.link.name, error)
        self.clock.after(self.clock.between(0.01, 0.3), self._dial)

    def prefill_restarted(self, fresh: SimPrefill) -> None:
        """The old daemon is dead, its courier with it; what it had posted may still land."""
        wire, self.prefill = self.wire, fresh
        if wire is not None:
            wire.injected = True
            wire.sending.break_off("injected: the daemon died")

    def check_idle(self) -> None:
        """Nothing is on its way: every credit and slot is back, and nothing of any transfer is remembered."""
        link, who = self.link, f"{self.decode.config.name} to {self.prefill.config.name}"
        for name, left in (("pending", link._pending), ("asked", link._asked), ("copying", link._copying)):
            expect(not left, f"{who}: the link remembers {name} {left}")
        wire = self.wire
        if wire is None or wire.sending.sender is None or wire.sending.closed or not wire.receiving.up:
            return
        receiver, sender = wire.receiver, wire.sending.sender
        receiver.check()
        sender.check()
        expect(not receiver.transfers(), f"{who}: the receiver holds transfers {receiver.transfers()}")
        expect(not sender.transfers(), f"{who}: the sender holds transfers {sender.transfers()}")
        slots, send_slots = self.setting.slots, self.setting.send_slots
        expect(receiver.free_credits == slots, f"{who}: {receiver.free_credits} of {slots} slots are granted")
        expect(sender.free_credits == slots, f"{who}: the sender has {sender.free_credits} of {slots} credits")
        free = sender.free_send_slots
        expect(free == send_slots, f"{who}: {free} of {send_slots} sending slots are free")


def _config(slot_bytes: int, receive_slots: int, send_slots: int) -> CourierConfig:
    """Slots smaller than the product's least, so that pages are cut."""
    config = object.__new__(CourierConfig)
    for field, value in (("slot_bytes", slot_bytes), ("receive_slots", receive_slots), ("send_slots", send_slots)):
        object.__setattr__(config, field, value)
    return config


__all__ = ["Peering", "SimReceiving", "SimSending", "SimSession", "Violation", "Wire"]
