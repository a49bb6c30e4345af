"""Decode-side reuse off against on at 1, 4 and 128 requests at a time. Published evidence has the last alone.

python bench/e2e/concurrency.py [--clock 0.5]
"""

import sys
from dataclasses import replace

from claims import Bench, Chats, main


def claim(bench: Bench) -> None:
    for concurrency, chats in (
        (1, Chats(conversations=6, turns=4)),
        (4, Chats(conversations=16, turns=4)),
        (128, Chats(conversations=128, turns=3, output=48)),
    ):
        setup = bench.setup(max(chats.working_set // 2, 2 * chats.pages), chats)
        title = f"{concurrency} at a time, a pool of half the working set"
        load = chats.load(concurrency)
        bench.pair(title, replace(setup, reuse="off"), setup, load, ("reuse off", "reuse on"))


if __name__ == "__main__":
    sys.exit(main(__doc__, claim))
