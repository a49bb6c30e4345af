"""The ZeroMQ publisher alone: nobody there, somebody who does not read, endpoints that cannot be had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
import zmq

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import ConfigError
from kvferry.daemon.core.kv_events import Cleared, Removed, Stored
from kvferry.daemon.observe import event_publisher, event_replay
from kvferry.daemon.observe.event_publisher import EventPublisher, PublisherSettings
from tests.support.standstill import jumping_clock, run_with_standstill

PAGE = 4
DIGEST = bytes(24) + (0xFEDCBA9876543210).to_bytes(8, "big")


def settings(buffer: int = 100) -> PublisherSettings:
    return PublisherSettings("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "t", buffer, PAGE)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def stored(number: int, pages: int = 1) -> Stored:
    digests = tuple(number.to_bytes(16, "big") + i.to_bytes(16, "big") for i in range(pages))
    return Stored("GPU", digests, None, list(range(pages * PAGE)))


def until(done: object, seconds: float = 5.0) -> None:
    assert callable(done)
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def replay(context: zmq.Context[zmq.Socket[bytes]], publisher: EventPublisher, first: int) -> list[tuple[int, object]]:
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    batches: list[tuple[int, object]] = []
    while socket.poll(5000):
        _, _, sequence, payload = socket.recv_multipart()
        if sequence == b"\xff" * 8:
            return batches
        batches.append((int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)))
    raise AssertionError("the replay did not end")


def test_the_form_of_the_events(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(settings())
    publisher.publish([Cleared(), Stored("GPU", (DIGEST,), bytes(32), [1, 2, 3, 4])])
    publisher.publish([])  # no batch
    publisher.publish([Stored("CPU", (DIGEST,)), Removed("GPU", (DIGEST,))])
    (first, one), (second, two) = replay(context, publisher, 0)
    publisher.close()
    publisher.close()
    assert (first, second) == (0, 1)
    assert isinstance(one, list) and isinstance(two, list)
    assert one[0] == pytest.approx(time.time(), abs=60)
    common = {"lora_id": None, "lora_name": None}
    block = 0xFEDCBA9876543210
    gpu = {"block_hashes": [block], "parent_block_hash": 0, "token_ids": [1, 2, 3, 4], "block_size": PAGE}
    cpu = {"block_hashes": [block], "parent_block_hash": None, "token_ids": [], "block_size": 0}
    assert one[1:] == [
        [{"type": "AllBlocksCleared"}, {"type": "BlockStored", "medium": "GPU", **gpu, **common}],
        0,
    ]
    assert two[1:] == [
        [
            {"type": "BlockStored", "medium": "CPU", **cpu, **common},
            {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"},
        ],
        0,
    ]
    assert dict(publisher.blocks) == {("stored", "GPU"): 1, ("stored", "CPU"): 1, ("removed", "GPU"): 1}


def test_replay_begins_where_it_is_asked_to_and_keeps_so_many(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(settings(buffer=5))
    for number in range(12):
        publisher.publish([stored(number)])
    until(lambda: [n for n, _ in replay(context, publisher, 0)] == [7, 8, 9, 10, 11])
    assert [number for number, _ in replay(context, publisher, 10)] == [10, 11]
    assert replay(context, publisher, 12) == []
    wrong = context.socket(zmq.DEALER)
    wrong.connect(publisher.replay)
    wrong.send_multipart((b"", b"three"))
    assert [number for number, _ in replay(context, publisher, 11)] == [11]
    publisher.close()


def test_who_does_not_read_loses_batches_and_blocks_nobody(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "SUBSCRIBER_QUEUE", 10)
    publisher = EventPublisher(settings(buffer=1))
    slow, quick = context.socket(zmq.SUB), context.socket(zmq.SUB)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    quick.setsockopt(zmq.RCVHWM, 0)
    for socket in (slow, quick):
        socket.setsockopt(zmq.SUBSCRIBE, b"t")
        socket.connect(publisher.endpoint)
    for socket in (slow, quick):  # until both are subscribed
        while not socket.poll(50):
            publisher.publish([stored(0)])
    began = publisher.batches
    seen: list[int] = []
    for number in range(250):
        publisher.publish([stored(number, 2000)])  # 30 KB each: more than the kernel's buffers take
        until(lambda: publisher.sent == publisher.batches)
        while not seen or seen[-1] < publisher.batches - 1:  # it keeps up, however busy the machine is
            assert quick.poll(5000)
            seen.append(int.from_bytes(quick.recv_multipart()[1], "big"))
    assert publisher.queue_dropped == 0
    assert publisher.subscriber_dropped > 0
    last = publisher.batches - 1
    assert seen[-250:] == list(range(began, last + 1)), "who reads lost something by who does not"
    publisher.close()


def test_more_than_the_queue_takes_is_dropped_and_leaves_a_gap(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "QUEUE", 0)
    publisher = EventPublisher(settings())
    publisher.publish([stored(1)])
    monkeypatch.setattr(event_publisher, "QUEUE", 4096)
    publisher.publish([stored(2)])
    assert publisher.queue_dropped == 1
    until(lambda: [number for number, _ in replay(context, publisher, 0)] == [1])
    publisher.close()


def test_long_prompts_that_wait_are_bounded_too(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "QUEUE_TOKENS", 100)
    publisher = EventPublisher(settings())
    publisher.publish([stored(0, 1000)])  # alone, whatever its length
    until(lambda: publisher.sent == 1)
    for number in range(1, 2000):
        publisher.publish([stored(number, 20)])
    until(lambda: publisher.sent + publisher.queue_dropped >= 2000)
    assert publisher.queue_dropped > 0
    assert publisher.batches == 2000
    publisher.close()


def test_a_long_replay_comes_whole_and_holds_up_nobody(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(settings(buffer=5000))
    for number in range(4000):
        publisher.publish([stored(number, 20)])
        until(lambda: publisher.sent + 100 > publisher.batches)
    slow, quick = context.socket(zmq.DEALER), context.socket(zmq.SUB)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.connect(publisher.replay)
    slow.send_multipart((b"", bytes(8)))  # and reads nothing for now
    quick.setsockopt(zmq.SUBSCRIBE, b"t")
    quick.connect(publisher.endpoint)
    while not quick.poll(20):
        publisher.publish([stored(0)])
    began = time.monotonic()
    for number in range(20):
        publisher.publish([stored(number)])
    until(lambda: publisher.sent == publisher.batches)
    assert time.monotonic() - began < 1, "a replay that is not read holds up what is new"
    assert [number for number, _ in replay(context, publisher, 1000)] == list(range(1000, publisher.batches))
    seen = []
    while slow.poll(5000):
        sequence = slow.recv_multipart()[2]
        if sequence == b"\xff" * 8:
            break
        seen.append(int.from_bytes(sequence, "big"))
    assert seen[-1] >= 3999 and seen == list(range(seen[-1] + 1)), "a batch was dropped silently"
    publisher.close()


def test_a_client_of_a_replay_that_is_gone_is_given_up(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_replay, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(event_publisher, "CLIENT_QUEUE", 10)
    publisher = EventPublisher(settings(buffer=2000))
    long = stored(0, 4000)  # more than the kernel's buffers take
    for _ in range(200):
        publisher.publish([long])
        until(lambda: publisher.sent + 100 > publisher.batches)
    assert publisher._replay is not None
    gone = context.socket(zmq.DEALER)
    gone.setsockopt(zmq.LINGER, 0)
    gone.setsockopt(zmq.RCVHWM, 1)
    gone.setsockopt(zmq.RCVBUF, 4096)
    gone.connect(publisher.replay)
    gone.send_multipart((b"", bytes(8)))
    until(lambda: publisher.replays_cut_off["stalled"] == 1)
    gone.send_multipart((b"", b"x" * 100_000))  # a frame too long ends its connection
    assert [number for number, _ in replay(context, publisher, 198)] == [198, 199]
    publisher.close()


class Socket:
    """A ROUTER's: takes nothing before it may, as one whose threads could not run."""

    def __init__(self) -> None:
        self.requests = [(b"client", b"", bytes(8))]
        self.takes = False
        self.sent: list[bytes] = []

    def recv_multipart(self, flags: int) -> tuple[bytes, ...]:
        if not self.requests:
            raise zmq.Again
        return self.requests.pop()

    def send_multipart(self, frames: tuple[bytes, ...], flags: int, copy: bool = True) -> None:
        if not self.takes:
            raise zmq.Again
        self.sent.append(frames[3])


