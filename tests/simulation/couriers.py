"""Couriers of the simulation: processes that write slots, with NIXL that reorders, repeats, fails, flips bits and lands
late. They stand in for `CourierLink` alone; the sessions that have them are the product's.

Writes, their notifications and their reports take any time and any order, but a notification follows its write (unless
`early`: a transport that breaks this). A failed write may land long after its failure was reported, whole, in part or
not at all. A killed courier's writes may land until it is reaped, and never after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvferry.transfer.courier.config import CourierConfig, CourierError
from kvferry.transfer.courier.link import RemoteRank
from kvferry.transfer.courier.messages import Connected, CourierDied, CourierEvent, Notification, PostDone, PostFailed
from kvferry.transfer.protocol.slots import HEADER_BYTES, PartNotice
from kvferry.waiting import within
from tests.simulation.clock import expect
from tests.simulation.loops import ProcessLoop
from tests.simulation.storage.landing import Piece, is_whole, landing
from tests.simulation.storage.slots import LooseSlots

if TYPE_CHECKING:
    from tests.simulation.network import Network
    from tests.simulation.streams import Route

WRITE_SECONDS = 3.0  # until the transport gives a write up


class SimCourier:
    """As a `CourierLink`, with the courier's process behind it."""

    network: Network  # that a seed has

    pid = 1

    def __init__(self, config: CourierConfig, on_event: Callable[[CourierEvent], None]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.daemon = loop
        self._clock, self._faults = loop.clock, self.network.faults
        self._on_event = on_event
        self._config = config
        self.host_slots = LooseSlots(config)
        self.receive_address = 1 << 20
        self.receive_ranks: tuple[RemoteRank, ...] = ()
        self.metadata = self.network.enter(self)
        self.remote: SimCourier | None = None
        self.route: Route | None = None
        self.reaped = False
        self._still_until = 0.0
        self._ended = asyncio.Event()
        self._stopped = False
        self._posts: dict[int, int] = {}  # as CourierLink has them

    @staticmethod
    async def start(config: CourierConfig, on_event: Callable[[CourierEvent], None], deadline_s: float) -> SimCourier:
        courier = SimCourier(config, on_event)
        clock, faults = courier._clock, courier._faults
        try:
            await asyncio.sleep(clock.between(0.001, 0.1))
            if clock.chance(faults.couriers_fail):
                clock.counts["couriers that did not start"] += 1
                raise CourierError("injected: the courier did not start")
        except BaseException:
            await courier.stop(deadline_s)
            raise
        return courier

    # -- as CourierLink --------------------------------------------------------------------------------------------

    def expect(self, active: int) -> None:
        pass

    @property
    def oldest_post(self) -> int | None:
        return next(iter(self._posts), None)

    def connect(
        self, metadata: bytes, receive_address: int, slots: int, slot_bytes: int, ranks: Sequence[RemoteRank] = ()
    ) -> None:
        expect(self.remote is None, "connect is called twice")
        self.remote, self.route = self.network.meet(self, metadata)
        self._later(self._clock.between(0.0005, 0.02), self._hear, Connected())

    def post(self, post_id: int, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> None:
        assert self.remote is not None and self.route is not None
        expect(send_slot not in self._posts.values(), f"send slot {send_slot} has two posts")
        self._posts[post_id] = send_slot
        clock, faults = self._clock, self._faults
        takes = clock.between(0.00005, 0.003)
        clock.counts["parts"] += 1
        source = self.host_slots.send_slot(send_slot)
        target = source if self.remote.reaped else self.remote.host_slots.receive_slot(remote_slot)
        fails = clock.chance(faults.post_fails)
        pieces = landing(source, target, nbytes, clock.random, seconds=takes, fails=fails)
        way = send_slot, remote_slot
        if fails:
            self._fail(post_id, way, nbytes, pieces, notification, takes)
            return
        if faults.early and clock.chance(0.05):
            clock.counts["notifications before their write"] += 1
            clock.after(takes * 0.5, self._notify, notification)
            pieces = [Piece(takes, 0, nbytes)]  # a header that is there before its payload would be believed
        if len(pieces) > 1:
            clock.counts["writes in pieces"] += 1
            for piece in pieces[:-1]:
                clock.after(piece.delay, self._land_early, way, piece, pieces)
        clock.after(takes, self._write, post_id, way, pieces, notification)

    def _fail(
        self, post_id: int, way: tuple[int, int], nbytes: int, pieces: list[Piece], notification: bytes, takes: float
    ) -> None:
        clock = self._clock
        clock.counts["writes that failed"] += 1
        self._later(takes, self._hear, PostFailed(post_id, "injected"))
        for piece in pieces:
            clock.after(piece.delay, self._put, way, piece)
        if is_whole(pieces, nbytes):
            clock.counts["failed writes that landed"] += 1
            clock.after(pieces[-1].delay, self._announce, notification)
        elif pieces:
            clock.counts["failed writes that landed in part"] += 1

    async def stop(self, deadline_s: float) -> None:
        self._stopped = True
        if not self.reaped:
            self._clock.after(self._clock.between(0.0005, 0.02), self.dies)
        try:
            await within(deadline_s, self._ended.wait())
        except asyncio.TimeoutError:
            raise CourierError(f"the courier did not end within {deadline_s} s of SIGKILL") from None

    # -- its process -----------------------------------------------------------------------------------------------

    def stand_still(self, seconds: float) -> None:
        """It says nothing, and its writes do not come."""
        self._still_until = max(self._still_until, self._clock.now + seconds)

    def dies(self) -> None:
        """By SIGKILL or by itself; the kernel has taken its memory back."""
        if self.reaped:
            return
        self.reaped = True
        self.network.leave(self)
        if not self.daemon.ended:
            now = self._clock.now
            self.daemon.deliver(now, self._ended.set)
            self.daemon.deliver(now, self._hear, CourierDied("injected: it was killed"))

    def _later(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """For the daemon."""
        self.daemon.deliver(max(self._clock.now + seconds, self._still_until), call, *arguments)

    def _hear(self, event: CourierEvent) -> None:
        if self._stopped:
            return
        if isinstance(event, PostDone | PostFailed):
            del self._posts[event.post_id]
        self._on_event(event)

    # -- its writes ------------------------------------------------------------------------------------------------

    def _write(self, post_id: int, way: tuple[int, int], left: list[Piece], notification: bytes) -> None:
        """What is left of it lands, unless something is in its way."""
        assert self.route is not None
        clock = self._clock
        if self.reaped:
            if clock.chance(0.5):  # what the network still holds of it
                clock.counts["writes that landed after a break"] += 1
                clock.after(clock.between(0.0, 0.5), self._land, way, left, notification)
            return
        if self._still_until > clock.now:
            clock.at(self._still_until, self._write, post_id, way, left, notification)
            return
        if self.route.is_cut:
            whole = self.route.whole_at - clock.now
            if whole > WRITE_SECONDS:
                self._later(WRITE_SECONDS, self._hear, PostFailed(post_id, "injected: the way was cut"))
                clock.after(whole, self._land, way, left, notification)
            else:
                clock.after(whole, self._write, post_id, way, left, notification)
            return
        self._land(way, left, notification)
        self._later(clock.between(0.00002, 0.001), self._hear, PostDone(post_id))

    def _land_early(self, way: tuple[int, int], piece: Piece, left: list[Piece]) -> None:
        assert self.route is not None
        if not (self.reaped or self._still_until > self._clock.now or self.route.is_cut):
            left.remove(piece)
            self._put(way, piece)

    def _land(self, way: tuple[int, int], left: list[Piece], notification: bytes) -> None:
        for piece in left:
            self._put(way, piece)
        self._announce(notification)

    def _announce(self, notification: bytes) -> None:
        clock = self._clock
        clock.after(clock.between(0.00001, 0.002), self._notify, notification)
        if clock.chance(self._faults.repeats):
            clock.counts["repeated notifications"] += 1
            clock.after(clock.between(0.0001, 0.02), self._notify, notification)

    def _put(self, way: tuple[int, int], piece: Piece) -> None:
        assert self.remote is not None
        (send_slot, remote_slot), (_, start, end) = way, piece
        if not self.remote.reaped:
            target = self.remote.host_slots.receive_slot(remote_slot)
            target[start:end] = self.host_slots.send_slot(send_slot)[start:end]
            if self._faults.flips and self._clock.chance(self._faults.flips):
                self._flip(target, start, end)

    def _flip(self, slot: memoryview, start: int, end: int) -> None:
        """A bit of the header, or of the payload."""
        random = self._clock.random
        slot[random.randrange(start, end)] ^= 1 << random.randrange(8)
        self._clock.counts["parts with a flipped bit"] += 1

    def _notify(self, payload: bytes) -> None:
        """In every other seed the courier tells the header, as those on GPUs do: what it was when it read it, a while
        before its daemon hears of it. In the others the session reads it."""
        clock, remote = self._clock, self.remote
        assert remote is not None
        if remote.reaped:
            return
        header = b""
        if clock.seed % 2 == 0:
            clock.counts["headers told by couriers"] += 1
            header = bytes(remote.host_slots.receive_slot(PartNotice.unpack(payload).slot)[:HEADER_BYTES])
        remote._later(clock.between(0.0, 0.002), remote._hear, Notification(payload, header))
