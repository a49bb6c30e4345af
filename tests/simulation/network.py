"""Who reaches whom: daemons by their addresses, couriers by what they say of themselves, and the ways between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import grpc

from kvferry.daemon.peers import handshake
from kvferry.daemon.peers import session as sessions
from kvferry.daemon.peers.session import Session, SessionBroken
from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.protocol.slots import HEADER_BYTES
from tests.simulation.clock import Clock, expect
from tests.simulation.couriers import SimCourier
from tests.simulation.loops import ProcessLoop
from tests.simulation.streams import ClientEnd, Route, Stream

if TYPE_CHECKING:
    from tests.simulation.daemons import SimPrefill
    from tests.simulation.faults import Faults

# An end of a session's stream that the other side, or its daemon, brought about.
_ENDED = ("the stream ended", "closed the stream", "UNAVAILABLE", "CANCELLED", "RPC already finished")
DISTURBED_SECONDS = 30.0  # for which a disturbance is a reason: START_SECONDS, and what comes before


@dataclass(frozen=True, slots=True)
class Channel:
    """As grpc.aio.Channel, as far as the stub of a session asks of it."""

    network: Network
    client: ProcessLoop
    address: str

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    def stream_stream(self, method: str, **ways: Any) -> Callable[..., ClientEnd]:
        return lambda wait_for_ready: self.network.call(self.client, self.address)


class Network:
    def __init__(self, clock: Clock, faults: Faults) -> None:
        self.clock, self.faults = clock, faults
        self.daemons: dict[str, SimPrefill] = {}  # that listen, by address
        self._routes: dict[tuple[str, str], Route] = {}
        self._couriers: dict[bytes, SimCourier] = {}
        self._next = 0

    # -- streams ---------------------------------------------------------------------------------------------------

    def dial(self, client: ProcessLoop) -> Callable[[str, str], Any]:
        """A daemon's way to others: see `kvferry.daemon.peers.dialing.Dial`."""
        return lambda address, expected: Channel(self, client, address)

    def call(self, client: ProcessLoop, address: str) -> ClientEnd:
        clock, daemon = self.clock, self.daemons.get(address)
        server = client if daemon is None else daemon.process
        stream = Stream(self.route(client.name, server.name), client, server)
        clock.counts["streams"] += 1
        if daemon is None or daemon.process.ended:
            when = clock.now + clock.between(0.0002, 0.01)
            client.deliver(when, stream.client.ends, grpc.StatusCode.UNAVAILABLE, "nobody listens", ())
        else:
            stream.begin(lambda context: daemon.service.Session(None, context))
        return stream.client

    def route(self, one: str, other: str) -> Route:
        key = (min(one, other), max(one, other))
        if key not in self._routes:
            self._routes[key] = Route(self.clock)
        return self._routes[key]

    def routes(self) -> list[Route]:
        """Those that have a stream."""
        return [route for route in self._routes.values() if any(not stream.client.over for stream in route.streams)]

    def routes_of(self, process: ProcessLoop) -> list[Route]:
        return [route for names, route in self._routes.items() if process.name in names]

    def lose(self, process: ProcessLoop) -> None:
        """The process is dead: its streams break, and its couriers end."""
        for route in self.routes_of(process):
            route.break_streams()
        for courier in self.couriers_of(process):
            self.clock.after(self.clock.between(0.0001, 0.05), courier.dies)

    # -- couriers --------------------------------------------------------------------------------------------------

    def enter(self, courier: SimCourier) -> bytes:
        """How others name it."""
        self._next += 1
        metadata = self._next.to_bytes(8, "little")
        self._couriers[metadata] = courier
        return metadata

    def meet(self, courier: SimCourier, metadata: bytes) -> tuple[SimCourier, Route]:
        remote = self._couriers.get(metadata) or self._gone(courier)
        return remote, self.route(courier.daemon.name, remote.daemon.name)

    def _gone(self, courier: SimCourier) -> SimCourier:
        """One that has ended, to which writes go for nothing."""
        gone = object.__new__(SimCourier)
        gone.daemon, gone.reaped = courier.daemon, True
        return gone

    def leave(self, courier: SimCourier) -> None:
        del self._couriers[courier.metadata]

    def couriers_of(self, process: ProcessLoop) -> list[SimCourier]:
        return [courier for courier in self._couriers.values() if courier.daemon is process]

    @property
    def couriers(self) -> list[SimCourier]:
        return list(self._couriers.values())

    # -- the oracle ------------------------------------------------------------------------------------------------

    def judge(self, session: Session, broken: SessionBroken) -> SessionBroken:
        """Only faults of the network and of processes may end a session."""
        clock, reason = self.clock, str(broken)
        clock.counts["session ends"] += 1
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        disturbed = self.route(loop.name, session.remote).disturbed_at
        honest = (
            "injected" in reason
            or any(words in reason for words in (*_ENDED, "the engine whose memory"))
            or clock.now - disturbed < DISTURBED_SECONDS
        )
        faults = self.faults
        wrong = (faults.early or faults.flips) and ("part." in reason or "came twice" in reason)
        expect(honest or wrong, f"an honest session is broken off by {type(session).__name__}: {reason}")
        return broken

    @contextmanager
    def installed(self) -> Iterator[None]:
        """This network's couriers are those of all sessions; slots may be smaller than the product's least, so that
        pages are cut."""
        reason = Session._reason
        SimCourier.network = self

        def judged(session: Session, tasks: list[Any]) -> SessionBroken:
            return self.judge(session, reason(session, tasks))

        with (
            mock.patch.object(sessions, "CourierLink", SimCourier),
            mock.patch.object(sessions, "MIN_SLOT_BYTES", 1),
            mock.patch.object(handshake, "HEADER_ROOM", HEADER_BYTES),
            mock.patch.object(handshake, "CourierConfig", _small),
            mock.patch.object(Session, "_reason", judged),
        ):
            yield


def _small(slot_bytes: int, receive_slots: int, send_slots: int, **others: object) -> CourierConfig:
    config = object.__new__(CourierConfig)
    for field, value in (("slot_bytes", slot_bytes), ("receive_slots", receive_slots), ("send_slots", send_slots)):
        object.__setattr__(config, field, value)
    return config
