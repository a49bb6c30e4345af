"""What the front end before vLLM costs: so many streams at a time of long prompts, before servers that do nothing.

    python bench/front_streams.py [--streams 64] [--tokens 10000] [--chunks 128] [--every-ms 12] [--seconds 20]
        [--front "--processes 2"] [--beside]
    python bench/front_streams.py --streams 128 --tokens 100 --chunks 4 --every-ms 1 --prefill-ms 1 --beside

With --beside in the same run: the decode server without a front end, and behind a proxy of uvicorn and httpx that
passes one call on and reads nothing. The second line: short streams, of which the front end's own work is nearly all.

The prefill server answers after `--prefill-ms`, the decode server begins then, or `--behind-ms` later, and sends chunks
every `--every-ms`. The first token at once: --front "--first-token prefill" --behind-ms 20.
Both, and the client, are processes of their own that parse no JSON. Cores: CPU seconds of the front end's processes, by
/proc, over the seconds that passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send

from kvferry.daemon.cli.stack import Stack
from kvferry.front.server import listen

ANSWER = json.dumps(
    {
        "id": "cmpl-0123456789abcdef",
        "model": "m",
        "choices": [{"text": " word", "finish_reason": "length"}],
        "kv_transfer_params": {"do_remote_prefill": True},
    }
).encode()
CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1790000000,"model":"m","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}' + b"\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
TICKS = os.sysconf("SC_CLK_TCK")
WARM_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    tokens: int
    chunks: int
    every_s: float
    prefill_s: float
    seconds: float
    behind_s: float = 0.0  # decode's first chunk behind prefill's answer


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stub(asyncio.Protocol):
    """A server that reads requests to their ends, and answers by `answer`."""

    def __init__(self, load: Load, streams: bool) -> None:
        self._load, self._streams, self._buffer = load, streams, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            del self._buffer[: end + 4 + length]
            loop = asyncio.get_running_loop()
            if head.startswith(b"get"):
                self._transport.write(OK % 2 + b"{}")
            elif self._streams:
                self._transport.write(HEAD)
                loop.call_later(self._load.prefill_s + self._load.behind_s, self._chunk, 0)
            else:
                loop.call_later(self._load.prefill_s, self._transport.write, OK % len(ANSWER) + ANSWER)

    def _chunk(self, number: int) -> None:
        if self._transport.is_closing():
            return
        text = chunked(CHUNK)
        if number + 1 >= self._load.chunks:
            self._transport.write(text + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self._transport.write(text)
        asyncio.get_running_loop().call_later(self._load.every_s, self._chunk, number + 1)


def serve(load: Load, streams: bool, told: Connection) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Stub(load, streams), "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def proxy(upstream: int, told: Connection) -> None:
    """Passes each request on to a port and its reply back: what a proxy of these libraries costs at least."""
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60, trust_env=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        async with client.stream("POST", f"http://127.0.0.1:{upstream}{scope['path']}", content=body) as reply:
            headers = [(b"content-type", reply.headers["content-type"].encode())]
            await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
            async for chunk in reply.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    listener = listen("127.0.0.1", 0)
    told.send(listener.getsockname()[1])
    config = uvicorn.Config(app, http="h11", lifespan="off", log_level="error", access_log=False)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def started(serve: Callable[..., None], *args: object) -> tuple[int, int]:
    """The port of a server in a process of its own, and the process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(*args, there), daemon=True)
    process.start()
    assert process.pid is not None
    return here.recv(), process.pid


@dataclass(slots=True)
class Done:
    requests: int = 0
    chunks: int = 0
    first_s: float = 0.0


async def stream(host: str, port: int, load: Load, until: float, done: Done, seed: int) -> None:
    """Requests, one behind the other, on one connection."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection(host, port)
    while time.monotonic() < until:
        ids = [rng.randrange(100_000) for _ in range(load.tokens)]
        body = json.dumps({"model": "m", "prompt": ids, "stream": True, "max_tokens": load.chunks}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: front\r\ncontent-length: {len(body)}\r\n\r\n"
        began = time.monotonic()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n", 1)[0]:
            raise RuntimeError(answer.decode())
        first = True
        while (size := int(await reader.readline(), 16)) > 0:
            text = await reader.readexactly(size + 2)
            done.chunks += text.count(b"data: ")
            done.first_s += time.monotonic() - began if first else 0.0
            first = False
        await reader.readline()
        done.requests += 1
    writer.close()


def ask(host: str, port: int, load: Load, told: Connection) -> None:
    async def run() -> None:
        done, until = Done(), time.monotonic() + load.seconds
        await asyncio.gather(*(stream(host, port, load, until, done, seed) for seed in range(load.streams)))
        told.send((done.requests, done.chunks, done.first_s))

    asyncio.run(run())


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    pids = [pid, *(int(each) for each in children(pid))]
    total = 0
    for each in pids:
        with open(f"/proc/{each}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def children(pid: int) -> list[str]:
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()


def measure(load: Load, address: str, pid: int) -> tuple[Done, float, float]:
    """What was done, and CPU and wall seconds of it."""
    host, port = address.rsplit(":", 1)
    here, there = multiprocessing.Pipe()
    before, began = cpu_seconds(pid), time.monotonic()
    client = multiprocessing.Process(target=ask, args=(host, int(port), load, there))
    client.start()
    requests, chunks, first_s = here.recv()
    client.join()
    return Done(requests, chunks, first_s), cpu_seconds(pid) - before, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--every-ms", type=float, default=12.0)
    parser.add_argument("--prefill-ms", type=float, default=100.0)
    parser.add_argument("--behind-ms", type=float, default=0.0, help="decode's first chunk behind prefill's answer")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--front", default="", help="more flags of kvferry front")
    parser.add_argument("--beside", action="store_true", help="the same without a front end and behind a bare proxy")
    args = parser.parse_args()
    waits = args.every_ms / 1e3, args.prefill_ms / 1e3
    load = Load(args.streams, args.tokens, args.chunks, *waits, args.seconds, args.behind_ms / 1e3)
    prefill, decode = started(serve, load, False), started(serve, load, True)
    print(
        f"python {' '.join(sys.argv)}\n{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; "
        f"{load.streams} streams at a time, {load.tokens} tokens in, {load.chunks} chunks out"
    )
    if args.beside:
        tell("decode server alone", load, f"127.0.0.1:{decode[0]}", decode[1])
        bare = started(proxy, decode[0])
        tell("bare proxy", load, f"127.0.0.1:{bare[0]}", bare[1])
    with Stack() as stack:
        words = ["front", "--listen", "127.0.0.1:0", "--vllm-prefill", f"p=http://127.0.0.1:{prefill[0]}"]
        front = stack.start("front", [*words, "--vllm-decode", f"http://127.0.0.1:{decode[0]}", *args.front.split()])
        tell("front end", load, stack.ready(front), front.popen.pid)


def tell(name: str, load: Load, address: str, pid: int) -> None:
    measure(Load(8, load.tokens, 8, 0.01, 0.05, WARM_SECONDS), address, pid)
    done, cpu, wall = measure(load, address, pid)
    late = 1e3 * (done.first_s / done.requests - load.prefill_s)
    print(
        f"{name}: {done.requests / wall:.1f} requests/s, {done.chunks / wall:.0f} chunks/s, {cpu / wall:.2f} cores, "
        f"{1e3 * cpu / done.requests:.1f} ms of CPU a request, {1e6 * cpu / done.chunks:.0f} us a chunk; "
        f"first chunk {late:.1f} ms behind the server's",
        flush=True,
    )


if __name__ == "__main__":
    main()
