"""gRPC streams between two processes of the simulation, as grpc.aio has them at either end.

Messages and ends of a stream keep their order and take their time. A route that is cut holds back what is under way
until it is whole again. A stream that breaks ends on each side in its own time, and loses what is on its way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from tests.simulation.clock import Clock, Pipe

if TYPE_CHECKING:
    from kvferry.proto import peer_pb2 as peer
    from tests.simulation.loops import ProcessLoop

OK = grpc.StatusCode.OK
Trailing = tuple[tuple[str, str], ...]


class Aborted(Exception):
    """A handler's abort, by which it ends."""


class Route:
    """The way between two daemons, by which streams and writes go."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.whole_at = 0.0  # until then it is cut
        self.disturbed_at = -1e9  # when its sessions last had a reason to end
        self.streams: list[Stream] = []

    @property
    def is_cut(self) -> bool:
        return self.clock.now < self.whole_at

    def disturb(self) -> None:
        self.disturbed_at = max(self.disturbed_at, self.clock.now)

    def cut(self, seconds: float) -> None:
        self.whole_at = max(self.whole_at, self.clock.now + seconds)
        self.disturbed_at = max(self.disturbed_at, self.whole_at)

    def break_streams(self) -> None:
        self.disturb()
        for stream in list(self.streams):
            stream.break_off()


class End:
    """One end of a stream: what has arrived, and who waits for it."""

    def __init__(self, process: ProcessLoop, clock: Clock, route: Route) -> None:
        self.process = process
        self.other: End
        self.over = False  # nothing is told to it any more
        self.lost = False  # the connection is gone, with all that is on its way
        self._route = route
        self._pipe = Pipe(clock, 0.00005, 0.005, self._at)
        self._held: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()  # while the way is cut
        self._messages: deque[peer.PeerMessage] = deque()
        self._reader: asyncio.Future[None] | None = None

    def send(self, call: Callable[..., object], *arguments: object) -> None:
        """A call at the other end, once what was sent before has come there."""
        self._pipe.send(self._arrive, call, arguments)

    def _at(self, when: float, call: Callable[..., object], *arguments: object) -> None:
        self.other.process.deliver(when, call, *arguments)

    def _arrive(self, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self._held.append((call, arguments))
        if len(self._held) == 1:
            self._let_in()

    def _let_in(self) -> None:
        while self._held:
            if self._route.is_cut:
                self._at(self._route.whole_at, self._let_in)
                return
            call, arguments = self._held.popleft()
            if not self.other.over and not self.lost:
                call(*arguments)

    def take(self, data: type[peer.PeerMessage], packed: bytes) -> None:
        self._messages.append(data.FromString(packed))
        self.wake()

    def wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> peer.PeerMessage | None:
        """The next message; None where there will be none."""
        while not self._messages:
            if self.over:
                return None
            self._reader = self.process.create_future()
            await self._reader
        return self._messages.popleft()


class ClientEnd(End):
    """As a call of grpc.aio."""

    def __init__(self, process: ProcessLoop, clock: Clock, route: Route) -> None:
        super().__init__(process, clock, route)
        self._status: tuple[grpc.StatusCode, str, Trailing] | None = None
        self.cancelled = False

    def ends(self, code: grpc.StatusCode, details: str, trailing: Trailing) -> None:
        if self._status is None:
            self._status, self.over = (code, details, trailing), True
            self.wake()

    def _raise_for_status(self) -> None:
        assert self._status is not None
        code, details, trailing = self._status
        if self.cancelled:
            raise asyncio.CancelledError
        if code is not OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)

    async def read(self) -> object:
        message = await self.next()
        if message is None:
            self._raise_for_status()
            return grpc.aio.EOF
        return message

    async def write(self, message: peer.PeerMessage) -> None:
        if self._status is not None:
            self._raise_for_status()
            raise asyncio.InvalidStateError("RPC already finished.")
        self.send(self.other.take, type(message), message.SerializeToString())
        await asyncio.sleep(0)

    async def code(self) -> grpc.StatusCode:
        while self._status is None:
            await self.next()
        return self._status[0]

    async def details(self) -> str:
        await self.code()
        assert self._status is not None
        return self._status[1]

    async def trailing_metadata(self) -> Trailing:
        await self.code()
        assert self._status is not None
        return self._status[2]

    def cancel(self) -> None:
        if self._status is None:
            self.cancelled = True
            assert isinstance(self.other, ServerEnd)
            self.send(self.other.client_leaves)
            self.ends(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())


class ServerEnd(End):
    """As a servicer's context."""

    def __init__(self, process: ProcessLoop, clock: Clock, route: Route) -> None:
        super().__init__(process, clock, route)
        self.handler: asyncio.Task[None] | None = None

    def begin(self, serve: Callable[[ServerEnd], Coroutine[Any, Any, None]]) -> None:
        if not self.over:
            self.handler = self.process.create_task(self._serve(serve))

    async def _serve(self, serve: Callable[[ServerEnd], Coroutine[Any, Any, None]]) -> None:
        try:
            await serve(self)
        except Aborted:
            return
        finally:
            self._says(OK, "", ())

    def _says(self, code: grpc.StatusCode, details: str, trailing: Trailing) -> None:
        """The first status is the stream's."""
        assert isinstance(self.other, ClientEnd)
        self.send(self.other.ends, code, details, trailing)

    def client_leaves(self) -> None:
        self.over = True
        if self.handler is not None:
            self.handler.cancel()

    async def read(self) -> object:
        message = await self.next()
        return grpc.aio.EOF if message is None else message

    async def write(self, message: peer.PeerMessage) -> None:
        self.send(self.other.take, type(message), message.SerializeToString())
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Trailing = ()) -> NoReturn:
        self._says(code, details, trailing)
        raise Aborted(f"{code.name}: {details}")

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


class Stream:
    """Both ends."""

    def __init__(self, route: Route, client: ProcessLoop, server: ProcessLoop) -> None:
        self.route = route
        self.client = ClientEnd(client, route.clock, route)
        self.server = ServerEnd(server, route.clock, route)
        self.client.other, self.server.other = self.server, self.client
        route.streams = [*(stream for stream in route.streams if not stream.client.over), self]

    def begin(self, serve: Callable[[ServerEnd], Coroutine[Any, Any, None]]) -> None:
        self.client.send(self.server.begin, serve)

    def break_off(self) -> None:
        """Its connection is gone: each end hears of it in its own time, and of nothing else."""
        clock, (client, server) = self.route.clock, (self.client, self.server)

        def lost() -> None:
            client.ends(grpc.StatusCode.UNAVAILABLE, "injected: the stream broke", ())

        client.lost = server.lost = True
        client.process.deliver(clock.now + clock.between(0.0001, 0.02), lost)
        server.process.deliver(clock.now + clock.between(0.0001, 0.02), server.client_leaves)
