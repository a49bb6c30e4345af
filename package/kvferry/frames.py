"""Messages over a Unix socket, one behind the other: a worker and its daemon say here what they say on gRPC's stream,
for a fraction of the CPU time, which on a worker's side is its engine's.

A frame: four bytes of length, little-endian, and a message of so many. What each side says: proto/worker.proto.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from typing import cast

from kvferry.waiting import within

SUFFIX = ".f"  # of the socket's path, behind that of gRPC's socket
_LENGTH = struct.Struct("<I")


class FrameStream(asyncio.Protocol):
    """One end of a connection. `take` has each message as it comes, `over` hears once why none comes any more: empty
    where the other side has said its last. All of it on the event loop of the connection."""

    def __init__(self, most: int, take: Callable[[bytes], None], over: Callable[[str], None]) -> None:
        """`most`: bytes of a message that comes in; behind a longer one nothing is taken any more."""
        self._most = most
        self._take = take
        self._tell_over = over
        self._transport: asyncio.Transport | None = None
        self._begun = bytearray()  # a frame that has not come whole
        self._needed = 0  # its bytes, as far as that is known
        self._over = False
        self._said_last = False
        self._heard_last = False
        self._finishing = False
        self._lost = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.connected = asyncio.Event()

    # -- for its owner ---------------------------------------------------------------------------------------------

    def send(self, *messages: bytes) -> None:
        """Sends them now, or behind what still waits (`unsent`). Behind `end`, or into a connection that is over, they
        go for nothing."""
        if self._transport is not None and not self._said_last:
            if len(messages) == 1:  # most are
                self._transport.write(_LENGTH.pack(len(messages[0])) + messages[0])
            else:
                self._transport.write(b"".join([_LENGTH.pack(len(each)) + each for each in messages]))

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def has_room(self) -> None:
        """Waits until the other side takes what it is sent, or the connection is over."""
        await self._room.wait()

    def hold(self) -> None:
        """Takes nothing in until `go_on`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def end(self) -> None:
        """Says that nothing more comes from here."""
        if self._transport is not None and not self._transport.is_closing() and self._transport.can_write_eof():
            self._said_last = True
            self._transport.write_eof()

    async def finish(self, deadline_s: float) -> None:
        """Ends the connection in order: what is sent is taken, and what still comes is dropped until the other side
        has closed its own, at most for `deadline_s`. Closed at once, the connection would break under the other side's
        next message, and its last word be lost with it."""
        self._finishing = True
        if self._heard_last:
            self.close()
        else:
            self.go_on()
            self.end()
        self._over = True
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(deadline_s, self._lost.wait())
        finally:
            self.abort()

    def close(self) -> None:
        """Ends the connection behind what is still to be sent. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.connected.set()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self._begun:
            self._begun += data
            if len(self._begun) < self._needed:
                return
            data = bytes(self._begun)
            self._begun.clear()
        at = 0
        while True:
            self._needed = _LENGTH.size
            if len(data) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data, at)
                if length > self._most:
                    self._ends(f"a message of {length} bytes came; it may have {self._most}")
                    return
                self._needed += length
            if len(data) - at < self._needed:
                self._begun += data[at:]
                return
            self._take(data[at + _LENGTH.size : at + self._needed])
            at += self._needed

    def eof_received(self) -> bool:
        """Keeps this side's way open: the owner may have something to say still."""
        self._heard_last = True
        self._ends("the connection ended within a message" if self._begun else "")
        return not self._finishing

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None  # asyncio's own is not to be asked anything behind this
        self._room.set()
        self._lost.set()
        self._ends(f"the connection broke: {error}" if error is not None else "the connection was closed")

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def _ends(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._tell_over(why)
