"""`python with_slow_growth.py COMMAND ...`: kvferry's command line in this process, whose host tier grows in small
chunks, each made slowly. A command is `PYTHON -m kvferry WORDS`, as `Stack.start` puts it behind a prefix.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection

from kvferry.daemon.memory import growing_rows
from kvferry.transfer.host_tier.rows import AnonymousRows, FileRows

CHUNK_BYTES, CHUNK_SECONDS = 64 << 10, 0.25

makes = {kind: kind.make for kind in (AnonymousRows, FileRows)}


def slowly(rows: AnonymousRows | FileRows, start: int, end: int, cpus: Collection[int]) -> None:
    time.sleep(CHUNK_SECONDS)
    makes[type(rows)](rows, start, end, cpus)


if __name__ == "__main__":
    growing_rows.CHUNK_BYTES = CHUNK_BYTES
    AnonymousRows.make = FileRows.make = slowly  # type: ignore[method-assign, assignment]
    from kvferry.daemon.cli.main import main

    words = sys.argv[1:]
    sys.argv = ["kvferry", *words[words.index("kvferry") + 1 :]]
    sys.exit(main())
