"""The decode daemon's link to one prefill daemon: dials, shakes hands, keeps one session, dials again. Shell."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from kvferry.daemon.core.effects import StartTransfer
from kvferry.daemon.core.errors import RequestError, precondition, unavailable
from kvferry.daemon.core.limits import Name
from kvferry.daemon.peers.handshake import (
    back_lanes,
    check_hello,
    courier_config,
    hello_of,
    looks_up,
    part_checksums,
    ranks_of,
    says_not_ready,
)
from kvferry.daemon.peers.log_throttle import Said
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.session import SessionBroken, SessionMeters, SessionSetup, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.peer_pb2_grpc import PeerStub
from kvferry.transfer.courier.link import CourierError
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Receiver
from kvferry.waiting import within

if TYPE_CHECKING:
    from kvferry.daemon.sides.decode import DecodeSide

    SessionCall = grpc.aio.StreamStreamCall[peer.PeerMessage, peer.PeerMessage]

log = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.1, 5.0)  # between tries: at least, even where an ask waits, and at most
HELLO_SECONDS = 5.0
WAITS = "waits for a worker"  # of this side, since a Hello names its model: nothing is dialled
REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED)


class _PeerWaits(Exception):
    """The peer answers, and has no pool yet."""


def _peer_waits(failed: grpc.aio.AioRpcError) -> bool:
    return failed.code() is grpc.StatusCode.UNAVAILABLE and says_not_ready(failed.trailing_metadata())


class PeerLink:
    """The link to one prefill daemon. State WAITS, "connecting", "up" or "down"; while down, an ask starts a try as
    soon as BACKOFF_SECONDS allows."""

    expected = ""  # HOST:PORT whose name a certificate must have, where it is not the address's own

    def __init__(self, name: str, address: str, side: DecodeSide) -> None:
        self.name = name
        self.address = address
        self.state = WAITS
        self.error = ""
        self.session: ReceivingSession | None = None
        self._said = Said()
        self._side = side
        self._pending: dict[int, StartTransfer] = {}  # until the session is up
        self._wake = asyncio.Event()
        self._up_at: float | None = None  # of the last try, when its session came up
        self._asked: dict[int, Name] = {}  # transfers of this session's living requests
        self._copying: dict[int, ReceivingSession] = {}  # transfers whose parts may be copied

    # -- the side's words ----------------------------------------------------------------------------------------

    def start_transfer(self, effect: StartTransfer) -> None:
        if self.session is not None and self.session.up:
            self._ask(self.session, effect)
        else:
            self._pending[effect.ask.transfer] = effect
            self._wake.set()

    def stop_transfer(self, transfer: int, reason: str) -> bool:
        """Stops the transfer. True: no copy into its pages runs; else on_drained follows."""
        if self._pending.pop(transfer, None) is not None:
            return True
        session = self._copying.pop(transfer, None)
        return session is None or session.receiving.stop(transfer, reason)

    def send_done(self, name: Name) -> None:
        self._asked = {transfer: asked for transfer, asked in self._asked.items() if asked != name}
        if self.session is not None and self.session.up:
            self.session.receiving.done(name)

    def _ask(self, session: ReceivingSession, effect: StartTransfer) -> None:
        name = Name(effect.ask.name.request_id, effect.ask.name.attempt)
        effect.ask.remaining_ms = self._side.remaining_ms(name)
        if session.returning is None:
            effect.ask.held_tokens = 0  # it cannot be asked back
        self._asked[effect.ask.transfer] = name
        if effect.page_ids:
            self._copying[effect.ask.transfer] = session
        session.receiving.ask(effect.ask, effect.page_ids)

    # -- dialling ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Holds one session after the other until cancelled."""
        backoff = BACKOFF_SECONDS[0]
        time = asyncio.get_running_loop().time
        while True:
            if not self._side.tiers.has_pool.is_set():
                self.state = WAITS
                await self._side.tiers.has_pool.wait()
            self.state, level = "connecting", logging.WARNING
            dialled, self._up_at = time(), None
            try:
                await self._connect_and_serve()
                error = unavailable(f"prefill daemon {self.name!r} at {self.address}: the session ended")
            except _PeerWaits as waits:
                error, level = unavailable(str(waits)), logging.INFO
            except SessionBroken as broken:
                error = unavailable(f"prefill daemon {self.name!r} at {self.address}: {broken}")
            except RequestError as refused:
                error = refused
            except grpc.aio.AioRpcError as failed:
                error = self._refusal(failed)
                level = logging.INFO if _peer_waits(failed) else logging.WARNING
            except (asyncio.TimeoutError, OSError, ValueError, CourierError) as problem:
                what = str(problem) or "no answer in time"
                error = unavailable(f"prefill daemon {self.name!r} at {self.address} cannot be reached: {what}")
            self.state = "down"
            if self._said.due(str(error), self._side.now()):
                log.log(level, "%s", error)
            self.error = str(error)
            self._pending.clear()
            self._wake.clear()  # who asked so far is told
            self._side.on_link_down(self.name, error)
            lasted = self._up_at is not None and time() - self._up_at > backoff
            backoff = BACKOFF_SECONDS[0] if lasted else min(backoff * 2, BACKOFF_SECONDS[1])
            await self._pause(dialled, backoff)

    async def _pause(self, dialled: float, backoff: float) -> None:
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the event.
        asked = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({asked}, timeout=backoff)
        finally:
            asked.cancel()
        floor = dialled + BACKOFF_SECONDS[0] - asyncio.get_running_loop().time()
        if floor > 0:
            await asyncio.sleep(floor)

    def _refusal(self, failed: grpc.aio.AioRpcError) -> RequestError:
        if failed.code() in REFUSED:
            return self._refused(str(failed.details()))
        if _peer_waits(failed):
            return unavailable(self._waits(failed.details()))
        return unavailable(
            f"prefill daemon {self.name!r} at {self.address} cannot be reached: "
            f"{failed.code().name}: {failed.details()}"
        )

    def _waits(self, details: str | None) -> str:
        return f"waits for prefill daemon {self.name!r} at {self.address}: {details}"

    def _refused(self, details: str) -> RequestError:
        return precondition(f"prefill daemon {self.name!r} at {self.address} refuses the session: {details}")

    async def _connect_and_serve(self) -> None:
        async with self._side.dial(self.address, self.expected) as channel:
            call = PeerStub(channel).Session(wait_for_ready=False)
            try:
                await self._serve(call)
            finally:
                call.cancel()  # else the peer waits for what comes no more, until it takes this daemon for lost

    async def _serve(self, call: SessionCall) -> None:
        side = self._side
        epoch, own = side.tiers.epoch, hello_of(side)
        await within(HELLO_SECONDS, call.write(peer.PeerMessage(hello=own)))
        hello = await self._answer(call)
        check_hello(side, hello, self.address)
        self.check_name(hello.daemon)
        if not side.tiers.has_pool.is_set() or side.tiers.epoch != epoch:
            raise SessionBroken("the engine whose memory the pool was has ended")
        config, memory, ranks = side.config, side.tiers.memory, ranks_of(hello)
        counters, geometry = side.ready_core.transfer_counters, memory.shape.geometry
        back = back_lanes(own, hello, lambda: lanes_of(geometry, config.ranks, ranks))
        setup = SessionSetup(
            remote=hello.daemon,
            courier=courier_config(config, receive_slots=config.slots, send_slots=config.slots if back else 0),
            memory=memory,
            lanes=lanes_of(geometry, ranks, config.ranks),
            back_lanes=back,
            looks_up=looks_up(own, hello),
            remote_ranks=ranks,
            checksums=part_checksums(own, hello),
            times=SessionTimes(config.heartbeat_seconds, config.peer_lost_seconds),
        )
        receiver = Receiver(
            epoch=side.tiers.epoch,
            lanes=setup.lanes,
            slot_bytes=setup.courier.slot_bytes,
            slots=config.slots,
            counts=counters,
        )
        meters = SessionMeters(counters, side.ready_core.latencies, side.traces)
        session = ReceivingSession(setup, meters, receiver=receiver, events=self, pages=side)
        if back:
            session.returning = side.returns.join(session, self.name, hello.epoch)
        self.session = session
        self._asked.clear()
        try:
            await session.run(call)
        finally:
            self.session = None
            if session.returning is not None:
                side.returns.session_over(session.returning)

    async def _answer(self, call: SessionCall) -> peer.PeerHello:
        """The peer's. SessionBroken, or a refusal, by the stream's status where it has ended."""
        answer = await within(HELLO_SECONDS, call.read())
        if isinstance(answer, peer.PeerMessage):
            if answer.WhichOneof("kind") != "hello":
                raise SessionBroken(f"its first message is {answer.WhichOneof('kind')}, not hello")
            return answer.hello
        code = await within(HELLO_SECONDS, call.code())
        details = await within(HELLO_SECONDS, call.details())
        if code in REFUSED:
            raise self._refused(details)
        unready = code is grpc.StatusCode.UNAVAILABLE
        if unready and says_not_ready(await within(HELLO_SECONDS, call.trailing_metadata())):
            raise _PeerWaits(self._waits(details))
        raise SessionBroken(f"no hello came: {code.name}: {details}")

    def check_name(self, name: str) -> None:
        """Checks the name by which the peer calls itself. A peer that was configured may have any: it is known by the
        name configured here, by which requests must name it."""
        told = (
            f"the prefill daemon at {self.address} is {self.name!r} by --peer and {name!r} by its own --name: "
            f"requests must name it {self.name!r}; give it one name"
        )
        if name != self.name and self._said.due(told, self._side.now()):
            log.warning("%s", told)

    # -- the session's events ------------------------------------------------------------------------------------

    def on_session_up(self) -> None:
        self.state, self.error = "up", ""
        self._up_at = asyncio.get_running_loop().time()
        self._said.forget()
        pending, self._pending = self._pending, {}
        assert self.session is not None
        for effect in pending.values():
            self._ask(self.session, effect)

    def on_complete(self, transfer: int) -> None:
        self._copying.pop(transfer, None)
        self._side.on_complete(transfer)

    def on_broken(self, transfer: int, message: str) -> None:
        log.warning("transfer %d from %s is broken: %s", transfer, self.name, message)
        self._side.on_broken(transfer, message)

    def on_ask_failed(self, transfer: int, error: RequestError) -> None:
        if transfer not in self._asked:
            return  # ended meanwhile, or another peer's
        self._side.on_ask_failed(transfer, error)

    def on_aux(self, name: Name, blob: bytes) -> None:
        self._side.on_aux(self.name, name, blob)

    def on_found(self, found: peer.Found) -> None:
        raise SessionBroken("the peer sent found, which this side does not take")


class FoundPeerLink(PeerLink):
    """The link to a daemon that was found: known by its own name, and another one may come to its address. A
    certificate names the service, not the address that DNS has for it.
    """

    def __init__(self, name: str, address: str, side: DecodeSide) -> None:
        super().__init__(name, address, side)
        self.expected = side.config.peer_service

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise precondition(f"daemon: {self.address} was {self.name!r}'s and is {name!r}'s now")
