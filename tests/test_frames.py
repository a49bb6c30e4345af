"""Messages as frames: whole however they come, bounded, and an end that says why."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import grpc
import pytest

from kvferry.client.requests import DaemonAbsent
from kvferry.client.stream import Stream, open_stream
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.services.worker import status_of
from kvferry.daemon.services.worker_frames import CLOSE_SECONDS, MOST_WAITING, FramedWorkers, FrameTalk
from kvferry.frames import SUFFIX, FrameStream
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import ENDED_IN_ORDER, MAX_MESSAGE_BYTES

MOST = 1000


class Heard:
    """One end of a connection, and what came there."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ends: list[str] = []
        self.stream = FrameStream(MOST, self.messages.append, self.ends.append)


def frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def test_messages_are_whole_however_they_come() -> None:
    random = Random(7)
    for _ in range(300):
        messages = [random.randbytes(random.choice((0, 1, 3, 4, 5, 300, MOST))) for _ in range(random.randint(1, 6))]
        data, heard = b"".join(map(frame, messages)), Heard()
        while data:
            cut = random.choice((1, 2, 3, 4, 5, 100, 5000))
            heard.stream.data_received(data[:cut])
            data = data[cut:]
        assert heard.messages == messages and heard.ends == []


def test_one_that_is_too_long_ends_it() -> None:
    heard = Heard()
    heard.stream.data_received(frame(b"a" * MOST) + struct.pack("<I", MOST + 1) + b"b" * 10 + frame(b"c"))
    heard.stream.data_received(frame(b"d"))
    heard.stream.connection_lost(None)
    assert heard.messages == [b"a" * MOST]
    assert heard.ends == [f"a message of {MOST + 1} bytes came; it may have {MOST}"]


@pytest.mark.parametrize(("left", "why"), [(b"", ""), (frame(b"abc")[:-1], "the connection ended within a message")])
def test_the_other_side_says_its_last(left: bytes, why: str) -> None:
    heard = Heard()
    heard.stream.data_received(frame(b"x") + left)
    assert heard.stream.eof_received(), "this side may go on talking"
    heard.stream.connection_lost(None)
    assert (heard.messages, heard.ends) == ([b"x"], [why])


def test_a_connection_that_is_over_takes_every_call() -> None:
    async def over() -> None:
        ours, theirs = socket.socketpair()
        heard = Heard()
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: heard.stream, sock=ours)
        theirs.close()
        await asyncio.wait_for(heard.stream.finish(30.0), 10.0)
        assert transport.is_closing()
        for call in (heard.stream.hold, heard.stream.go_on, heard.stream.end, heard.stream.close, heard.stream.abort):
            call()
        heard.stream.send(b"for nothing")
        assert heard.stream.unsent == 0

    asyncio.run(over())


def test_nothing_is_sent_behind_the_last_word() -> None:
    async def story() -> None:
        ours, theirs = socket.socketpair()
        heard = Heard()
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: heard.stream, sock=ours)
        heard.stream.send(b"x")
        heard.stream.end()
        heard.stream.send(b"y")
        theirs.settimeout(5)
        assert theirs.recv(100) == frame(b"x") and theirs.recv(100) == b""
        transport.close()
        theirs.close()

    asyncio.run(story())


# -- the daemon's sockets