def test_a_replay_is_not_cut_off_for_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still = jumping_clock(monkeypatch)
    socket = Socket()
    replay = event_replay.Replay(cast(Any, socket), b"", 10)
    replay.keep(bytes(8), zmq.Frame(b"batch"))
    replay.hear()
    for _ in range(3):
        stand_still(1000.0)
        replay.go_on()
        assert replay.busy
    socket.takes = True
    assert replay.go_on() and not replay.busy
    assert socket.sent == [bytes(8), event_replay.END] and not replay.cut_off
    socket.takes, socket.requests = False, [(b"client", b"", bytes(8))]
    replay.hear()
    for _ in range(20):
        stand_still(1000.0)
        replay.go_on()
    assert replay.cut_off == {"stalled": 1}, "it has had its turns"


def test_what_was_published_before_an_end_that_stands_still_is_sent() -> None:
    program = """
        import os, signal, time
        from kvferry.daemon.observe import event_publisher

        event_publisher.STOP_SECONDS = 1.0
        serve = event_publisher.EventPublisher._serve

        def stand_still(publisher):
            serve(publisher)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)

        event_publisher.EventPublisher._serve = stand_still
        settings = event_publisher.PublisherSettings("tcp://127.0.0.1:0", "", "t", 10, 4)
        publisher = event_publisher.EventPublisher(settings)
        publisher.close()
        print(publisher._thread.is_alive())
    """
    assert run_with_standstill(program, 2.0).stdout == "False\n"


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventPublisher]:
    """One replay at a time, of more than the kernel's buffers take."""
    monkeypatch.setattr(event_replay, "MAX_REPLAYS", 1)
    monkeypatch.setattr(event_replay, "STALLED_SECONDS", 0.5)
    publisher = EventPublisher(settings(buffer=200))
    for _ in range(200):
        publisher.publish([stored(0, 4000)])
        until(lambda: publisher.sent + 100 > publisher.batches)
    yield publisher
    publisher.close()


