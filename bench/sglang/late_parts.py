"""Connections to a range of TCP ports of this machine go by a relay that holds back what passes, for as long as it
likes: what a NIXL of either backend writes comes late, without network namespaces.

    with LateParts(22000, 22127, folder) as late: ...   processes with `late.environment` and UCX on TCP have it
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SHIFT = 5000
DELAYS = (0.0, 0.005, 0.03, 0.1)
SAME_SECONDS = 0.5  # for which a delay holds
CHUNK, MOST_WAITING = 1 << 20, 64  # bytes; chunks of one connection that wait
START_SECONDS = 20.0


class LateParts:
    """The relay's process, and what others need to go by it. A context."""

    def __init__(self, first: int, last: int, folder: Path, delays: Sequence[float] = DELAYS) -> None:
        """`folder`: for its library. `delays`: seconds; each holds for a while, then another."""
        self._ports = (first, last)
        self._delays = delays
        self._library = folder / f"shift_{first}_{last}.so"
        self._relay: subprocess.Popen[str] | None = None

    @property
    def preload(self) -> dict[str, str]:
        """What has a process's connections to these ports go by the relay."""
        return {"LD_PRELOAD": str(self._library)}

    @property
    def environment(self) -> dict[str, str]:
        """The same, and what has UCX use these ports for all that it writes on GPUs."""
        first, last = self._ports
        ucx = {"UCX_TLS": "cuda_copy,tcp,self", "UCX_NET_DEVICES": "lo", "UCX_TCP_PORT_RANGE": f"{first}-{last}"}
        return {**self.preload, **ucx}

    def __enter__(self) -> LateParts:
        source = Path(__file__).with_name("shift_ports.c")
        given = zip(("FIRST", "LAST", "SHIFT"), (*self._ports, SHIFT), strict=True)
        words = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", *(f"-D{name}={value}" for name, value in given)]
        subprocess.run([*words, "-o", str(self._library), str(source), "-ldl"], check=True, timeout=60)
        words = [sys.executable, str(Path(__file__)), *map(str, (*self._ports, *self._delays))]
        self._relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise OSError("the relay does not start")
        return self

    def __exit__(self, *error: object) -> None:
        """Prints what went by it."""
        assert self._relay is not None
        try:
            told, _ = self._relay.communicate(timeout=10)  # the end of its input is its end
            print(f"   the relay: {told.strip()}", flush=True)
        except subprocess.TimeoutExpired:
            self._relay.kill()
            self._relay.wait(10)


class Relay:
    def __init__(self, delays: Sequence[float]) -> None:
        self._delays = delays
        self.connections = self.bytes = 0
        self.late = 0.0  # the longest that something was held back
        self._delay, self._until = 0.0, 0.0

    def _now(self) -> float:
        """When what comes now may go on."""
        now = time.monotonic()
        if now >= self._until:
            self._delay, self._until = random.choice(self._delays), now + SAME_SECONDS
        self.late = max(self.late, self._delay)
        return now + self._delay

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("sockname")[:2]
        self.connections += 1
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection(host, port - SHIFT)
            await asyncio.gather(self._carry(reader, there[1]), self._carry(there[0], writer))
            there[1].close()
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_WAITING)
        sending = asyncio.create_task(self._send(waiting, writer))
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                self.bytes += len(data)
                await waiting.put((self._now(), data))
        await waiting.put((0.0, b""))
        await sending

    async def _send(self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        broken = False
        while (item := await waiting.get())[1]:
            if not broken and (seconds := item[0] - time.monotonic()) > 0:
                await asyncio.sleep(seconds)
            try:
                writer.write(item[1])
                await writer.drain()
            except OSError:
                broken = True  # the rest is taken in, and goes nowhere
        with contextlib.suppress(OSError):
            writer.write_eof()


async def relay(first: int, last: int, delays: Sequence[float]) -> None:
    carries = Relay(delays)
    ports = range(first + SHIFT, last + SHIFT + 1)
    servers = [await asyncio.start_server(carries.serve, "127.0.0.1", port, limit=CHUNK) for port in ports]
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server in servers:
        server.close()
    print(f"{carries.connections} connections, {carries.bytes >> 20} MiB, at most {carries.late:g} s late", flush=True)


if __name__ == "__main__":
    asyncio.run(relay(int(sys.argv[1]), int(sys.argv[2]), [float(each) for each in sys.argv[3:]]))