class Raw:
    """A worker that is nothing but its bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def event(self) -> wire.WorkerEvent:
        (length,) = struct.unpack("<I", await self.reader.readexactly(4))
        return wire.WorkerEvent.FromString(await self.reader.readexactly(length))

    def close(self) -> None:
        self.writer.close()


def served(
    folder: Path,
    serve: Callable[[FrameTalk], Awaitable[None]],
    story: Callable[[Callable[[], Awaitable[Raw]]], Awaitable[None]],
) -> None:
    path = str(folder / "s")

    async def run() -> None:
        async def connect() -> Raw:
            return Raw(*await asyncio.open_unix_connection(path))

        async def serving(talk: FrameTalk) -> None:
            try:
                await serve(talk)
            except RequestError as error:
                await talk.abort(status_of(error), error.message)

        workers = FramedWorkers(serving, 2)
        await workers.start(path)
        await story(connect)
        await workers.stop(0.1)

    asyncio.run(asyncio.wait_for(run(), 30))


async def echo(talk: FrameTalk) -> None:
    """Answers each Aux with a Ready of the same bytes."""
    while isinstance(message := await talk.read(), wire.WorkerMessage):
        await talk.write([wire.WorkerEvent(ready=wire.Ready(aux=message.aux.blob))])


def aux(blob: bytes) -> bytes:
    return frame(wire.WorkerMessage(aux=wire.Aux(blob=blob)).SerializeToString())


def test_what_was_sent_is_answered_behind_the_worker_s_last_word(tmp_path: Path) -> None:
    async def story(connect: Callable[[], Awaitable[Raw]]) -> None:
        raw = await connect()
        count = 5 * MOST_WAITING  # more than are taken in at a time
        raw.writer.write(b"".join(aux(str(i).encode()) for i in range(count)))
        raw.writer.write_eof()
        assert [(await raw.event()).ready.aux for _ in range(count)] == [str(i).encode() for i in range(count)]
        end = await raw.event()
        assert (end.WhichOneof("kind"), end.end.code) == ("end", 0)
        assert await raw.reader.read() == b""
        raw.close()

    served(tmp_path, echo, story)


def test_more_connections_than_may_be_are_told_so(tmp_path: Path) -> None:
    async def story(connect: Callable[[], Awaitable[Raw]]) -> None:
        first, second, third = await connect(), await connect(), await connect()
        third.writer.write(aux(b"a worker that writes first"))
        end = (await third.event()).end
        assert (end.code, end.details) == (8, "2 workers' connections are open")
        first.close()
        await asyncio.sleep(0.1)
        fourth = await connect()
        fourth.writer.write(aux(b"x"))
        assert (await fourth.event()).ready.aux == b"x"
        for raw in (second, third, fourth):
            raw.close()

    served(tmp_path, echo, story)


def test_bytes_that_are_no_message_end_that_connection_alone(tmp_path: Path) -> None:
    async def story(connect: Callable[[], Awaitable[Raw]]) -> None:
        good, bad = await connect(), await connect()
        bad.writer.write(frame(b"\xff\xff\xff"))
        end = (await bad.event()).end
        assert (end.code, end.details) == (3, "a message of 3 bytes is no WorkerMessage")
        assert await bad.reader.read() == b""
        good.writer.write(aux(b"y"))
        assert (await good.event()).ready.aux == b"y"
        good.close()
        bad.close()

    served(tmp_path, echo, story)


def test_a_message_that_is_too_long_is_named_before_the_connection_ends(tmp_path: Path) -> None:
    async def story(connect: Callable[[], Awaitable[Raw]]) -> None:
        raw = await connect()
        raw.writer.write(struct.pack("<I", MAX_MESSAGE_BYTES + 1) + bytes(1 << 20))
        end = (await raw.event()).end
        assert (end.code, end.details) == (
            8,
            f"a message of {MAX_MESSAGE_BYTES + 1} bytes came; it may have {MAX_MESSAGE_BYTES}",
        )
        assert await raw.reader.read() == b""
        raw.close()

    served(tmp_path, echo, story)


def test_who_writes_while_the_daemon_ends_still_reads_why(tmp_path: Path) -> None:
    """A connection that is closed with messages unread, or written to behind its close, breaks and loses the reason."""

    async def refuse(talk: FrameTalk) -> None:
        await asyncio.sleep(0.1)  # what was sent waits unread
        await talk.abort(grpc.StatusCode.UNAVAILABLE, "the daemon has ended", ENDED_IN_ORDER)

    async def story(connect: Callable[[], Awaitable[Raw]]) -> None:
        raw = await connect()
        begin = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < begin + 0.5:
            raw.writer.write(aux(bytes(1000)) * 100)
            await asyncio.sleep(0.005)
        end = (await raw.event()).end
        assert (end.details, end.daemon_ended) == ("the daemon has ended", True)
        assert await raw.reader.read() == b""
        raw.close()

    served(tmp_path, refuse, story)


def test_a_client_hears_the_end_while_it_writes_and_hangs_up(tmp_path: Path) -> None:
    async def refuse(talk: FrameTalk) -> None:
        await asyncio.sleep(0.1)
        await talk.abort(grpc.StatusCode.UNAVAILABLE, "the daemon has ended", ENDED_IN_ORDER)

    async def run() -> None:
        workers = FramedWorkers(refuse, 1)
        await workers.start(str(tmp_path / "s") + SUFFIX)
        stream = await open_stream(str(tmp_path / "s"), 5.0)
        while not stream.over.done():
            stream.send(wire.WorkerMessage(aux=wire.Aux(blob=bytes(100_000))))
            await asyncio.sleep(0)
        assert stream.over.result().daemon_ended
        begin = asyncio.get_running_loop().time()
        await workers.stop(CLOSE_SECONDS)
        assert asyncio.get_running_loop().time() - begin < CLOSE_SECONDS / 2, "the client has not hung up"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_daemon_that_stands_still_is_absent_when_nobody_more_is_taken_in(tmp_path: Path) -> None:
    """The queue of its socket is full: a connection then is refused, and not one that has begun."""

    async def run() -> None:
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as other:
            listening.bind(str(tmp_path / "s") + SUFFIX)
            listening.listen(0)
            other.connect(str(tmp_path / "s") + SUFFIX)
            with pytest.raises(DaemonAbsent, match=r"no daemon answered on .*s\.f within 0\.3 s$"):
                await open_stream(str(tmp_path / "s"), 0.3)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_daemon_without_frames_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        with socket.socket(socket.AF_UNIX) as older:
            older.bind(str(tmp_path / "s"))
            with pytest.raises(DaemonAbsent, match="of a daemon older than this worker or just starting"):
                await open_stream(str(tmp_path / "s"), 0.1)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_events_that_break_the_protocol_end_the_stream_whenever_they_come() -> None:
    def refuse(kind: str | None, event: wire.WorkerEvent) -> None:
        raise ValueError("a second Welcome")

    def event() -> bytes:
        return frame(wire.WorkerEvent(welcome=wire.Welcome()).SerializeToString())

    async def run() -> None:
        for late in (False, True):
            stream = Stream("s")
            stream.frames.data_received(event() + (b"" if late else event()))
            stream.listen(refuse)
            if late:
                stream.frames.data_received(event())
            assert str(stream.over.result()) == "INTERNAL: the daemon broke the protocol: a second Welcome"

    asyncio.run(run())


def test_a_worker_that_does_not_read_is_waited_for_and_its_end_ends_the_wait(tmp_path: Path) -> None:
    ends: list[str] = []

    async def flood(talk: FrameTalk) -> None:
        try:
            while True:
                await talk.write([wire.WorkerEvent(ready=wire.Ready(aux=bytes(1 << 16)))])
                await asyncio.sleep(0)
                assert talk.stream.unsent < 1 << 20, "it goes on without anybody who reads"
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def story(connect: Callable[[], Awaitable[Raw]]) -> None:
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(tmp_path / "s"))
        await asyncio.sleep(0.3)
        raw.close()
        await asyncio.sleep(0.1)
        assert ends == ["cancelled"]

    served(tmp_path, flood, story)
