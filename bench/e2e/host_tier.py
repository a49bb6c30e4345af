"""Host tier off against on: a decode pool of a third of the working set, and more chats open than run.

python bench/e2e/host_tier.py [--clock 0.5]
"""

import sys
from dataclasses import replace

from claims import Bench, Chats, main


def claim(bench: Bench) -> None:
    chats = Chats(conversations=40)
    setup = bench.setup(chats.working_set // 3, chats)
    ours = replace(setup, host_pages=chats.working_set)
    names = ("device pool alone", "with a host tier")
    bench.pair("host tier", setup, ours, chats.load(8, "--active", "40"), names)


if __name__ == "__main__":
    sys.exit(main(__doc__, claim))
