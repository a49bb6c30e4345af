"""The batches of KV events that are kept, and those who ask for them again over a ROUTER socket. Shell.

Each has a cursor and is sent a few batches a turn, never waited for: the same thread sends what is new. Who reads too
slowly, or is gone, is given up.
"""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass

import zmq

log = logging.getLogger(__name__)

REPLAY_BYTES = 256 << 20  # kept at most
MAX_REPLAYS = 64  # at a time
REQUESTS = 16  # read in one turn
TURN = 64  # batches sent to each in one turn
CLIENT_QUEUE = 256  # batches that may wait for one client in the socket
STALLED_SECONDS = 5.0  # in which a client must have taken something
MAX_REQUEST_BYTES = 1024  # of a frame that others send
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number behind the last batch


@dataclass(slots=True)
class _Cursor:
    at: int  # position of the next batch
    end: int  # the position after the last, when it was asked for
    moved: float  # when it took something


class Replay:
    """Belongs to the publisher's thread. `batches`: kept at most."""

    def __init__(self, router: zmq.Socket[bytes], topic: bytes, batches: int) -> None:
        self.given_up = 0
        self._router = router
        self._topic = topic
        self._most = batches
        self._kept: dict[int, tuple[bytes, bytes]] = {}  # by position, which has no gaps: sequence number, batch
        self._first = self._next = 0  # positions
        self._bytes = 0
        self._cursors: dict[bytes, _Cursor] = {}  # by client
        self._full_said = False

    def keep(self, sequence: bytes, payload: bytes) -> None:
        self._kept[self._next] = sequence, payload
        self._next += 1
        self._bytes += len(payload)
        while len(self._kept) > self._most or self._bytes > REPLAY_BYTES:
            self._bytes -= len(self._kept.pop(self._first)[1])
            self._first += 1

    @property
    def busy(self) -> bool:
        return bool(self._cursors)

    def hear(self) -> None:
        """Requests: (client, empty, first sequence number)."""
        for _ in range(REQUESTS):
            try:
                request = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != errno.EAGAIN:
                    log.warning("a replay of KV events cannot be received: %s", error)
                return
            if len(request) != 3 or len(request[2]) != 8:
                log.warning(
                    "a replay of KV events was asked for in %d frames; it takes 3, the last of 8 bytes", len(request)
                )
            elif request[0] not in self._cursors and len(self._cursors) >= MAX_REPLAYS:
                if not self._full_said:
                    log.warning("more than %d replays of KV events are asked for at a time; others wait", MAX_REPLAYS)
                self._full_said = True
                self.given_up += 1
            else:
                self._cursors[request[0]] = _Cursor(self._position(request[2]), self._next, time.monotonic())

    def go_on(self) -> bool:
        """Sends each its share; whether any took something. A replay ends with an empty batch."""
        moved = False
        now = time.monotonic()
        for client, cursor in list(self._cursors.items()):
            try:
                if self._send(client, cursor):
                    cursor.moved, moved = now, True
                elif now - cursor.moved > STALLED_SECONDS:
                    self._give_up(client, f"it took nothing for {STALLED_SECONDS:g} s")
            except zmq.ZMQError as error:
                self._give_up(client, str(error))  # EHOSTUNREACH: it is gone
        return moved

    def _send(self, client: bytes, cursor: _Cursor) -> bool:
        """Whether it took something."""
        sent = 0
        try:
            while sent < TURN and cursor.at < cursor.end:
                cursor.at = max(cursor.at, self._first)  # what it is late for leaves a gap
                if cursor.at >= cursor.end:
                    break
                sequence, payload = self._kept[cursor.at]
                self._router.send_multipart((client, b"", self._topic, sequence, payload), zmq.NOBLOCK)
                cursor.at += 1
                sent += 1
            if cursor.at >= cursor.end:
                self._router.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)
                del self._cursors[client]
                return True
        except zmq.Again:
            pass
        return sent > 0

    def _give_up(self, client: bytes, why: str) -> None:
        del self._cursors[client]
        self.given_up += 1
        log.warning("a replay of KV events is cut off: %s", why)

    def _position(self, first: bytes) -> int:
        """Of the first batch that is kept with this sequence number, or a later one."""
        low, high = self._first, self._next
        while low < high:
            middle = (low + high) // 2
            if self._kept[middle][0] < first:  # both big-endian
                low = middle + 1
            else:
                high = middle
        return low
