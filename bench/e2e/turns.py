"""Time to first token turn by turn, decode-side reuse off against on: without reuse it grows with the history.

python bench/e2e/turns.py [--clock 0.5]
"""

import sys
from dataclasses import replace

from claims import Bench, Chats, main


def claim(bench: Bench) -> None:
    chats = Chats(conversations=12, turns=10, output=32)
    setup = bench.setup(2 * chats.working_set, chats)
    names = ("reuse off", "reuse on")
    bench.pair("time to first token by turn", replace(setup, reuse="off"), setup, chats.load(4), names)


if __name__ == "__main__":
    sys.exit(main(__doc__, claim))