def deaf(context: zmq.Context[zmq.Socket[bytes]], publisher: EventPublisher) -> zmq.Socket[bytes]:
    """It asks for everything and reads nothing."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, 4096)
    socket.connect(publisher.replay)
    socket.send_multipart((b"", bytes(8)))
    return socket


def test_who_asks_again_and_again_and_reads_nothing_keeps_its_place_no_longer(
    context: zmq.Context[zmq.Socket[bytes]], crowded: EventPublisher
) -> None:
    """And another one, for which there was no room, gets its replay then."""
    stalled = deaf(context, crowded)
    assert crowded._replay is not None
    until(lambda: crowded._replay is not None and crowded._replay.full)
    other = context.socket(zmq.DEALER)
    other.connect(crowded.replay)
    other.send_multipart((b"", (199).to_bytes(8, "big")))
    deadline = time.monotonic() + 5.0
    while not other.poll(50):
        assert time.monotonic() < deadline, "the place was never given up"
        stalled.send_multipart((b"", bytes(8)))
    assert [int.from_bytes(other.recv_multipart()[2], "big", signed=True) for _ in range(2)] == [199, -1]
    assert crowded.replays_cut_off["stalled"] >= 1
    # Its place is gone at once the next time, as long as it reads nothing; once it does it is served again.
    cut_off = crowded.replays_cut_off["stalled"]
    stalled.send_multipart((b"", bytes(8)))
    until(lambda: crowded.replays_cut_off["stalled"] > cut_off, 0.4)
    while stalled.poll(200):
        stalled.recv_multipart()
    stalled.send_multipart((b"", (199).to_bytes(8, "big")))
    numbers = []
    while not numbers or numbers[-1] != -1:
        assert stalled.poll(5000)
        numbers.append(int.from_bytes(stalled.recv_multipart()[2], "big", signed=True))
    assert 199 in numbers


def test_batches_that_wait_for_clients_are_there_once(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(settings(buffer=100))
    for _ in range(40):
        publisher.publish([Stored("GPU", (DIGEST,), None, [1 << 20] * 200_000)])  # 1 MB
        until(lambda: publisher.sent == publisher.batches)
    before = resident()
    clients = [deaf(context, publisher) for _ in range(16)]
    until(lambda: publisher._replay is not None and len(publisher._replay._cursors) == 16)
    time.sleep(0.3)
    grown = resident() - before
    assert grown < 64 << 20, f"{grown >> 20} MiB for {len(clients)} clients that read nothing"
    publisher.close()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_thread_that_dies_is_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(batch: object, page_size: int) -> None:
        raise RuntimeError("cannot be encoded")

    monkeypatch.setattr(event_publisher, "_encoded", broken)
    publisher = EventPublisher(settings())
    publisher.publish([stored(0)])
    until(lambda: not publisher._thread.is_alive())
    publisher.publish([stored(1)])
    assert (publisher.batches, publisher.queue_dropped) == (2, 1)
    assert "has died" in caplog.text and "cannot be encoded" in caplog.text
    publisher.close()


def test_settings_that_cannot_be() -> None:
    publisher = EventPublisher(settings())
    taken = PublisherSettings(publisher.endpoint, "", "", 1, PAGE)
    with pytest.raises(OSError, match="in use"):
        EventPublisher(taken)
    publisher.close()
    for given, message in (
        ({"events": "udp://127.0.0.1:1"}, "tcp://HOST:PORT"),
        ({"events": "tcp://0.0.0.0:5557"}, "needs --insecure"),
        ({"events": "tcp://127.0.0.1:5557", "events_replay": "tcp://0.0.0.0:5558"}, "needs --insecure"),
        ({"events_replay": "tcp://127.0.0.1:5558"}, "--events is not given"),
        ({"events": "tcp://127.0.0.1:5557", "role": "prefill"}, "only the decode side"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            DaemonConfig.model_validate({"role": "decode", **given})
    assert DaemonConfig(role="decode", events="tcp://0.0.0.0:5557", insecure=True).events
