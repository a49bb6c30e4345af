"""How many requests a second the load generator itself can hold: short streams of a server that does nothing.

    python bench/loadgen_speed.py [--requests 5000] [--concurrency 64] [--chunks 8]

The server is a process of its own that parses no JSON: it reads a request to its end and writes a stored stream back,
chunk by chunk. Each process has one core of two. `floor`: as many bare requests by a loop over sockets, no HTTP library
and no JSON, on the generator's core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvferry.daemon.cli import main as cli
from kvferry.loadgen.files import read_report

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LIMIT = 500.0  # requests/s
LATE_LIMIT_MS = 20.0  # p99 of how late the open loop sends
WARM_UP = 200


# -- the server --------------------------------------------------------------------------------------------------------


class Trivial(asyncio.Protocol):
    """Answers GET with a model list, POST with a stream of `chunks` parts and a usage."""

    def __init__(self, stream: list[bytes], models: bytes) -> None:
        self._stream = stream
        self._models = models
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            if head.startswith(b"get"):
                self._transport.write(self._models)
            else:
                for part in self._stream:
                    self._transport.write(part)


def serve(chunks: int, core: int | None, ready: Connection) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    models = json.dumps({"data": [{"id": "nothing"}]}).encode()
    models = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(models) + models
    event = {"id": "c", "object": "chat.completion.chunk", "model": "nothing"}
    parts = [{**event, "choices": [{"index": 0, "delta": {"content": "word "}}]} for _ in range(chunks)]
    usage = {"prompt_tokens": 40, "completion_tokens": chunks, "total_tokens": 40 + chunks}
    texts = [json.dumps(part) for part in [*parts, {**event, "choices": [], "usage": usage}]]
    stream = [_http_chunk(f"data: {text}\n\n".encode()) for text in [*texts, "[DONE]"]]
    stream = [HEAD + stream[0], *stream[1:-1], stream[-1] + b"0\r\n\r\n"]

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Trivial(stream, models), "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# -- the floor ---------------------------------------------------------------------------------------------------------


async def floor(port: int, requests: int, concurrency: int) -> float:
    """Requests/s of bare sockets."""
    body = b'{"model": "nothing"}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    left = iter(range(requests))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(request)
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return requests / (time.perf_counter() - began)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    requests_per_s: float
    chunks_per_s: float
    p99_ms: float | None
    cpu_ms: float | None = None  # of the generator, a request
    late_p99_ms: float | None = None  # of an open loop


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8)
    given = parser.parse_args(words)
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(given.chunks, theirs, sender))
    server.start()
    try:
        if not receiver.poll(30):
            print("loadgen_speed: the server did not start in 30 s", file=sys.stderr)
            return 1
        port = int(receiver.recv())
        if ours is not None:
            os.sched_setaffinity(0, {ours})
        bare = asyncio.run(floor(port, given.requests, given.concurrency))
        rows = [Row("floor: bare sockets, no JSON", bare, bare * given.chunks, None)]
        rows += [measure(f"kvferry loadgen, {given.chunks} chunks", port, given, [])]
        rows += [measure("the same, open loop of 500 requests/s", port, given, ["--rate", "500"])]
    finally:
        server.terminate()
        server.join()
    print(f"{platform.machine()}, {len(cores)} cores, Python {platform.python_version()}; {given.requests:,} requests,")
    print(f"{given.concurrency} at a time; generator and server on a core each\n")
    print(f"{'what':<40} {'requests/s':>11} {'chunks/s':>9} {'latency p99':>12} {'late p99':>10} {'CPU each':>9}")
    for row in rows:
        p99 = "" if row.p99_ms is None else f"{row.p99_ms:.1f} ms"
        late = "" if row.late_p99_ms is None else f"{row.late_p99_ms:.1f} ms"
        cpu = "" if row.cpu_ms is None else f"{row.cpu_ms:.2f} ms"
        line = f"{row.what:<40} {row.requests_per_s:>11,.0f} {row.chunks_per_s:>9,.0f} {p99:>12} {late:>10} {cpu:>9}"
        print(line.rstrip())
    late_p99_ms = rows[2].late_p99_ms
    held = rows[1].requests_per_s >= LIMIT and late_p99_ms is not None and late_p99_ms <= LATE_LIMIT_MS
    limits = f"{LIMIT:.0f} requests/s; open loop: late p99 {LATE_LIMIT_MS:.0f} ms"
    print(f"\nlimits: {limits}, held: {'yes' if held else 'NO'}")
    return 0 if held else 1


def measure(what: str, port: int, given: argparse.Namespace, more: list[str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        run = ["loadgen", "--url", f"http://127.0.0.1:{port}", "--conversations", str(given.requests), "--turns", "1"]
        run += ["--concurrency", str(given.concurrency), "--warm-up", str(WARM_UP)]
        run += ["--json", str(path), "--format", "json"]
        stdout = sys.stdout
        before_s = time.process_time()
        with open(os.devnull, "w") as sys.stdout:
            try:
                status = cli.main([*run, *more])
            finally:
                sys.stdout = stdout
        cpu_s = time.process_time() - before_s  # with what a run costs once, and its warm-up
        report = read_report(path)
    if status != 0 or report.failed:
        raise SystemExit(f"loadgen_speed: {report.failed} requests failed: {report.errors}")
    late = report.late_ms.p99 if "--rate" in more else None
    cpu_ms = 1000 * cpu_s / (report.requests + WARM_UP)
    return Row(what, report.requests_per_s, report.output_tokens_per_s, report.latency_ms.p99, cpu_ms, late)


if __name__ == "__main__":
    sys.exit(main())
