"""What reading a request and writing both its halves costs the front end before vLLM servers.

python bench/front_bodies.py [--output bench/results/front_bodies.txt]

Beside it in the same run: what is read into objects and written twice by Python's `json`, and the same by msgspec; and
the limit, one look at each byte (UTF-8 checked) and two copies of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import timeit
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvferry.front.vllm_body import parse_body

ID = bytes(16)
REPEATS, SECONDS = 7, 0.2


def prompts() -> dict[str, bytes]:
    chosen = random.Random(1)
    ids = [chosen.randrange(1000, 100_000) for _ in range(10_000)]
    asked = {"model": "m", "temperature": 0, "stream": True, "max_tokens": 128}
    turns = [{"role": ("user", "assistant")[i % 2], "content": "the ferry leaves at nine " * 80} for i in range(20)]
    return {
        "10,000 token ids": json.dumps({**asked, "prompt": ids}).encode(),
        "chat of 20 turns, 10,000 tokens": json.dumps({**asked, "messages": turns}).encode(),
        "chat of one turn, 20 tokens": json.dumps({**asked, "messages": turns[:1]}).encode()[:300] + b'"}]}',
    }


def split(data: bytes) -> None:
    body = parse_body(data)
    assert body.can_be_split and body.head and body.for_prefill(ID) and body.for_decode(ID, "p")


def by_objects(loads: Callable[[bytes], object], dumps: Callable[[object], object]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        fields = loads(data)
        dumps(fields)
        dumps(fields)

    return run


def least(data: bytes) -> None:
    data.decode()
    bytearray(data), bytearray(data)


def microseconds(run: Callable[[bytes], None], data: bytes) -> float:
    timer = timeit.Timer(lambda: run(data))
    count = max(1, int(SECONDS / REPEATS / max(1e-7, timer.timeit(3) / 3)))
    return min(timer.repeat(REPEATS, count)) / count * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    console = Console(record=True, width=120)
    console.print("python bench/front_bodies.py")
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    table = Table(title="microseconds a request, the least of seven; in brackets times ours")
    for name in ("body", "KiB", "ours", "json", "msgspec, objects", "check and copies"):
        table.add_column(name, justify="left" if name == "body" else "right")
    for name, data in prompts().items():
        ours = microseconds(split, data)
        others = [
            microseconds(run, data)
            for run in (
                by_objects(json.loads, lambda fields: json.dumps(fields).encode()),
                by_objects(msgspec.json.decode, msgspec.json.encode),
                least,
            )
        ]
        shown = [f"{each:.1f} ({each / ours:.2f})" for each in others]
        table.add_row(name, f"{len(data) / 1024:.1f}", f"{ours:.1f}", *shown)
    console.print(table)
    if args.output:
        args.output.write_text(console.export_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
