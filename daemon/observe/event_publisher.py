"""KV events over ZeroMQ, as vLLM's ZmqEventPublisher sends them: a PUB socket with (topic, sequence number, batch), and
a ROUTER socket on which a subscriber asks for batches again. Shell; needs the extra `events`.

The daemon's loop only puts batches into a bounded queue; a thread of its own encodes and sends. A subscriber that reads
too slowly, or is not there, loses batches and blocks nobody: the gap in the sequence numbers tells it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from kvferry.daemon.core.kv_events import Cleared, KvEvent, Medium, Removed, Stored
from kvferry.daemon.observe.event_replay import CLIENT_QUEUE, MAX_REQUEST_BYTES, REQUESTS, Replay
from kvferry.waiting import have_ended

log = logging.getLogger(__name__)

QUEUE = 4096  # batches that may wait for the thread
QUEUE_TOKENS = 16 << 20  # likewise
SUBSCRIBER_QUEUE = 2048  # batches that may wait for one subscriber
SUBSCRIPTIONS = 1024  # that may wait to be read
REPLAY_POLL_MS = 5  # while those who replay take nothing
STOP_SECONDS = 5.0


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """`tcp://HOST:PORT` to bind; port 0: any free one. `replay` empty: no replay. `buffer`: batches kept for it."""

    endpoint: str
    replay: str
    topic: str
    buffer: int
    page_size: int


@dataclass(frozen=True, slots=True)
class _Batch:
    sequence: int
    time: float  # of the wall clock
    events: Sequence[KvEvent]
    tokens: int  # of all of them


class EventPublisher:
    """`publish` belongs to one thread; `close` ends the publisher's own. OSError where an endpoint cannot be bound."""

    def __init__(self, settings: PublisherSettings) -> None:
        self.blocks: Counter[tuple[str, Medium]] = Counter()  # by event and medium
        self.batches = 0
        self.queue_dropped = 0
        self.subscriber_dropped = 0
        self.sent = 0  # or dropped for good
        self._settings = settings
        self._queue: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._put_tokens = 0  # written by the caller's thread
        self._taken_tokens = 0  # written by the publisher's
        self._dead = False  # the thread, by an exception: everything is dropped
        self._stop = threading.Event()
        self._context = zmq.Context(io_threads=1)
        self._pub = self._context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] | None = None
        self._replay: Replay | None = None
        try:
            self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            self._pub.setsockopt(zmq.RCVHWM, SUBSCRIPTIONS)
            self._pub.setsockopt(zmq.SNDHWM, SUBSCRIBER_QUEUE)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)  # EAGAIN where a subscriber's queue is full, so that it is counted
            self.endpoint = _bind(self._pub, settings.endpoint)
            self.replay = ""
            if settings.replay:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # EAGAIN where a client's queue is full, no silence
                self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
                self._router.setsockopt(zmq.RCVHWM, REQUESTS)
                self._router.setsockopt(zmq.SNDHWM, CLIENT_QUEUE)
                self._replay = Replay(self._router, settings.topic.encode(), settings.buffer)
                self.replay = _bind(self._router, settings.replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, str(error)) from error
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    @property
    def replays_cut_off(self) -> Counter[str]:
        """Replays that were cut off, by reason of event_replay.REASONS."""
        return self._replay.cut_off if self._replay is not None else Counter()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Publishes a batch. Never blocks; where there is no room the batch is dropped, its sequence number is not
        given again."""
        if not events:
            return
        sequence = self.batches
        self.batches += 1
        tokens = sum(len(event.tokens) for event in events if isinstance(event, Stored))
        waiting = self._put_tokens - self._taken_tokens
        if self._dead or self._queue.qsize() >= QUEUE or (waiting and waiting + tokens > QUEUE_TOKENS):
            if self.queue_dropped == 0 and not self._dead:
                log.warning("KV events come faster than they are sent; batches are dropped")
            self.queue_dropped += 1
            return
        for event in events:
            if isinstance(event, Stored):
                self.blocks["stored", event.medium] += len(event.digests)
            elif isinstance(event, Removed):
                self.blocks["removed", event.medium] += len(event.digests)
        self._put_tokens += tokens
        self._queue.put(_Batch(sequence, time.time(), events, tokens))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Sends what waits and ends the thread. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        if not have_ended([self._thread], STOP_SECONDS):
            log.error("the publisher of KV events has not ended within %g s; it is left behind", STOP_SECONDS)
        else:
            os.close(self._wake)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            self._dead = True
            log.critical("the publisher of KV events has died; from now on every batch is dropped", exc_info=True)
        finally:
            self._context.destroy(linger=200)

    def _serve(self) -> None:
        """Publishes and answers until `close`."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        encoder = msgspec.msgpack.Encoder()
        replay, wait = self._replay, None
        while not self._stop.is_set():
            if replay is not None and self._router is not None:
                poller.modify(self._router, 0 if replay.full else zmq.POLLIN)
            ready = dict(poller.poll(wait))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._send_waiting(encoder)
            if replay is not None:
                if self._router in ready:
                    replay.hear()
                moved = replay.go_on()
                wait = None if not replay.busy else 0 if moved else REPLAY_POLL_MS
        self._send_waiting(encoder)

    def _send_waiting(self, encoder: msgspec.msgpack.Encoder) -> None:
        for _ in range(QUEUE):
            try:
                batch = self._queue.get_nowait()
            except queue.Empty:
                return
            # One copy for all queues: of the subscribers, of those who replay, and for later replays.
            payload = zmq.Frame(encoder.encode(_encoded(batch, self._settings.page_size)), copy=True)
            sequence = batch.sequence.to_bytes(8, "big")
            self._send(sequence, payload)
            if self._replay is not None:
                self._replay.keep(sequence, payload)
            self._taken_tokens += batch.tokens
            self.sent = batch.sequence + 1

    def _send(self, sequence: bytes, payload: zmq.Frame) -> None:
        frames = (self._settings.topic.encode(), sequence, payload)
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.subscriber_dropped += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)  # those that read get it
            self._pub.send_multipart(frames, zmq.NOBLOCK, copy=False)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)


def _encoded(batch: _Batch, page_size: int) -> KVEventBatch:
    return KVEventBatch(batch.time, [_event(event, page_size) for event in batch.events], 0)


def _event(event: KvEvent, page_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, Cleared):
        return AllBlocksCleared()
    hashes = [_hash(digest) for digest in event.digests]
    if isinstance(event, Removed):
        return BlockRemoved(hashes, event.medium)
    parent = _hash(event.parent) if event.parent is not None else None
    # Without tokens the size is 0, as vLLM has it: readers take no tokens out of the list then.
    size = page_size if event.tokens else 0
    return BlockStored(hashes, parent, list(event.tokens), size, None, event.medium, None)


def _hash(digest: bytes) -> int:
    """64 bits of it, as vLLM has them."""
    return int.from_bytes(digest[-8:], "big")


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """The endpoint that was bound. zmq.ZMQError."""
    host, _, port = endpoint.rpartition(":")
    if "[" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(f"{host}:{'*' if port == '0' else port}")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
