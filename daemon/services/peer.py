"""The prefill daemon's end of sessions: takes a decode daemon's Hello and serves its stream. Shell."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from kvferry.daemon.core.errors import MAX_MESSAGE_CHARS, RequestError, exhausted, unavailable
from kvferry.daemon.peers.handshake import NOT_READY, REFUSAL, NotReady, check_hello, hello_of
from kvferry.daemon.peers.log_throttle import Said
from kvferry.daemon.peers.session import SessionBroken
from kvferry.daemon.services.worker import HELLO_SECONDS, status_of
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import peer_pb2_grpc
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.waiting import within

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from kvferry.daemon.services.worker import Context


class PeerService(peer_pb2_grpc.PeerServicer):
    def __init__(self, side: PrefillSide) -> None:
        self._side = side
        self._said = Said()
        self._heard: list[peer.PeerHello] = []  # one for each session

    async def Session(self, request_iterator: object, context: Context) -> None:
        del request_iterator
        side = self._side
        try:
            message = await within(HELLO_SECONDS, context.read())
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS} s")
        if not isinstance(message, peer.PeerMessage) or message.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        try:
            if side.draining:
                raise unavailable("the daemon is shutting down")
            own = hello_of(side)
            check_hello(side, message.hello, context.peer())
            if len(side.sessions) >= (bound := side.config.max_peers):
                raise exhausted(f"{bound} peers are connected; --max-peers is {bound}")
        except NotReady as waits:
            await context.abort(status_of(waits), waits.message, ((REFUSAL, NOT_READY),))
        except RequestError as error:
            self._warn(message.hello.daemon[:MAX_NAME_CHARS], error)
            await context.abort(status_of(error), error.message)
        hello = message.hello
        session = side.new_session(own, hello)
        log.info("decode daemon %s opens a session", hello.daemon)
        self._warn_of_twins(hello)
        self._heard.append(hello)
        end: RequestError | None = None
        try:
            await context.write(peer.PeerMessage(hello=own))
            await session.run(context)
        except SessionBroken as broken:
            log.info("session with %s is over: %s", session.remote, broken)
            if broken.code != common.ERROR_UNSPECIFIED:
                end = RequestError(broken.code, str(broken))
        finally:
            side.session_over(session)  # before the abort, which a peer that does not read may keep waiting
            self._heard = [each for each in self._heard if each is not hello]
        if end is not None:
            await context.abort(status_of(end), end.message)

    def _warn_of_twins(self, hello: peer.PeerHello) -> None:
        """Says that two decode daemons have one name: what is kept by name, as metrics, is of both. One that has died
        may be there, too, until its session is over."""
        if any(each.daemon == hello.daemon and each.incarnation != hello.incarnation for each in self._heard):
            said = f"two decode daemons are called {hello.daemon!r}: give each a --name of its own"
            if self._said.due(said, self._side.now()):
                log.warning("%s, unless one has just died", said)

    def _warn(self, daemon: str, error: RequestError) -> None:
        """But not of what passes, as an end that has begun."""
        said = f"refuses a session to decode daemon {daemon!r}: {error.message[:MAX_MESSAGE_CHARS]}"
        if error.code != common.ERROR_UNAVAILABLE and self._said.due(said, self._side.now()):
            log.warning("%s", said)
