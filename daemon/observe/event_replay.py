"""The batches of KV events that are kept, and those who ask for them again over a ROUTER socket. Shell.

Each has a cursor and is sent a few batches a turn, never waited for: the same thread sends what is new. Who reads too
slowly, or is gone, is given up. What then still waits for it in the socket cannot be taken back, so its queue is short,
and all queues share one copy of a batch.
"""

from __future__ import annotations

import errno
import logging
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

import zmq

from kvferry.waiting import OwnTime

log = logging.getLogger(__name__)

REPLAY_BYTES = 256 << 20  # kept at most
MAX_REPLAYS = 64  # at a time
REQUESTS = 16  # read in one turn
TURN = 64  # batches sent to each in one turn
CLIENT_QUEUE = 8  # batches that may wait for one client in the socket
STALLED_SECONDS = 5.0  # in which a client must have taken something
TURN_SECONDS = 0.5  # that count at most between two turns
MAX_REQUEST_BYTES = 256  # of a frame that others send
MAX_STALLED = 1024  # clients that are remembered for not having read
STALLED, GONE = REASONS = ("stalled", "gone")  # why a replay is cut off
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number behind the last batch


@dataclass(slots=True)
class _Cursor:
    at: int  # position of the next batch
    end: int  # the position after the last, when it was asked for
    moved: float  # when it took something, by OwnTime


class Replay:
    """Belongs to the publisher's thread. `batches`: kept at most."""

    def __init__(self, router: zmq.Socket[bytes], topic: bytes, batches: int) -> None:
        self.cut_off: Counter[str] = Counter()  # replays, by reason
        self._router = router
        self._topic = topic
        self._most = batches
        self._time = OwnTime(TURN_SECONDS)
        # By position, which has no gaps: sequence number, batch. A Frame's bytes are counted, not copied, when sent.
        self._kept: dict[int, tuple[bytes, zmq.Frame]] = {}
        self._first = self._next = 0  # positions
        self._bytes = 0
        self._cursors: dict[bytes, _Cursor] = {}  # by client
        self._stalled: OrderedDict[bytes, None] = OrderedDict()  # clients that were given up for it
        self._full_said = self._wrong_said = False

    def keep(self, sequence: bytes, payload: zmq.Frame) -> None:
        self._kept[self._next] = sequence, payload
        self._next += 1
        self._bytes += len(payload)
        while len(self._kept) > self._most or self._bytes > REPLAY_BYTES:
            self._bytes -= len(self._kept.pop(self._first)[1])
            self._first += 1

    @property
    def busy(self) -> bool:
        return bool(self._cursors)

    @property
    def full(self) -> bool:
        """Further requests wait in the socket, unread, until somebody's replay is over."""
        return len(self._cursors) >= MAX_REPLAYS

    def hear(self) -> None:
        """Takes requests in: (client, empty, first sequence number). One more of a client that has a replay moves its
        cursor."""
        for _ in range(REQUESTS):
            if self.full:
                if not self._full_said:
                    log.warning("%d replays of KV events are under way; others wait", MAX_REPLAYS)
                self._full_said = True
                return
            try:
                request = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != errno.EAGAIN:
                    log.warning("a replay of KV events cannot be received: %s", error)
                return
            if len(request) != 3 or len(request[2]) != 8:
                if not self._wrong_said:
                    what = "a replay of KV events was asked for in %d frames; it takes 3, the last of 8 bytes"
                    log.warning(what, len(request))
                self._wrong_said = True
                continue
            client, _, first = request
            # Asking again is no sign of reading: the time in which something must be taken goes on.
            moved = self._time() if client not in self._stalled else -math.inf
            if client in self._cursors:
                moved = self._cursors[client].moved
            self._cursors[client] = _Cursor(self._position(first), self._next, moved)

    def go_on(self) -> bool:
        """Sends each its share; whether any took something. A replay ends with an empty batch."""
        moved = False
        now = self._time()
        for client, cursor in list(self._cursors.items()):
            try:
                if self._send(client, cursor):
                    cursor.moved, moved = now, True
                    self._stalled.pop(client, None)
                elif now - cursor.moved > STALLED_SECONDS:
                    self._give_up(client, STALLED, f"it took nothing for {STALLED_SECONDS:g} s")
            except zmq.ZMQError as error:
                self._give_up(client, GONE, str(error))  # EHOSTUNREACH
        if not self._cursors:
            self._full_said = self._wrong_said = False
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
                self._router.send_multipart((client, b"", self._topic, sequence, payload), zmq.NOBLOCK, copy=False)
                cursor.at += 1
                sent += 1
            if cursor.at >= cursor.end:
                self._router.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)
                del self._cursors[client]
                return True
        except zmq.Again:
            pass
        return sent > 0

    def _give_up(self, client: bytes, reason: str, why: str) -> None:
        del self._cursors[client]
        self.cut_off[reason] += 1
        if reason == STALLED and client not in self._stalled:
            self._stalled[client] = None
            while len(self._stalled) > MAX_STALLED:
                self._stalled.popitem(last=False)
            log.warning("a replay of KV events is cut off: %s", why)
        else:
            log.debug("a replay of KV events is cut off: %s", why)

    def _position(self, first: bytes) -> int:
        """The position of the first batch that is kept with this sequence number, or a later one."""
        low, high = self._first, self._next
        while low < high:
            middle = (low + high) // 2
            if self._kept[middle][0] < first:  # both big-endian
                low = middle + 1
            else:
                high = middle
        return low
