"""Decode-side reuse off against on: multi-turn chats, 32 at a time, a decode pool that holds them all with sharing.

python bench/e2e/reuse.py [--clock 0.5]
"""

import sys
from dataclasses import replace

from claims import Bench, Chats, main


def claim(bench: Bench) -> None:
    chats = Chats()
    setup = bench.setup(chats.working_set, chats)
    names = ("reuse off", "reuse on")
    bench.pair("decode-side reuse", replace(setup, reuse="off"), setup, chats.load(32), names)


if __name__ == "__main__":
    sys.exit(main(__doc__, claim))
