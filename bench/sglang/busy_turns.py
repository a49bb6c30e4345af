"""How long a word of the daemon's and its answer take beside a thread of Python that never rests, as SGLang's
scheduler: the other thread waits for its turn, which such a thread gives away after `sys.setswitchinterval`.

python bench/sglang/busy_turns.py [--words 400]

Both ends are kvferry's own streams over a Unix socket. The daemon's end, a process of its own, says a word of 200 bytes
every 2 ms and waits for the answer; "x" is beside a thread that rests. The busy thread is of Python alone: SGLang's
lets others have their turn in each of torch's operations, too. What it loses is not shown.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from rich.console import Console
from rich.table import Table

from kvferry.frames import FrameStream

INTERVALS_MS = (5.0, 0.5, 0.1, 0.02)
WORD_BYTES, GAP_SECONDS = 200, 0.002


def say(end: socket.socket, words: int, told: Connection) -> None:
    """Sends the words, and tells how many microseconds each took with its answer."""

    async def main() -> list[float]:
        came = asyncio.Event()
        stream = FrameStream(WORD_BYTES, lambda _: came.set(), lambda _: None)
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=end)
        took = []
        for _ in range(words):
            await asyncio.sleep(GAP_SECONDS)
            came.clear()
            began = time.perf_counter()
            stream.send(bytes(WORD_BYTES))
            await came.wait()
            took.append((time.perf_counter() - began) * 1e6)
        stream.close()
        return took

    told.send(asyncio.run(main()))


def answer(end: socket.socket) -> None:
    async def main() -> None:
        over = asyncio.Event()
        stream = FrameStream(WORD_BYTES, lambda word: stream.send(word), lambda _: over.set())
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=end)
        await over.wait()
        stream.close()

    asyncio.run(main())


def work() -> None:
    counts: dict[int, int] = {}
    for number in range(200):
        counts[number % 17] = counts.get(number % 17, 0) + number


def work_until(done: Connection) -> None:
    while not done.poll():
        for _ in range(100):
            work()


def rest_until(done: Connection) -> None:
    done.poll(None)


def measured(words: int, beside: Callable[[Connection], None]) -> list[float]:
    here, there = socket.socketpair(socket.AF_UNIX)
    told, tells = multiprocessing.Pipe(duplex=False)
    # Forked before any thread is there.
    saying = multiprocessing.get_context("fork").Process(target=say, args=(there, words, tells))
    saying.start()
    there.close()
    tells.close()
    answering = threading.Thread(target=answer, args=(here,))
    answering.start()
    beside(told)
    took: list[float] = told.recv()
    answering.join()
    saying.join()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=400)
    args = parser.parse_args()
    table = Table(title=f"{args.words} words, microseconds with their answers; {os.cpu_count()} cores")
    for name in ("switch interval", "p50", "p90", "most", "x"):
        table.add_column(name, justify="right")
    resting = statistics.median(measured(args.words, rest_until))
    table.add_row("at rest", f"{resting:,.0f}", "", "", "1.0")
    for interval in INTERVALS_MS:
        sys.setswitchinterval(interval / 1000)
        took = measured(args.words, work_until)
        middle = statistics.median(took)
        times = [f"{each:,.0f}" for each in (middle, statistics.quantiles(took, n=10)[-1], max(took))]
        table.add_row(f"{interval:g} ms", *times, f"{middle / resting:.1f}")
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
