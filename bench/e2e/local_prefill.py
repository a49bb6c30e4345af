"""Short unmatched parts computed by the decode worker itself, off against on: short questions behind a long history
need no prefill server and no transfer, and cost the decode batch the time of a chunk.

    python bench/e2e/local_prefill.py [--clock 0.5]
"""

import sys
from dataclasses import replace

from claims import PAGE, Bench, Chats, main


def claim(bench: Bench) -> None:
    chats = Chats(conversations=16, turns=6, system=4_000, user=150, output=48)
    setup = bench.setup(2 * chats.working_set, chats)
    ours = replace(setup, local_prefill_max_tokens=chats.user + chats.output + PAGE)
    names = ("all by prefill workers", f"up to {ours.local_prefill_max_tokens} tokens locally")
    bench.pair("short unmatched parts", setup, ours, chats.load(8), names)


if __name__ == "__main__":
    sys.exit(main(__doc__, claim))
